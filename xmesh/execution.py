"""Execution: one rank's part of one call, as a state machine that never blocks.

Every message belongs to a chunk. A chunk can be sent once it is here: at the root from the start,
at a relay when it has arrived, so a relay passes on each chunk while the next one comes in. Three
rules keep this free of deadlock with bounded memory:

- messages between two ranks on one channel keep the order of the plan, and a few receives are
  posted ahead on each, so that transfers which arrive side by side are relayed side by side;
- staging memory goes to receives in the order of the plan, and the first of them never waits;
- few sends are in flight at a time, but one that comes before all of those in flight may always go.

The message that is earliest in the plan among all unfinished ones can then always be posted on both
sides, whatever the other ranks do.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmesh.arrays import Bytes, contiguous_bytes, pack, unpack
from xmesh.program import Message, Program, Region
from xmesh.staging import Staging
from xmesh.transport.base import Endpoint, Handle

#: Sends in flight: enough to hide the latency between two chunks; more would undo the order.
SENDS_IN_FLIGHT = 4
#: Receives posted ahead on one line (a peer and a channel), and on all lines together.
RECEIVES_PER_LINE = 6
RECEIVES_POSTED = 64

_NOTHING = np.empty(0, np.uint8)

#: A peer and a channel.
Line = tuple[int, int]


class _Chunk:
    """State of one chunk during a call."""

    __slots__ = ("buffer", "here", "missing", "readers", "staged", "users")

    def __init__(self) -> None:
        self.here = False
        self.missing = False
        self.buffer: Bytes | None = None
        self.staged = False
        #: Sends that are still to end.
        self.readers = 0
        #: Messages in flight that use the buffer.
        self.users = 0


class Execution:
    """One call on one rank.

    Args:
        program: what to do.
        endpoint: how to reach the others.
        tag: of this call's first channel; the others follow.
        staging: memory for chunks that are not contiguous in the caller's arrays.
        sources: arrays of plain elements, one for each box held; None when the caller's argument
            was wrong, in which case empty messages go out in place of data.
        destinations: writable arrays of plain elements, one for each box needed.
        sink: the destinations keep nothing, so a chunk that is still to be relayed must stay in
            staging memory.
    """

    def __init__(
        self,
        program: Program,
        endpoint: Endpoint,
        tag: int,
        staging: Staging,
        sources: Sequence[NDArray[Any]] | None,
        destinations: Sequence[NDArray[Any]],
        sink: bool = False,
    ) -> None:
        self._sink = sink
        self._program = program
        self._endpoint = endpoint
        self._tag = tag
        self._staging = staging
        self._sources = sources
        self._destinations = destinations
        self._chunks = [_Chunk() for _ in program.pieces]
        #: Line -> messages still to come that are not posted; and how many are posted there.
        self._receives: dict[Line, deque[Message]] = {}
        for message in program.receives:
            self._receives.setdefault((message.peer, message.channel), deque()).append(message)
        self._posted_on = dict.fromkeys(self._receives, 0)
        #: (order, line) of the first message on each line where one more may be posted.
        self._open = [(messages[0].order, line) for line, messages in self._receives.items()]
        heapq.heapify(self._open)
        #: Orders of the receives that are posted.
        self._receiving: list[int] = []
        #: Line -> messages yet to be sent.
        self._sends: dict[Line, deque[Message]] = {}
        for message in program.sends:
            self._sends.setdefault((message.peer, message.channel), deque()).append(message)
            self._chunks[message.piece].readers += 1
        for chunk, piece in zip(self._chunks, program.pieces, strict=True):
            chunk.here = piece.root
            chunk.missing = piece.root and sources is None
        #: (order, line) of the first message on each line to a peer, where its chunk is here.
        self._ready: list[tuple[int, Line]] = []
        for line in self._sends:
            self._offer(line)
        self._posted: list[tuple[Message, bool, Handle]] = []
        #: Chunks packed and kept for a later send; packed again where memory runs short.
        self._kept: dict[int, None] = {}
        self._sending: list[int] = []
        self._copied = False
        #: Root ranks whose data never came because their own call was refused.
        self.refused: set[int] = set()

    @property
    def done(self) -> bool:
        """Nothing left to do."""
        return (
            self._copied
            and not self._posted
            and not any(self._receives.values())
            and not any(self._sends.values())
        )

    def step(self) -> bool:
        """Move on as far as possible without waiting; True when anything happened."""
        moved = self._complete()
        moved |= self._post_receives()
        moved |= self._post_sends()
        if not self._copied:
            # After the first messages are on their way: memory is copied while they travel.
            self._copy()
            moved = True
        return moved

    def outstanding(self) -> tuple[int, Message | None, bool]:
        """Bytes still to come and go, and the first unfinished message, a receive if any."""
        receives = [m for m, incoming, _ in self._posted if incoming]
        receives += [m for messages in self._receives.values() for m in messages]
        sends = [m for m, incoming, _ in self._posted if not incoming]
        sends += [m for messages in self._sends.values() for m in messages]
        nbytes = sum(self._program.pieces[m.piece].nbytes for m in receives + sends)
        first = min(receives or sends, key=lambda m: m.order, default=None)
        return nbytes, first, bool(receives)

    def abandon(self) -> None:
        """Give up after a failure; the arrays stay with the transport."""
        receives = [handle for _, incoming, handle in self._posted if incoming]
        sends = [handle for _, incoming, handle in self._posted if not incoming]
        self._endpoint.abandon(receives, sends)
        self._posted.clear()
        self._receives.clear()
        self._sends.clear()
        self._copied = True

    def _views(self, regions: Sequence[Region], arrays: Sequence[NDArray[Any]]) -> list[Any]:
        return [_view(region, arrays) for region in regions]

    def _copy(self) -> None:
        self._copied = True
        if self._sources is not None:
            for source, destination in self._program.copies:
                np.copyto(_view(destination, self._destinations), _view(source, self._sources))

    def _complete(self) -> bool:
        finished = self._endpoint.completed([handle for _, _, handle in self._posted])
        if not finished:
            return False
        for index, nbytes in finished:
            message, incoming, _ = self._posted[index]
            if incoming:
                self._ended(message)
                self._arrived(message, nbytes)
            else:
                self._sending.remove(message.order)
                self._read(message.piece)
        gone = {index for index, _ in finished}
        self._posted = [entry for i, entry in enumerate(self._posted) if i not in gone]
        return True

    def _arrived(self, message: Message, nbytes: int) -> None:
        piece, chunk = self._program.pieces[message.piece], self._chunks[message.piece]
        chunk.here = True
        if nbytes != piece.nbytes:
            chunk.missing = True
            self.refused.add(piece.sender)
        elif chunk.staged and chunk.buffer is not None:
            unpack(chunk.buffer, self._views(piece.regions, self._destinations))
        self._unused(message.piece)
        for line in self._sends:
            self._offer(line, message.piece)

    def _post_receives(self) -> bool:
        posted = False
        while self._open and len(self._receiving) < RECEIVES_POSTED:
            order, line = self._open[0]
            message = self._receives[line][0]
            buffer = self._room(message.piece, order)
            if buffer is None:
                break
            heapq.heappop(self._open)
            self._receives[line].popleft()
            self._receiving.append(order)
            self._posted_on[line] += 1
            handle = self._endpoint.receive(buffer, message.peer, self._tag + message.channel)
            self._posted.append((message, True, handle))
            if self._posted_on[line] < RECEIVES_PER_LINE:
                self._show_next(line)
            posted = True
        return posted

    def _ended(self, message: Message) -> None:
        """A receive has ended: where its line was full, there is room for another."""
        line = (message.peer, message.channel)
        self._receiving.remove(message.order)
        if self._posted_on[line] == RECEIVES_PER_LINE:
            self._show_next(line)
        self._posted_on[line] -= 1

    def _show_next(self, line: Line) -> None:
        if self._receives[line]:
            heapq.heappush(self._open, (self._receives[line][0].order, line))

    def _room(self, index: int, order: int) -> Bytes | None:
        """Where a chunk is received: in place, or in staging memory; None while there is none."""
        piece, chunk = self._program.pieces[index], self._chunks[index]
        if len(piece.regions) == 1:
            chunk.buffer = contiguous_bytes(_view(piece.regions[0], self._destinations))
        if chunk.buffer is None:
            # The first message still to come must have room: everyone may be waiting for it.
            first = not self._receiving or order < min(self._receiving)
            chunk.buffer = self._take(piece.nbytes, must=first)
            chunk.staged = chunk.buffer is not None
        if chunk.buffer is not None:
            chunk.users += 1
        return chunk.buffer

    def _offer(self, line: Line, piece: int | None = None) -> None:
        """Queue the first message on a line if its chunk is here (and is the one given)."""
        waiting = self._sends[line]
        if waiting and self._chunks[waiting[0].piece].here and piece in (None, waiting[0].piece):
            heapq.heappush(self._ready, (waiting[0].order, line))

    def _post_sends(self) -> bool:
        posted = False
        while self._ready:
            order, line = self._ready[0]
            early = not self._sending or order < min(self._sending)
            if len(self._sending) >= SENDS_IN_FLIGHT and not early:
                break
            message = self._sends[line][0]
            data = self._data(message.piece, early)
            if data is None:
                break
            heapq.heappop(self._ready)
            self._sends[line].popleft()
            self._sending.append(order)
            self._chunks[message.piece].users += 1
            self._kept.pop(message.piece, None)
            handle = self._endpoint.send(data, message.peer, self._tag + message.channel)
            self._posted.append((message, False, handle))
            self._offer(line)
            posted = True
        return posted

    def _data(self, index: int, early: bool) -> Bytes | None:
        """The bytes of a chunk that is here; None when staging memory must be waited for."""
        piece, chunk = self._program.pieces[index], self._chunks[index]
        if chunk.missing:
            return _NOTHING
        if chunk.buffer is None:
            arrays = (self._sources or ()) if piece.root else self._destinations
            views = self._views(piece.regions, arrays)
            if len(views) == 1:
                chunk.buffer = contiguous_bytes(views[0])
            if chunk.buffer is None:
                chunk.buffer = self._take(piece.nbytes, must=early)
                if chunk.buffer is None:
                    return None
                chunk.staged = True
                pack(views, chunk.buffer)
        return chunk.buffer

    def _take(self, nbytes: int, must: bool) -> Bytes | None:
        """Staging memory, if need be that of a chunk which can be packed again."""
        buffer = self._staging.take(nbytes)
        if buffer is None and self._sink:
            return self._staging.take(nbytes, must=True)
        if buffer is None and self._kept:
            # The one kept last: each peer is sent the chunks in order, so it is needed last.
            index, _ = self._kept.popitem()
            self._drop(self._chunks[index])
            buffer = self._staging.take(nbytes)
        if buffer is None and must:
            buffer = self._staging.take(nbytes, must=True)
        return buffer

    def _read(self, index: int) -> None:
        self._chunks[index].readers -= 1
        self._unused(index)

    def _unused(self, index: int) -> None:
        """A message has no more use for the buffer of its chunk."""
        chunk = self._chunks[index]
        chunk.users -= 1
        if chunk.readers == 0 or (chunk.missing and chunk.users == 0):
            self._drop(chunk)
        elif chunk.staged and chunk.users == 0:
            self._kept[index] = None

    def _drop(self, chunk: _Chunk) -> None:
        if chunk.staged and chunk.buffer is not None:
            self._staging.give(chunk.buffer)
        chunk.buffer, chunk.staged = None, False


def _view(region: Region, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """A region in place; the ellipsis keeps that of a scalar an array."""
    index: Any = (*region.slices, ...)
    view: NDArray[Any] = arrays[region.array][index]
    return view
