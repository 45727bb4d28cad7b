"""Messages over MPI (mpi4py), in host memory or in that of a GPU where the library takes it.

One *context* per user communicator holds what the resharders on it share: a private communicator
for each set of ranks, so nothing of ours meets the user's messages and nothing is made twice.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from xmesh.arrays import Buffer, Bytes
from xmesh.errors import TransportError, explain
from xmesh.progress import Progress, Siblings
from xmesh.transport.base import Endpoint
from xmesh.transport.cuda_aware import (
    CudaAwareness,
    find_out,
    probe_on,
    query_cuda_support,
)
from xmesh.wait_policy import have_own_cores, own_cores

if TYPE_CHECKING:
    from xmesh.device.gpu import Gpu


@functools.cache
def _context_key() -> int:
    """MPI's key under which a communicator keeps its context."""
    return int(MPI.Comm.Create_keyval())


@functools.cache
def _abandoned_key() -> int:
    """MPI's key under which a communicator keeps requests that cannot be completed."""
    return int(MPI.Comm.Create_keyval())


class MpiContext:
    """What the resharders on one user communicator share in this process.

    Get it by ``MpiContext.of``. It is kept on the communicator itself (MPI attribute caching).
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        #: What moves transfers on, on all communicators of this process.
        self._siblings = Siblings()
        if comm != MPI.COMM_SELF:  # what belongs to the process is kept there
            self._siblings = MpiContext.of(MPI.COMM_SELF)._siblings
        #: Whoever waits for one transfer on this communicator moves them all on.
        self.progress = Progress(self._siblings)
        #: Some set-up on this communicator timed out.
        self.gave_up = False
        self._endpoints: dict[tuple[int, ...], MpiEndpoint] = {}
        self._cuda_awareness: dict[int, CudaAwareness] = {}
        #: What else belongs to this communicator, by whoever keeps it.
        self.kept: dict[type, Any] = {}

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> MpiContext:
        """The context of a communicator, made at the first call."""
        key = _context_key()
        context = comm.Get_attr(key)
        if not isinstance(context, MpiContext):
            context = cls(comm)
            comm.Set_attr(key, context)
            atexit.register(context.drain)
        return context

    def public(self, ranks: tuple[int, ...]) -> Endpoint:
        """Messages on the user's communicator itself, to agree before ours exists.

        Only the tag ``handshake_tag`` is used there, and only while resharders are made.
        """
        return _PublicEndpoint(self.comm, ranks)

    @property
    def handshake_tag(self) -> int:
        """The highest tag: the one that users are least likely to use."""
        return _tag_limit(self.comm)

    def drain(self) -> None:
        """Receive what set-ups that timed out have left on the user's communicator.

        Called at exit: MPICH 5.0 aborts in MPI_Finalize when messages on COMM_WORLD were never
        received. Waits a moment only where a set-up was given up here.
        """
        if MPI.Is_finalized() or self.comm == MPI.COMM_NULL:
            return
        end_s = time.monotonic() + (0.05 if self.gave_up else 0.0)
        while True:
            status = MPI.Status()
            if self.comm.Iprobe(MPI.ANY_SOURCE, self.handshake_tag, status):
                message = bytearray(status.Get_count(MPI.BYTE))
                self.comm.Recv([message, MPI.BYTE], status.Get_source(), self.handshake_tag)
            elif time.monotonic() >= end_s:
                return
            else:
                time.sleep(1e-3)

    def cuda_awareness(self, gpu: Gpu) -> CudaAwareness:
        """Whether this MPI library takes pointers to the memory of a GPU; found out once.

        Raises:
            OptionError: see ``find_out``.
        """
        if gpu.device not in self._cuda_awareness:
            self._cuda_awareness[gpu.device] = find_out(
                os.environ, query_cuda_support, probe_on(gpu)
            )
        return self._cuda_awareness[gpu.device]

    def cached(self, ranks: tuple[int, ...]) -> MpiEndpoint | None:
        """The endpoint of a group, where it exists and is sound."""
        return self._endpoints.get(ranks)

    def endpoint(self, ranks: tuple[int, ...], fresh: bool) -> MpiEndpoint:
        """This rank's endpoint in a group.

        Args:
            ranks: the group, ascending ranks of the user's communicator.
            fresh: make a new one, collectively over the group; all ranks have agreed to.
        """
        if fresh:
            group = self.comm.Get_group().Incl(ranks)
            private = self.comm.Create_group(group, self.handshake_tag - 1)
            group.Free()
            self._endpoints[ranks] = MpiEndpoint(private, ranks, self)
        endpoint = self._endpoints[ranks]
        endpoint.users += 1
        return endpoint

    def forget(self, endpoint: MpiEndpoint) -> None:
        """Make a new endpoint for its group the next time."""
        if self._endpoints.get(endpoint.ranks) is endpoint:
            del self._endpoints[endpoint.ranks]


def _tag_limit(comm: MPI.Intracomm) -> int:
    """MPI_TAG_UB, or what MPI guarantees where the library does not say."""
    limit = comm.Get_attr(MPI.TAG_UB)
    return limit if isinstance(limit, int) else 32767


class _Messages:
    """Sending and receiving on a communicator; shared by public and private endpoints."""

    def __init__(
        self, comm: MPI.Intracomm, ranks: tuple[int, ...], numbers: dict[int, int]
    ) -> None:
        self._comm = comm
        self._ranks = ranks
        self._numbers = numbers
        self._rank = comm.rank
        self._next_tag = 0
        #: Kept, as a rank that waits looks often.
        self._statuses: list[MPI.Status] = []

    @property
    def rank(self) -> int:
        """This rank, as numbered by the user's communicator."""
        return self._rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group, ascending."""
        return self._ranks

    @property
    def next_tag(self) -> int:
        """Lowest tag that this rank has not reserved."""
        return self._next_tag

    def host_name(self, rank: int) -> str:
        """Not known yet."""
        return "unknown"

    @property
    def own_cores(self) -> bool:
        """Not known yet."""
        return False

    def takes_device_memory(self, gpu: Gpu) -> bool:
        """Not known yet."""
        return False

    def reserve_tags(self, first: int, count: int) -> None:
        """Mark tags as taken."""
        limit = _tag_limit(self._comm)
        if first + count > limit:
            raise TransportError(
                explain(
                    "MPI has no tags left on this communicator",
                    values=f"tags up to {first + count} wanted, MPI_TAG_UB is {limit}",
                    remedy="reuse resharders in place of making new ones, or close() them all",
                )
            )
        self._next_tag = first + count

    def send(self, data: Buffer, peer: int, tag: int) -> MPI.Request:
        """Start to send bytes."""
        return self._comm.Isend([data, MPI.BYTE], self._numbers[peer], tag)

    def receive(self, buffer: Buffer, peer: int, tag: int) -> MPI.Request:
        """Start to receive at most ``len(buffer)`` bytes."""
        return self._comm.Irecv([buffer, MPI.BYTE], self._numbers[peer], tag)

    def completed(self, handles: Sequence[MPI.Request]) -> list[tuple[int, int]]:
        """Which messages are complete."""
        statuses = self._statuses
        while len(statuses) < len(handles):
            statuses.append(MPI.Status())
        if len(handles) == 1:  # as usual in small calls, and cheaper
            return [(0, statuses[0].Get_count(MPI.BYTE))] if handles[0].Test(statuses[0]) else []
        indices = MPI.Request.Testsome(handles, statuses)
        if not indices:
            return []
        return [
            (i, status.Get_count(MPI.BYTE)) for i, status in zip(indices, statuses, strict=False)
        ]

    def abandon(
        self,
        receives: Sequence[MPI.Request],
        sends: Sequence[MPI.Request],
        kept: Sequence[Any] = (),
    ) -> None:
        """Cancel receives; keep what is unfinished, and its buffers, as long as MPI runs."""
        # An interrupt may have come between completion and its book-keeping.
        receives = [request for request in receives if request != MPI.REQUEST_NULL]
        for request in receives:
            request.Cancel()
        # Sends are left alone: MPI-4 deprecates cancelling them, and MPICH 5.0 crashes on it.
        unfinished = [request for request in (*receives, *sends) if not request.Test()]
        before: Any = self._comm.Get_attr(_abandoned_key()) or []
        self._comm.Set_attr(_abandoned_key(), [*before, *unfinished, *kept])

    def release(self) -> None:
        """Nothing to free."""


class _PublicEndpoint(_Messages):
    """The user's own communicator: only for the handshake before ours exists."""

    def __init__(self, comm: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        super().__init__(comm, ranks, {rank: rank for rank in ranks})
        self._rank = comm.rank

    def host_name(self, rank: int) -> str:
        """Known only for this process."""
        return MPI.Get_processor_name() if rank == self._rank else "not known yet"


class MpiEndpoint(_Messages):
    """See ``xmesh.transport.base.Endpoint``; on a private communicator."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        context: MpiContext,
    ) -> None:
        super().__init__(comm, ranks, {rank: i for i, rank in enumerate(ranks)})
        self._rank = ranks[comm.rank]
        self._context = context
        found: list[tuple[str, frozenset[int]]] = comm.allgather(
            (MPI.Get_processor_name(), own_cores())
        )
        self._host_names = [name for name, _ in found]
        here = [cores for name, cores in found if name == self._host_names[comm.rank]]
        self._own_cores = have_own_cores(here, os.environ)
        self.users = 0
        self.broken = False

    def host_name(self, rank: int) -> str:
        """MPI's processor name."""
        return self._host_names[self._numbers[rank]]

    def gather_texts(self, text: str) -> Gathering:
        """Have each rank's text brought to all; all ranks call it, in the same order."""
        return Gathering(self._comm, text)

    def takes_device_memory(self, gpu: Gpu) -> bool:
        """As the library says and a trial shows."""
        return self._context.cuda_awareness(gpu).aware

    @property
    def own_cores(self) -> bool:
        """By processor names, affinities, and what the launcher says."""
        return self._own_cores

    def abandon(
        self,
        receives: Sequence[MPI.Request],
        sends: Sequence[MPI.Request],
        kept: Sequence[Any] = (),
    ) -> None:
        """After this, the group needs a new communicator: stray messages may still arrive here."""
        super().abandon(receives, sends, kept)
        self.broken = True
        self._context.forget(self)

    def release(self) -> None:
        """Free the communicator with its last user; a broken one is left to MPI_Finalize."""
        self.users -= 1
        if self.users == 0:
            self._context.forget(self)
            if not self.broken:
                self._comm.Free()


class Gathering:
    """Texts of all ranks on their way to all ranks; something to wait for, see ``Progress.wait``.

    Args:
        comm: the group; nothing else gathers on it at the time.
        text: this rank's.

    Attributes:
        texts: by place in the group, once it is over.
    """

    def __init__(self, comm: MPI.Intracomm, text: str) -> None:
        self._comm, self._own = comm, text.encode("utf-8", "surrogatepass")
        self._sizes = np.empty(comm.size, np.int64)
        size = np.array([len(self._own)], np.int64)
        self._buffers: tuple[Any, ...] = (size,)
        self._request = comm.Iallgather(size, self._sizes)
        self._all: Bytes | None = None
        self.texts: list[str] | None = None

    @property
    def over(self) -> bool:
        """All texts are here."""
        return self.texts is not None

    def abandon(self, endpoint: MpiEndpoint) -> None:
        """Give up: MPI may still write to what this has, which is kept as long as MPI runs."""
        endpoint.abandon([], [self._request], (self,))

    def step(self) -> bool:
        """Move on without waiting; True when anything happened."""
        if self.over or not self._request.Test():
            return False
        ends = np.cumsum(self._sizes)
        if self._all is None:
            self._all = np.empty(int(ends[-1]), np.uint8)
            counts, places = list(map(int, self._sizes)), list(map(int, ends - self._sizes))
            self._request = self._comm.Iallgatherv(
                self._own, [self._all, (counts, places), MPI.BYTE]
            )
        else:
            parts = np.split(self._all, ends[:-1])
            self.texts = [part.tobytes().decode("utf-8", "surrogatepass") for part in parts]
        return True
