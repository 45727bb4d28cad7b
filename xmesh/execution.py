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

from xmesh.arrays import Buffer
from xmesh.errors import XmeshError
from xmesh.memory import Fence, Memory
from xmesh.planner.fair import SENDS_IN_FLIGHT
from xmesh.program import Message, Piece, Program, Region
from xmesh.transport.base import Endpoint, Handle

#: Receives posted ahead on one line (a peer and a channel), and on all lines together.
RECEIVES_PER_LINE = 6
RECEIVES_POSTED = 64

_NOTHING = np.empty(0, np.uint8)


class Execution:
    """One call on one rank.

    Args:
        program: what to do.
        endpoint: how to reach the others.
        tag: of this call's first channel; the others follow.
        source_memory: in which the sources lie.
        destination_memory: in which the destinations lie, and chunks that are relayed.
        sources: arrays, one for each box held; None when the caller's argument
            was wrong, in which case empty messages go out in place of data.
        destinations: writable arrays, one for each box needed.
        fences: what must end before anything is posted.
        sink: the destinations keep nothing, so a chunk that is still to be relayed must stay in
            staging memory.
    """

    # Python shares the keys of up to 30 attributes among instances; with more, a small call takes a
    # tenth longer.
    __slots__ = (
        "_buffers",
        "_copied",
        "_destination_memory",
        "_destinations",
        "_endpoint",
        "_fences",
        "_handles",
        "_held",
        "_here",
        "_kept",
        "_left",
        "_loading",
        "_missing",
        "_most_sends",
        "_next_receive",
        "_next_send",
        "_open",
        "_posted",
        "_posted_on",
        "_program",
        "_readers",
        "_ready",
        "_receiving",
        "_sending",
        "_sink",
        "_source_memory",
        "_sources",
        "_staged",
        "_storing",
        "_tag",
        "_users",
        "refused",
    )

    def __init__(
        self,
        program: Program,
        endpoint: Endpoint,
        tag: int,
        source_memory: Memory,
        destination_memory: Memory,
        sources: Sequence[Any] | None,
        destinations: Sequence[Any],
        fences: Sequence[Fence] = (),
        sink: bool = False,
    ) -> None:
        self._sink = sink
        self._program = program
        self._endpoint = endpoint
        self._tag = tag
        self._source_memory = source_memory
        self._destination_memory = destination_memory
        # A relay sends from its destinations, so theirs counts where there are no sources.
        self._most_sends = SENDS_IN_FLIGHT + destination_memory.loads_ahead
        if sources:
            self._most_sends = SENDS_IN_FLIGHT + source_memory.loads_ahead
        self._fences = fences
        self._sources = sources
        self._destinations = destinations
        count = len(program.pieces)
        # State of each chunk, by piece: whether it is here; its memory, and whether that is staging
        # memory; sends that are still to end; messages in flight that use the memory.
        self._here = list(program.roots)
        self._buffers: list[Buffer | None] = [None] * count
        self._staged = [False] * count
        self._readers = list(program.readers)
        self._users = [0] * count
        #: Pieces whose data never comes: the rank that they start from had a wrong argument.
        self._missing: set[int] = set()
        if sources is None:
            self._missing.update(i for i, root in enumerate(program.roots) if root)
        #: By line, how many messages have been posted; and how many receives are posted now.
        self._next_receive = [0] * len(program.receive_lines.messages)
        self._next_send = [0] * len(program.send_lines.messages)
        self._posted_on = [0] * len(program.receive_lines.messages)
        #: Heaps of (order, line): lines where one more receive may be posted, and lines to a peer
        #: whose next message can leave.
        self._open = list(program.receive_lines.first)
        self._ready = list(program.first_sends)
        #: Orders of the receives, and of the sends, that are posted.
        self._receiving: list[int] = []
        self._sending: list[int] = []
        #: What is posted, as (message, whether it is a receive), and the transport's handles.
        self._posted: list[tuple[Message, bool]] = []
        self._handles: list[Handle] = []
        #: Messages that have not ended.
        self._left = len(program.receives) + len(program.sends)
        #: Chunks packed and kept for a later send; packed again where memory runs short.
        self._kept: dict[int, None] = {}
        #: What is being packed, by piece; sends that wait for that, in their order; what is being
        #: unpacked, as (fence, piece), and copied, with no piece.
        self._loading: dict[int, Fence] = {}
        self._held: deque[tuple[Message, Buffer]] = deque()
        self._storing: list[tuple[Fence, int | None]] = []
        self._copied = not program.copies
        #: Root ranks whose data never came because their own call was refused.
        self.refused: set[int] = set()

    @property
    def done(self) -> bool:
        """Nothing left to do."""
        return self._left == 0 and self._copied and not self._storing

    @property
    def enqueued(self) -> bool:
        """All messages have ended; copies on a GPU may still be under way."""
        return self._left == 0 and self._copied

    @property
    def fences(self) -> list[Fence]:
        """Of what the GPU has still to do."""
        return [fence for fence, _ in self._storing]

    @property
    def error(self) -> XmeshError | None:
        """Ranks agree before a call, not in it."""
        return None

    def step(self) -> bool:
        """Move on as far as possible without waiting; True when anything happened."""
        if self._fences:
            self._fences = [fence for fence in self._fences if not fence.done]
            if self._fences:
                return False
        moved = False
        if self._storing:
            moved = self._settle()
        if self._held:
            moved |= self._send_loaded()
        moved |= self._post_all()
        if not self._copied:
            # After the first messages are on their way: memory is copied while they travel.
            self._copy()
            moved = True
        if self._handles and self._complete():
            self._post_all()
            moved = True
        return moved

    def _post_all(self) -> bool:
        posted = bool(self._open) and self._post_receives()
        return (bool(self._ready) and self._post_sends()) or posted

    def waits_for(self) -> str:
        """Bytes still to come and go, and the first unfinished message, a receive if any."""
        receives = [message for message, incoming in self._posted if incoming]
        sends = [message for message, incoming in self._posted if not incoming]
        sends += [message for message, _ in self._held]
        for found, lines, done in (
            (receives, self._program.receive_lines, self._next_receive),
            (sends, self._program.send_lines, self._next_send),
        ):
            for messages, first in zip(lines.messages, done, strict=True):
                found += messages[first:]
        pieces = self._program.pieces
        text = f"{sum(pieces[m.piece].nbytes for m in receives + sends)} bytes outstanding"
        if self._fences:
            return f"{text}; the GPU has not come to the end of what was given to it before"
        first_left = min(receives or sends, key=lambda m: m.order, default=None)
        if first_left is None:
            return f"{text}; copies on the GPU have not ended"
        piece, peer = pieces[first_left.piece], first_left.peer
        boxes = " ".join(map(str, piece.boxes[:4]))
        return (
            f"{text}; next is box {boxes} ({piece.nbytes} bytes) {'from' if receives else 'to'} "
            f"rank {peer} (host {self._endpoint.host_name(peer)})"
        )

    def abandon(self, why: str) -> None:
        """Give up after a failure; the arrays stay with the transport."""
        handles: dict[bool, list[Handle]] = {True: [], False: []}
        for (_, incoming), handle in zip(self._posted, self._handles, strict=True):
            handles[incoming].append(handle)
        # Copies under way go on: they keep their memory, too.
        kept = (self._buffers, self._sources, self._destinations, self._held, self._storing)
        under_way = self._held or self._storing
        self._endpoint.abandon(handles[True], handles[False], kept if under_way else ())
        self._held, self._storing = deque(), []
        self._posted.clear()
        self._handles.clear()
        self._open.clear()
        self._ready.clear()
        self._next_receive = [len(m) for m in self._program.receive_lines.messages]
        self._next_send = [len(m) for m in self._program.send_lines.messages]
        self._left = 0
        self._copied = True

    def _copy(self) -> None:
        self._copied = True
        sources = self._sources
        if sources is not None:
            fence = self._destination_memory.copy(
                (view_of(source, sources), view_of(destination, self._destinations))
                for source, destination in self._program.copies
            )
            if fence is not None:
                self._storing.append((fence, None))

    def _complete(self) -> bool:
        finished = self._endpoint.completed(self._handles)
        if not finished:
            return False
        for index, nbytes in finished:
            message, incoming = self._posted[index]
            if incoming:
                self._ended(message)
                self._arrived(message.piece, nbytes)
            else:
                self._sending.remove(message.order)
                self._readers[message.piece] -= 1
            self._unused(message.piece)
        self._left -= len(finished)
        if len(finished) == len(self._handles):
            self._posted.clear()
            self._handles.clear()
        else:
            for index in sorted((index for index, _ in finished), reverse=True):
                del self._posted[index], self._handles[index]
        return True

    def _arrived(self, index: int, nbytes: int) -> None:
        piece, buffer = self._program.pieces[index], self._buffers[index]
        self._here[index] = True
        if nbytes != piece.nbytes:
            self._missing.add(index)
            self.refused.add(piece.sender)
        elif self._staged[index] and buffer is not None:
            views = [view_of(region, self._destinations) for region in piece.regions]
            fence = self._destination_memory.unpack(buffer, views)
            if fence is not None:
                self._users[index] += 1
                self._storing.append((fence, index))
        lines = self._program.send_lines
        for line in lines.of_piece[index]:
            message = lines.messages[line][self._next_send[line]]
            if message.piece == index:
                heapq.heappush(self._ready, (message.order, line))

    def _post_receives(self) -> bool:
        posted = False
        lines = self._program.receive_lines.messages
        while self._open and len(self._receiving) < RECEIVES_POSTED:
            order, line = self._open[0]
            message = lines[line][self._next_receive[line]]
            buffer = self._room(message.piece, order)
            if buffer is None:
                break
            heapq.heappop(self._open)
            self._next_receive[line] += 1
            self._receiving.append(order)
            self._posted_on[line] += 1
            self._users[message.piece] += 1
            self._post(message, True, buffer)
            if self._posted_on[line] < RECEIVES_PER_LINE:
                self._show_next(line)
            posted = True
        return posted

    def _post(self, message: Message, incoming: bool, data: Buffer) -> None:
        act = self._endpoint.receive if incoming else self._endpoint.send
        self._handles.append(act(data, message.peer, self._tag + message.channel))
        self._posted.append((message, incoming))

    def _send_loaded(self) -> bool:
        """Send what has been packed meanwhile; in order, as messages on one line keep theirs."""
        sent = False
        while self._held:
            message, data = self._held[0]
            fence = self._loading.get(message.piece)
            if fence is not None:
                if not fence.done:
                    break
                del self._loading[message.piece]
            self._held.popleft()
            self._post(message, False, data)
            sent = True
        return sent

    def _settle(self) -> bool:
        """Let go of the memory of what has been unpacked meanwhile."""
        left: list[tuple[Fence, int | None]] = []
        for fence, index in self._storing:
            if not fence.done:
                left.append((fence, index))
            elif index is not None:
                self._unused(index)
        settled = len(left) < len(self._storing)
        self._storing = left
        return settled

    def _ended(self, message: Message) -> None:
        """A receive has ended: where its line was full, there is room for another."""
        (line,) = self._program.receive_lines.of_piece[message.piece]
        self._receiving.remove(message.order)
        if self._posted_on[line] == RECEIVES_PER_LINE:
            self._show_next(line)
        self._posted_on[line] -= 1

    def _show_next(self, line: int) -> None:
        messages, place = self._program.receive_lines.messages[line], self._next_receive[line]
        if place < len(messages):
            heapq.heappush(self._open, (messages[place].order, line))

    def _room(self, index: int, order: int) -> Buffer | None:
        """Where a chunk is received: in place, or in staging memory; None while there is none."""
        piece, memory = self._program.pieces[index], self._destination_memory
        buffer = _in_place(piece, memory, self._destinations)
        if buffer is None:
            # The first message still to come must have room: everyone may be waiting for it.
            first = not self._receiving or order < min(self._receiving)
            buffer = self._take(memory, piece.nbytes, must=first)
            self._staged[index] = buffer is not None
        self._buffers[index] = buffer
        return buffer

    def _post_sends(self) -> bool:
        posted = False
        lines = self._program.send_lines.messages
        while self._ready:
            order, line = self._ready[0]
            early = not self._sending or order < min(self._sending)
            if len(self._sending) >= self._most_sends and not early:
                break
            message = lines[line][self._next_send[line]]
            data = self._data(message.piece, early)
            if data is None:
                break
            heapq.heappop(self._ready)
            self._next_send[line] += 1
            self._sending.append(order)
            self._kept.pop(message.piece, None)
            self._users[message.piece] += 1
            if self._held or message.piece in self._loading:
                self._held.append((message, data))
            else:
                self._post(message, False, data)
            if self._next_send[line] < len(lines[line]):
                following = lines[line][self._next_send[line]]
                if self._here[following.piece]:
                    heapq.heappush(self._ready, (following.order, line))
            posted = True
        return posted

    def _data(self, index: int, early: bool) -> Buffer | None:
        """The bytes of a chunk that is here; None when staging memory must be waited for."""
        if index in self._missing:
            return _NOTHING
        buffer = self._buffers[index]
        if buffer is None:
            piece = self._program.pieces[index]
            memory, arrays = self._source_memory, self._sources or ()
            if not piece.root:
                memory, arrays = self._destination_memory, self._destinations
            buffer = _in_place(piece, memory, arrays)
            if buffer is None:
                buffer = self._take(memory, piece.nbytes, must=early)
                if buffer is None:
                    return None
                self._staged[index] = True
                fence = memory.pack([view_of(region, arrays) for region in piece.regions], buffer)
                if fence is not None:
                    self._loading[index] = fence
            self._buffers[index] = buffer
        return buffer

    def _take(self, memory: Memory, nbytes: int, must: bool) -> Buffer | None:
        """Staging memory, if need be that of a chunk which can be packed again."""
        buffer = memory.staging.take(nbytes)
        if buffer is None and self._sink:
            return memory.staging.take(nbytes, must=True)
        if buffer is None and self._kept:
            # The one kept last: each peer is sent the chunks in order, so it is needed last.
            index, _ = self._kept.popitem()
            self._drop(index)
            buffer = memory.staging.take(nbytes)
        if buffer is None and must:
            buffer = memory.staging.take(nbytes, must=True)
        return buffer

    def _unused(self, index: int) -> None:
        """A message has no more use for the memory of its chunk."""
        self._users[index] -= 1
        if self._users[index]:
            return
        if self._readers[index] == 0 or index in self._missing:
            self._drop(index)
        elif self._staged[index]:
            self._kept[index] = None

    def _drop(self, index: int) -> None:
        buffer = self._buffers[index]
        if self._staged[index] and buffer is not None:
            root = self._program.pieces[index].root
            memory = self._source_memory if root else self._destination_memory
            memory.staging.give(buffer)
        self._buffers[index], self._staged[index] = None, False


def view_of(region: Region, arrays: Sequence[Any]) -> Any:
    """A region in place."""
    array = arrays[region.array]
    return array if region.whole else array[region.index]


def _in_place(piece: Piece, memory: Memory, arrays: Sequence[Any]) -> Buffer | None:
    """The bytes of a chunk where the caller's arrays have it, if a message can have them there."""
    regions = piece.regions
    return memory.in_place(view_of(regions[0], arrays)) if len(regions) == 1 else None
