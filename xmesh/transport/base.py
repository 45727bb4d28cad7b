"""What every transport offers to the executor: messages between the ranks of one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from xmesh.arrays import Buffer

if TYPE_CHECKING:
    from xmesh.device.gpu import Gpu

#: A message under way; what it is, only its transport knows.
Handle = Any


class Endpoint(Protocol):
    """One rank's access to messages within a fixed group of ranks.

    Messages from one rank to another under one tag arrive in the order in which they were sent.
    Nothing here blocks; a buffer belongs to the transport until its handle is reported complete.
    Ranks are named as in the plan, whatever numbers the transport uses inside.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group, ascending."""

    def host_name(self, rank: int) -> str:
        """Name of the host that a rank runs on, for error texts."""

    @property
    def own_cores(self) -> bool:
        """Each rank on this host has a core of its own, as far as is known."""

    def takes_device_memory(self, gpu: Gpu) -> bool:
        """Messages may be sent from a GPU's memory, and received into it."""

    def reserve_tags(self, first: int, count: int) -> None:
        """Mark tags as taken; ``first`` is agreed on by all ranks.

        Raises:
            TransportError: the library has no tag that high.
        """

    @property
    def next_tag(self) -> int:
        """Lowest tag that this rank has not reserved."""

    def send(self, data: Buffer, peer: int, tag: int) -> Handle:
        """Start to send bytes (may be none)."""

    def receive(self, buffer: Buffer, peer: int, tag: int) -> Handle:
        """Start to receive at most ``len(buffer)`` bytes."""

    def completed(self, handles: Sequence[Handle]) -> list[tuple[int, int]]:
        """Which messages are complete since the last look, as (index, bytes received).

        For a send the number means nothing.
        """

    def abandon(
        self, receives: Sequence[Handle], sends: Sequence[Handle], kept: Sequence[Any] = ()
    ) -> None:
        """Give up on messages after a failure: receives are cancelled, buffers kept alive.

        Args:
            receives: incoming messages.
            sends: outgoing ones.
            kept: what else must be kept alive, as long as there are buffers to keep.
        """

    def release(self) -> None:
        """This user is done with the endpoint; its last user frees what it holds."""
