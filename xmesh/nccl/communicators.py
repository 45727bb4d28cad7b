"""NCCL communicators of one process: few, shared by its resharders, freed by their last user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from xmesh.device.gpu import Gpu
from xmesh.errors import TransportError, explain
from xmesh.nccl.launcher import Job, Launcher, in_thread, wait_a_while
from xmesh.nccl.order import LaunchOrder
from xmesh.transport.mpi import MpiContext

Group = tuple[int, ...]

#: Seconds that ``close()`` waits for NCCL to free communicators: other ranks may close later.
_FREE_S = 5.0


@dataclass(eq=False)
class Communicator:
    """An NCCL communicator of some ranks.

    Attributes:
        group: its ranks, as in the plan, ascending; a rank's place is its number in NCCL.
        handle: CuPy's object.
        gpu: whose current device it was made on.
        parent: from which it was split.
        users: resharders of this process that use it, and communicators split from it.
        broken: why it cannot be used any more; "" while it can.
    """

    group: Group
    handle: Any
    gpu: Gpu
    parent: Communicator | None = None
    users: int = 0
    broken: str = ""

    def require_sound(self) -> None:
        """Make sure that it can be used.

        Raises:
            TransportError: it was aborted or freed.
        """
        if self.broken:
            raise TransportError(
                explain(
                    "a communicator of NCCL must be sound",
                    values=self.broken,
                    remedy="make a new Resharder on all ranks",
                )
            )

    def check(self) -> None:
        """Make sure that it has met no error.

        Raises:
            TransportError: it was aborted or freed.
            NcclError: what NCCL met on its own.
        """
        self.require_sound()
        self.handle.check_async_error()


def abort_all(communicators: Iterable[Communicator], why: str) -> None:
    """End their kernels, wherever they are: the last resort. Idempotent."""
    jobs: list[Job] = []
    for communicator in communicators:
        if not communicator.broken:
            communicator.broken = why
            # NCCL means it not to wait, but nothing promises that.
            jobs.append(in_thread(communicator.gpu, communicator.handle.abort))
    wait_a_while(jobs, _FREE_S)


class Communicators:
    """Those of one user communicator in this process.

    Attributes:
        order: of the launches of this process, on whatever communicator.
        launcher: does them.
    """

    def __init__(self, order: LaunchOrder, launcher: Launcher) -> None:
        self.order, self.launcher = order, launcher
        self._found: dict[tuple[Group, bool], Communicator] = {}

    @classmethod
    def of(cls, context: MpiContext) -> Communicators:
        """Those of a context, made at the first call."""
        from mpi4py import MPI

        if cls not in context.kept:
            # What belongs to the process is kept on the communicator that only it has.
            process = MpiContext.of(MPI.COMM_SELF).kept
            if LaunchOrder not in process:
                process[LaunchOrder] = LaunchOrder(MPI.COMM_WORLD.rank)
                process[Launcher] = Launcher()
            context.kept[cls] = cls(process[LaunchOrder], process[Launcher])
        found: Communicators = context.kept[cls]
        return found

    def sound(self, group: Group, parent: bool = False) -> Communicator | None:
        """The communicator of a group, where there is one that can be used."""
        found = self._found.get((group, parent))
        return None if found is None or found.broken else found

    def keep(self, made: Communicator, parent: bool = False) -> None:
        """Let later resharders use it, too."""
        self._found[made.group, parent] = made

    def release(self, used: Sequence[Communicator]) -> None:
        """A user is done with some; those without users are freed, the parents of others last."""
        free: list[Communicator] = []
        for communicator in used:
            self._release(communicator, free)
        for key, found in tuple(self._found.items()):
            if found in free:
                del self._found[key]
        sound = [communicator for communicator in free if not communicator.broken]
        for communicator in sound:
            communicator.broken = "it was freed"

        def destroy() -> None:
            for communicator in sound:
                communicator.handle.destroy()

        if sound:
            # In a thread: NCCL may wait for ranks of this host that close later.
            wait_a_while([in_thread(sound[0].gpu, destroy)], _FREE_S)

    def _release(self, communicator: Communicator, free: list[Communicator]) -> None:
        communicator.users -= 1
        if communicator.users == 0:
            free.append(communicator)
            if communicator.parent is not None:
                self._release(communicator.parent, free)
