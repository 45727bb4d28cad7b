"""What a resharder keeps for NCCL on one rank: program, communicators, and memory for packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xmesh.agreement import Agreement, Record
from xmesh.arguments import check_device
from xmesh.device.array import DeviceArray
from xmesh.device.gpu import Fence, Gpu, met_an_error
from xmesh.device.memory import AwareMemory
from xmesh.errors import ArrayError, PeerError, XmeshError, explain
from xmesh.interop import AnyArray
from xmesh.nccl.communicators import Communicators, abort_all
from xmesh.nccl.execution import NcclExecution, Slots
from xmesh.nccl.launcher import Launcher
from xmesh.nccl.making import Connected
from xmesh.nccl.order import LaunchOrder, Ticket
from xmesh.nccl.program import Launch, NcclProgram
from xmesh.nccl.tally import Tally
from xmesh.planner import Plan
from xmesh.progress import Progress
from xmesh.transport.base import Endpoint

_SLOTS = 4


class NcclLink:
    """See the module.

    Args:
        plan: whose transfers.
        program: this rank's part of it.
        endpoint: all ranks of the plan, for what they agree on before each call.
        connected: communicators of this rank; they are given back by ``release``.
        kept: where they come from.
        gpu: of this rank.
        progress: moves what is in flight on the user's communicator.
    """

    def __init__(
        self,
        plan: Plan,
        program: NcclProgram,
        endpoint: Endpoint,
        connected: Connected,
        kept: Communicators,
        gpu: Gpu,
        progress: Progress,
    ) -> None:
        self.plan, self.program, self.endpoint = plan, program, endpoint
        self.communicators, self._used, self._kept = *connected, kept
        self.gpu, self.progress = gpu, progress
        operations = [op for launch in program.launches for op in launch.operations]
        slot_nbytes = max((op.nbytes for op in operations), default=0)
        self.memory = AwareMemory(gpu, slot_nbytes, 0)
        self.slots = Slots(gpu, slot_nbytes, _SLOTS, kept.launcher.lanes(gpu))

    @property
    def nbytes(self) -> int:
        """Memory for packing that it holds now."""
        return self.slots.nbytes

    @property
    def order(self) -> LaunchOrder:
        """Of the launches of this process."""
        return self._kept.order

    def ready(
        self, sources: Sequence[AnyArray], outputs: Sequence[AnyArray], new: bool
    ) -> list[Any]:
        """Check that arrays lie on this rank's GPU; events to wait for before they are touched.

        Args:
            sources: this rank's.
            outputs: this rank's.
            new: outputs are new arrays, made as ``like`` says.

        Raises:
            ArrayError: they do not.
            MemoryError: the GPU has no room for packing.
            TransportError: a communicator was aborted.
        """
        for what, arrays in (("local", sources), ("out", outputs)):
            if any(not isinstance(a, DeviceArray) and a.size for a in arrays):
                unsaid = new and what == "out"
                raise ArrayError(
                    explain(
                        f"{'new outputs' if unsaid else what} must lie in GPU memory for NCCL",
                        values="a new one of NumPy, as this rank's Resharder was made without like="
                        if unsaid
                        else "an array in host memory",
                        context=f"rank {self.endpoint.rank}, tensor {self.plan.name!r}, "
                        f"{self.plan.src} -> {self.plan.dst}",
                        remedy=("make the Resharder with like=cupy" if unsaid else "copy it to the")
                        + (", or pass out=" if unsaid else " GPU (cupy.asarray)")
                        + ", or use transport='mpi'",
                    )
                )
        for communicator in self.communicators.values():
            communicator.require_sound()
        check_device(self.plan, self.endpoint.rank, [*sources, *outputs], self.gpu.device)
        if self._must_pack(sources, outputs):
            self.slots.prepare(_SLOTS)
        return self.gpu.producers([a for a in (*sources, *outputs) if isinstance(a, DeviceArray)])

    def call(
        self,
        tag: int,
        problem: XmeshError | None,
        sources: Sequence[AnyArray],
        outputs: Sequence[AnyArray],
        ready: Sequence[Any],
    ) -> NcclCall:
        """Begin a call.

        Args:
            tag: of its first channel.
            problem: what is wrong with this rank's arguments; all ranks raise it.
            sources: checked by ``ready``.
            outputs: checked by ``ready``.
            ready: from ``ready``.
        """
        return NcclCall(self, tag, problem, sources, outputs, ready)

    @property
    def launcher(self) -> Launcher:
        """Gives work to NCCL."""
        return self._kept.launcher

    def release(self) -> None:
        """Give the communicators back."""
        self._kept.release(self._used)
        self._used = []

    def _must_pack(self, sources: Sequence[AnyArray], outputs: Sequence[AnyArray]) -> bool:
        for launch in self.program.launches:
            for operation in launch.operations:
                arrays = sources if operation.root else outputs
                if len(operation.regions) > 1:
                    return True
                (region,) = operation.regions
                view: Any = arrays[region.array]
                if not region.whole:
                    view = view[region.index]
                if self.memory.in_place(view) is None:
                    return True
        return False


class NcclCall:
    """One call on one rank: all ranks ready, none with an error; then a turn; then the work.

    Ready means called, and done with what was given to the GPU before. So no kernel of NCCL is
    launched that would hold a part of a GPU while it waits for another rank's computation, and a
    wrong argument or a rank that is gone is met before anything moves.
    """

    def __init__(
        self,
        link: NcclLink,
        tag: int,
        problem: XmeshError | None,
        sources: Sequence[AnyArray],
        outputs: Sequence[AnyArray],
        ready: Sequence[Any],
    ) -> None:
        self._link, self._tag = link, tag
        self._record = Record(link.endpoint.rank)
        if problem is not None:
            self._record = Record.of_error(link.endpoint.rank, problem)
        self._arrays = sources, outputs
        #: What is under way; the next takes its place.
        self._ready = list(ready) if problem is None else []
        self._all_here: Tally | None = None
        self._errors: Agreement | None = None
        self._stamp: Tally | None = None
        self._ticket: Ticket | None = None
        self._execution: NcclExecution | None = None
        self._stepping = False
        self._failure: Exception | None = None
        self.error: XmeshError | None = None
        self.refused: set[int] = set()
        if not self._ready:
            self._join()

    def _join(self) -> None:
        """This rank is ready."""
        self._all_here = Tally(self._link.endpoint, self._tag, self._record.error_rank >= 0)

    @property
    def done(self) -> bool:
        """Everything has ended, or all ranks know of an error."""
        return self.error is not None or (self._execution is not None and self._execution.done)

    @property
    def enqueued(self) -> bool:
        """All of it has been given to the GPU."""
        return self._execution is not None and self._execution.launched

    @property
    def fences(self) -> list[Fence]:
        """Of what the GPU has still to do."""
        return [] if self._execution is None else self._execution.fences

    def step(self) -> bool:
        """Move on; True when anything happened."""
        if self._failure is not None:
            raise self._failure
        if self._stepping or self.done:
            return False
        self._stepping = True  # a call that this one waits for may try to move this one on
        try:
            return self._step()
        finally:
            self._stepping = False

    def _step(self) -> bool:
        link = self._link
        if self._ready:
            try:
                self._ready = [fence for fence in self._ready if not fence.done]
            except Exception as error:
                rank, host = link.endpoint.rank, link.endpoint.host_name(link.endpoint.rank)
                where = f"rank {rank} (host {host}), tensor {link.plan.name!r}"
                self._record = Record.of_error(rank, met_an_error(error, where))
                self._ready = []
            if self._ready:
                return False
            self._join()
        if self._all_here is not None:
            moved = self._all_here.step()
            if self._all_here.over:
                (errors,) = self._all_here.result or (0,)
                self._all_here = None
                if errors:
                    self._errors = Agreement(link.endpoint, self._tag + 1, self._record)
                else:
                    self._propose()
                return True
            return moved
        if self._errors is not None:
            moved = self._errors.step()
            if self._errors.over and self._errors.verdict is not None:
                self.error = self._errors.verdict.error()
                self._errors = None
            return moved
        if self._stamp is not None:
            moved = self._stamp.step()
            if not self._stamp.over:
                return moved
            number, unique = self._stamp.result or (0, 0)
            self._stamp = None
            assert self._ticket is not None
            link.order.settle(self._ticket, (number, unique))
        if self._execution is None:
            if self._ticket is None or not link.order.is_next(self._ticket):
                return False
            self._execution = NcclExecution(
                link.program,
                link.communicators,
                link.memory,
                link.slots,
                link.launcher,
                *self._arrays,
            )
            link.order.leave(self._ticket)  # the launcher keeps the order from here on
            self._ticket = None
        return self._execution.step()

    def _propose(self) -> None:
        link = self._link
        self._ticket = link.order.propose(self._step_from_elsewhere, f"tensor {link.plan.name!r}")
        root = link.endpoint.rank == link.endpoint.ranks[0]
        unique = link.order.unique() if root else 0
        self._stamp = Tally(link.endpoint, self._tag + 2, self._ticket.proposed, unique)

    def _step_from_elsewhere(self) -> None:
        """For a call on another communicator, which is behind this one; never blocks."""
        lock = self._link.progress.lock
        if lock.acquire(blocking=False):
            try:
                self.step()
            except Exception as error:
                self._failure = error  # for those who wait for this call, when they step it
            finally:
                lock.release()

    def abandon(self, why: str) -> None:
        """Give up."""
        for under_way in (self._all_here, self._errors, self._stamp):
            if under_way is not None:
                under_way.abandon()
        self._all_here = self._errors = self._stamp = None
        self._ready = []
        kept: tuple[Any, ...] = ()
        if self._execution is not None:
            kept = self._execution.abandon(why)
        elif self._ticket is not None:
            # Others may have launched by now, and what they did must not meet a later call's.
            abort_all(self._link.communicators.values(), why)
        if self._ticket is not None:
            self._link.order.leave(self._ticket)
            self._ticket = None
        if kept:
            self._link.endpoint.abandon([], [], kept)
        if self._execution is None and self.error is None:
            self.error = PeerError(why)

    def waits_for(self) -> str:
        """What is left, in words."""
        endpoint = self._link.endpoint
        if self._ready:
            return "this rank's GPU has not come to the end of what was given to it before"
        agreeing = self._all_here or self._errors or self._stamp
        if agreeing is not None:
            peers = agreeing.waiting_for()
            names = ", ".join(f"{p} (host {endpoint.host_name(p)})" for p in peers)
            return f"nothing heard from rank {names}; nothing was launched"
        if self._execution is None:
            before = None if self._ticket is None else self._link.order.holds_back(self._ticket)
            name = "another call" if before is None else f"the call for {before.name}"
            return f"{name} of this process comes first, and not all of its ranks go on with it"
        nbytes, launch = self._execution.outstanding()
        text = f"{nbytes} bytes outstanding"
        return f"{text}; next is {_named(launch, endpoint)}" if launch is not None else text


def _named(launch: Launch, endpoint: Endpoint) -> str:
    operation = launch.operations[0]
    what = {"broadcast": "a broadcast of rank", "send": "a send to rank", "recv": "one of rank"}
    return (
        f"{what[operation.kind]} {operation.peer} (host {endpoint.host_name(operation.peer)}), "
        f"{operation.nbytes} bytes"
    )
