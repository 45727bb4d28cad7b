"""What ranks really do in a call: an endpoint that notes when each message is posted and ends.

The executor knows nothing of it. Messages on one line, a peer and a tag, keep the order of the
program, so the endpoint can tell by itself which message is which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xmesh.arrays import Buffer
from xmesh.clocks import now_s
from xmesh.planner import Plan
from xmesh.program import CHANNELS, Message, Program
from xmesh.report import Call, Span
from xmesh.transport.base import Endpoint, Handle

if TYPE_CHECKING:
    from xmesh.device.gpu import Gpu

#: Incoming or not, a peer, a channel.
Line = tuple[bool, int, int]


@dataclass
class Record:
    """One end of a message, in the time of the rank that it is on.

    Attributes:
        peer: the other rank.
        incoming: it comes from the peer.
        order: the order of its transfer.
        chunk: index of the chunk in the transfer.
        nbytes: bytes that were sent or received; -1 until they were received.
        posted_s: when the rank gave it to the transport.
        ended_s: when the rank saw that it had ended; None until then.
    """

    peer: int
    incoming: bool
    order: tuple[int, ...]
    chunk: int
    nbytes: int
    posted_s: float
    ended_s: float | None = None


@dataclass
class CallRecord:
    """One rank's part of one call, in its own time.

    Attributes:
        rank: whose.
        began_s: when the rank called.
        ended_s: when its part was over; None until then.
        records: its messages, in the order in which they were posted.
        posted: number of messages posted so far on each line: direction, peer and channel.
    """

    rank: int
    began_s: float
    ended_s: float | None = None
    records: list[Record] = field(default_factory=list)
    posted: Counter[Line] = field(default_factory=Counter)


class RecordingEndpoint:
    """An endpoint that keeps records of the messages of calls; see ``Endpoint``.

    Args:
        endpoint: which really sends and receives.
        plan: whose messages they are.
        program: that of this rank.
        first_tag: of the first channel of the first call.
        call_of: which call uses a set of tags now.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        plan: Plan,
        program: Program,
        first_tag: int,
        call_of: Callable[[int], CallRecord | None],
    ) -> None:
        self._endpoint = endpoint
        self._first_tag = first_tag
        self._call_of = call_of
        #: Transfer and chunk of the messages on each line, in their order.
        self._lines: dict[Line, list[tuple[tuple[int, ...], int]]] = {}
        transfers = plan.transfers(program.rank)
        first = {piece.transfer: i for i, piece in reversed(list(enumerate(program.pieces)))}

        def add(messages: Iterable[Message], incoming: bool) -> None:
            for message in messages:
                place = program.pieces[message.piece].transfer
                line = self._lines.setdefault((incoming, message.peer, message.channel), [])
                line.append((transfers[place].order, message.piece - first[place]))

        add(program.receives, incoming=True)
        add(program.sends, incoming=False)
        self._under_way: dict[int, Record] = {}

    @property
    def rank(self) -> int:
        """This rank."""
        return self._endpoint.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group."""
        return self._endpoint.ranks

    @property
    def own_cores(self) -> bool:
        """Each rank here has a core of its own."""
        return self._endpoint.own_cores

    @property
    def next_tag(self) -> int:
        """Lowest tag that is not reserved."""
        return self._endpoint.next_tag

    def host_name(self, rank: int) -> str:
        """Name of a rank's host."""
        return self._endpoint.host_name(rank)

    def takes_device_memory(self, gpu: Gpu) -> bool:
        """Messages may lie in a GPU's memory."""
        return self._endpoint.takes_device_memory(gpu)

    def reserve_tags(self, first: int, count: int) -> None:
        """Mark tags as taken."""
        self._endpoint.reserve_tags(first, count)

    def send(self, data: Buffer, peer: int, tag: int) -> Handle:
        """Start to send."""
        posted_s = now_s()
        handle = self._endpoint.send(data, peer, tag)
        self._note(handle, peer, tag, False, len(data), posted_s)
        return handle

    def receive(self, buffer: Buffer, peer: int, tag: int) -> Handle:
        """Start to receive."""
        posted_s = now_s()
        handle = self._endpoint.receive(buffer, peer, tag)
        self._note(handle, peer, tag, True, -1, posted_s)
        return handle

    def completed(self, handles: Sequence[Handle]) -> list[tuple[int, int]]:
        """Which messages are complete."""
        finished = self._endpoint.completed(handles)
        ended_s = now_s()
        for index, nbytes in finished:
            record = self._under_way.pop(id(handles[index]), None)
            if record is not None:
                record.ended_s = ended_s
                if record.incoming:
                    record.nbytes = nbytes
        return finished

    def abandon(
        self, receives: Sequence[Handle], sends: Sequence[Handle], kept: Sequence[Any] = ()
    ) -> None:
        """Give up on messages."""
        for handle in (*receives, *sends):
            self._under_way.pop(id(handle), None)
        self._endpoint.abandon(receives, sends, kept)

    def release(self) -> None:
        """The endpoint is released by those who made it."""

    def _note(
        self, handle: Handle, peer: int, tag: int, incoming: bool, nbytes: int, posted_s: float
    ) -> None:
        if tag < self._first_tag:
            return  # the agreement of the first call moves no data
        slot, channel = divmod(tag - self._first_tag, CHANNELS)
        call = self._call_of(slot)
        if call is None:
            return
        line = (incoming, peer, channel)
        order, chunk = self._lines[line][call.posted[line]]
        call.posted[line] += 1
        record = Record(peer, incoming, order, chunk, nbytes, posted_s)
        call.records.append(record)
        # The caller keeps the handle until it is reported complete, so its id is its own.
        self._under_way[id(handle)] = record


def on_one_axis(
    calls: Sequence[tuple[CallRecord, Callable[[float], float]]],
) -> list[Span | Call]:
    """The parts of all ranks in one call, from the moment when the first of them called.

    A receive is posted long before its data come, to be ready; it is taken to begin when its send
    was posted too, as far as clocks can be compared.

    Args:
        calls: each rank's part, and what takes its time to that of all.
    """
    zero_s = min((axis(call.began_s) for call, axis in calls), default=0.0)
    posted_s = {
        (call.rank, record.peer, record.order, record.chunk): axis(record.posted_s)
        for call, axis in calls
        for record in call.records
        if not record.incoming
    }
    found: list[Span | Call] = []
    for call, axis in calls:
        if call.ended_s is not None:
            found.append(Call(axis(call.began_s) - zero_s, axis(call.ended_s) - zero_s, call.rank))
        for record in call.records:
            if record.ended_s is None:
                continue
            begin_s, end_s = axis(record.posted_s), axis(record.ended_s)
            if record.incoming:
                sent = (record.peer, call.rank, record.order, record.chunk)
                begin_s = max(begin_s, posted_s.get(sent, begin_s))
            found.append(
                Span(
                    min(begin_s, end_s) - zero_s,
                    end_s - zero_s,
                    call.rank,
                    record.peer,
                    record.incoming,
                    record.order,
                    record.chunk,
                    record.nbytes,
                )
            )
    return found
