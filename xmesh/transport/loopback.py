"""All ranks inside one process: for tests, notebooks and looking at what a plan does.

Behaves as the strictest MPI would: a message moves only when its receive is posted (rendezvous),
so an order that needs buffering hangs here as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xmesh.arrays import Buffer
from xmesh.errors import TransportError, explain

if TYPE_CHECKING:
    from xmesh.device.gpu import Gpu


@dataclass(eq=False)
class _Message:
    buffer: Buffer
    receiving: bool
    nbytes: int = -1
    done: bool = False


@dataclass
class _Queue:
    """Unmatched messages of one (source, destination, tag): of one kind at any time."""

    sends: deque[_Message] = field(default_factory=deque)
    receives: deque[_Message] = field(default_factory=deque)

    def match(self) -> None:
        while self.sends and self.receives:
            send, receive = self.sends.popleft(), self.receives.popleft()
            size = len(send.buffer)
            if size > len(receive.buffer):
                raise TransportError(
                    explain(
                        "a message must fit its receive",
                        values=f"{size} bytes sent, {len(receive.buffer)} expected",
                        remedy="this is a defect of the plan or of xmesh; please report it",
                    )
                )
            receive.buffer[:size] = send.buffer
            receive.nbytes = size
            send.done = receive.done = True


class LoopbackGroup:
    """The mailboxes of a group of ranks that live in this process.

    Args:
        ranks: their numbers, as in the plan.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        self._queues: dict[tuple[int, int, int], _Queue] = {}
        #: What must live as long as this.
        self.kept: list[Any] = []

    def queue(self, source: int, destination: int, tag: int) -> _Queue:
        """Messages from one rank to another under one tag."""
        return self._queues.setdefault((source, destination, tag), _Queue())

    def endpoint(self, rank: int) -> LoopbackEndpoint:
        """Access for one rank."""
        return LoopbackEndpoint(self, rank)


class LoopbackEndpoint:
    """See ``xmesh.transport.base.Endpoint``."""

    def __init__(self, group: LoopbackGroup, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._next_tag = 0

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group, ascending."""
        return self._group.ranks

    def host_name(self, rank: int) -> str:
        """They all live here."""
        return "this process"

    @property
    def own_cores(self) -> bool:
        """They take turns."""
        return True

    @property
    def next_tag(self) -> int:
        """Lowest tag that this rank has not reserved."""
        return self._next_tag

    def takes_device_memory(self, gpu: Gpu) -> bool:
        """Messages are copied by the host."""
        return False

    def reserve_tags(self, first: int, count: int) -> None:
        """Mark tags as taken."""
        self._next_tag = first + count

    def send(self, data: Buffer, peer: int, tag: int) -> _Message:
        """Start to send bytes."""
        message = _Message(data, receiving=False)
        queue = self._group.queue(self._rank, peer, tag)
        queue.sends.append(message)
        queue.match()
        return message

    def receive(self, buffer: Buffer, peer: int, tag: int) -> _Message:
        """Start to receive at most ``len(buffer)`` bytes."""
        message = _Message(buffer, receiving=True)
        queue = self._group.queue(peer, self._rank, tag)
        queue.receives.append(message)
        queue.match()
        return message

    def completed(self, handles: Sequence[_Message]) -> list[tuple[int, int]]:
        """Which messages are complete."""
        return [(i, handle.nbytes) for i, handle in enumerate(handles) if handle.done]

    def abandon(
        self, receives: Sequence[_Message], sends: Sequence[_Message], kept: Sequence[Any] = ()
    ) -> None:
        """Take unmatched messages out of their queues."""
        self._group.kept.extend(kept)
        for queue in self._group._queues.values():
            for waiting in (queue.sends, queue.receives):
                for handle in (*receives, *sends):
                    if handle in waiting:
                        waiting.remove(handle)

    def release(self) -> None:
        """Nothing to free."""
