"""Call: one rank's part of one call of a Resharder, from its arguments to its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from xmesh.agreement import Agreement, Record
from xmesh.arguments import (
    check_device,
    check_local,
    check_out,
    check_overlap,
    check_same_memory,
    overlap,
    sinks,
)
from xmesh.device.array import DeviceArray
from xmesh.device.gpu import Gpu, met_an_error
from xmesh.device.memory import AwareMemory, DeviceMemory, StagedMemory
from xmesh.errors import ArrayError, PeerError, TransferTimeout, XmeshError, explain
from xmesh.execution import Execution
from xmesh.interop import AnyArray
from xmesh.like import NUMPY, Kind, kind_of
from xmesh.memory import HostMemory, Memory
from xmesh.planner import Plan
from xmesh.program import CHANNELS, Program
from xmesh.staging import Staging
from xmesh.transport.base import Endpoint

if TYPE_CHECKING:
    from xmesh.nccl.link import NcclLink
    from xmesh.request import Request

#: Calls of one resharder that may be in flight; each has tags of its own.
CALLS_IN_FLIGHT = 31
#: One for the agreement of the first call, and those of the calls.
NUM_TAGS = 1 + CALLS_IN_FLIGHT * CHANNELS


class Work(Protocol):
    """What a transport does in one call on one rank."""

    @property
    def done(self) -> bool:
        """Nothing left to do."""

    @property
    def enqueued(self) -> bool:
        """Nothing left to do but what a GPU has been given already."""

    @property
    def fences(self) -> Sequence[Any]:
        """Of what the GPU has still to do; of all that, once it is enqueued."""

    @property
    def refused(self) -> set[int]:
        """Ranks whose data never came because their own call was refused."""

    @property
    def error(self) -> XmeshError | None:
        """What all ranks raise."""

    def step(self) -> bool:
        """Move on as far as possible without waiting; True when anything happened."""

    def abandon(self, why: str) -> None:
        """Give up after a failure."""

    def waits_for(self) -> str:
        """What is left, in words."""


class Member:
    """One rank of the plan that runs in this process.

    Args:
        plan: see Resharder.
        endpoint: how to reach the others.
        program: what this rank does over messages.
        staging_nbytes: see Resharder.
        kind: of new outputs; None for that of the rank's local array.
        gpu: of this rank, where it is known from the start.
        nccl: what replaces messages, if anything.
    """

    def __init__(
        self,
        plan: Plan,
        endpoint: Endpoint,
        program: Program,
        staging_nbytes: int,
        kind: Kind | None = None,
        gpu: Gpu | None = None,
        nccl: NcclLink | None = None,
    ) -> None:
        self.plan = plan
        self.kind = kind
        self.rank = endpoint.rank
        self.endpoint = endpoint
        self.program = program
        self.nccl = nccl
        self._limit_nbytes = staging_nbytes
        self._slot_nbytes = max((piece.nbytes for piece in self.program.pieces), default=0)
        self.host = HostMemory(Staging(self._slot_nbytes, staging_nbytes))
        self._gpu = gpu
        self._device: DeviceMemory | None = None

    @property
    def staging_nbytes(self) -> int:
        """Staging memory that this rank holds now, in bytes."""
        on_gpu = 0 if self._device is None else self._device.staging.nbytes
        return self.host.staging.nbytes + on_gpu + (0 if self.nccl is None else self.nccl.nbytes)

    @property
    def gpu(self) -> Gpu:
        """This rank's GPU: by default the one that is current when it is first needed.

        Raises:
            TransportError: there is none.
        """
        if self._gpu is None:
            self._gpu = Gpu()
        return self._gpu

    @property
    def device(self) -> int | None:
        """Ordinal of this rank's GPU, once it is known."""
        return None if self._gpu is None else self._gpu.device

    def is_of_cuda(self, error: Exception) -> bool:
        """It comes from this rank's GPU, and not from an argument."""
        gpu = self._gpu
        return gpu is not None and isinstance(error, gpu.cupy.cuda.runtime.CUDARuntimeError)

    def memory_of(self, arrays: Sequence[AnyArray]) -> Memory:
        """The memory that arrays lie in, all of them in one.

        Raises:
            TransportError: they lie on a GPU, and CuPy cannot use it.
        """
        return self.device_memory() if _on_gpu(arrays) else self.host

    def device_memory(self) -> DeviceMemory:
        """That of this rank's GPU, as messages see it."""
        if self._device is None:
            aware = self.endpoint.takes_device_memory(self.gpu)
            kind = AwareMemory if aware else StagedMemory
            self._device = kind(self.gpu, self._slot_nbytes, self._limit_nbytes)
        return self._device


class Part:
    """One member's part of one call: agree first, at the first call, then move."""

    def __init__(
        self,
        member: Member,
        local: Any,
        out: Any,
        call: int,
        first_tag: int,
        in_flight: Sequence[Request],
    ) -> None:
        self.member = member
        self._given_out = out
        self._tag = first_tag + 1 + call % CALLS_IN_FLIGHT * CHANNELS
        self._own_error: XmeshError | None = None
        self._shared_error: XmeshError | None = None
        self._kind = NUMPY
        self._outputs: list[AnyArray] = []
        self._result: Any = None
        self._sources: list[AnyArray] | None = None
        self._memories: tuple[Memory, Memory] = (member.host, member.host)
        self._fences: list[Any] = []
        self._work: Work | None = None
        self._agreement: Agreement | None = None
        try:
            self._take(local, out, in_flight)
        except TransferTimeout:
            raise  # of a call before, whose memory this one was to use: the resharder is closed
        except ArrayError as error:
            self._own_error = error
        except MemoryError as error:
            nbytes = sum(box.volume for box in member.program.needed) * member.plan.itemsize
            self._refuse(
                "there must be memory for the output and for staging",
                f"{nbytes} bytes of output; {error}",
                "free memory before the call, pass out=, or lower staging_nbytes",
            )
        except XmeshError as error:
            self._own_error = type(error)(f"{error}\n  context: {self._where}")
        except Exception as error:
            # Whatever it is: a rank that left the call now would keep all others waiting.
            if member.is_of_cuda(error):
                self._own_error = met_an_error(error, self._where)
            else:
                self._refuse(
                    "local and out must be arrays that can be read and written",
                    f"{type(error).__name__}: {error}",
                    "pass arrays of NumPy, or of a library that shares memory by a protocol",
                )
        if member.nccl is not None:
            self._work = member.nccl.call(
                self._tag, self._own_error, self._sources or [], self._outputs, self._fences
            )
        elif call == 0:
            record = Record(member.rank)
            if self._own_error is not None:
                record = Record.of_error(member.rank, self._own_error)
            self._agreement = Agreement(member.endpoint, first_tag, record)
        else:
            self._begin()

    def _take(self, local: Any, out: Any, in_flight: Sequence[Request]) -> None:
        """Look at the arguments, and find memory for what they need."""
        member = self.member
        plan, rank, program = member.plan, member.rank, member.program
        sources = check_local(plan, program, local, member.device)
        if out is None and program.needed:
            self._kind = member.kind or _kind_of_local(local, sources)
        self._outputs = check_out(plan, program, out, self._kind, member.device)
        outputs = self._outputs
        if sources and outputs:
            check_overlap(plan, rank, sources, outputs)
        for request in in_flight:
            self._leave_alone(request, sources, outputs)
        if member.nccl is not None:
            self._fences = member.nccl.ready(sources, outputs, new=out is None)
        elif _on_gpu(sources) or _on_gpu(outputs):
            self._take_on_gpu(sources)
        self._sources = sources

    def _leave_alone(
        self, request: Request, sources: Sequence[AnyArray], outputs: Sequence[AnyArray]
    ) -> None:
        """Refuse what an unfinished call reads or writes, unless the GPU has all of it already."""
        (other,) = (part for part in request.parts if part.member is self.member)
        if not (
            overlap(other._sources or (), outputs) or overlap([*sources, *outputs], other._outputs)
        ):
            return
        if request.enqueued:
            # A stream of the caller's may have waited for it: then this is no mistake.
            request.finish_now()
            return
        raise ArrayError(
            explain(
                "local and out must not share memory with what a call in flight reads or writes",
                values=f"call {request.call} has not ended",
                context=self._where,
                remedy="wait for it first, or pass another buffer",
            )
        )

    def _take_on_gpu(self, sources: Sequence[AnyArray]) -> None:
        """Find the memory that arrays lie in, and what must end before they are touched."""
        member = self.member
        check_same_memory(member.plan, member.rank, sources, self._outputs)
        memories = member.memory_of(sources), member.memory_of(self._outputs)
        for memory, arrays in zip(memories, (sources, self._outputs), strict=True):
            if memory is not member.host:
                check_device(member.plan, member.rank, arrays, member.gpu.device)
                self._fences += memory.ready(arrays)
                memory.staging.prepare(len(member.program.pieces))
        self._memories = memories

    def _begin(self) -> None:
        member = self.member
        if self._own_error is not None:
            # The others do not know and must not wait for ever: take part without data.
            self._sources = None
            self._outputs = list(sinks(member.plan, member.program))
            self._memories, self._fences = (member.host, member.host), []
        self._work = Execution(
            member.program,
            member.endpoint,
            self._tag,
            *self._memories,
            self._sources,
            self._outputs,
            self._fences,
            sink=self._own_error is not None,
        )

    @property
    def over(self) -> bool:
        """Done, or failed."""
        if self._agreement is not None:
            return False
        return self._work is None or self._work.done

    @property
    def enqueued(self) -> bool:
        """Over, but for what a GPU has been given already; and without an error so far."""
        if self._agreement is not None or self._work is None or self.error() is not None:
            return False
        return self._work.enqueued

    @property
    def on_gpu(self) -> bool:
        """A GPU has a share in it, which moves by itself."""
        member = self.member
        return member.nccl is not None or self._memories != (member.host, member.host)

    def let_wait(self, stream: Any) -> None:
        """Make a CUDA stream wait for what this call has given to the GPU, if anything."""
        if self.on_gpu and self._work is not None:
            self.member.gpu.let_wait(stream, self._work.fences)

    def step(self) -> bool:
        """Move on; True when anything happened."""
        if self._agreement is None:
            work = self._work
            return work is not None and not work.done and work.step()
        moved = self._agreement.step()
        if not self._agreement.over:
            return moved
        verdict, self._agreement = self._agreement.verdict, None
        self._shared_error = verdict.error() if verdict is not None else None
        if self._shared_error is None:
            self._begin()
        return True

    def error(self) -> XmeshError | None:
        """What to raise, once it is over."""
        if self._shared_error is not None or self._work is None:
            return self._shared_error or self._own_error
        if self._work.error is not None or self._own_error is not None:
            return self._work.error or self._own_error
        if not self._work.refused:
            return None
        refused = sorted(self._work.refused)
        member = self.member
        names = ", ".join(f"{rank} (host {member.endpoint.host_name(rank)})" for rank in refused)
        return PeerError(
            explain(
                "every source rank must pass a valid array",
                values=f"no data came from rank {names}: its own argument was refused there",
                context=f"{self._where}; the output is incomplete",
                remedy="see the ArrayError on that rank; the resharder can be used again",
            )
        )

    def result(self) -> Any:
        """The output in the form in which the caller wants it."""
        if not self.member.program.needed:
            return None
        if self._given_out is not None:
            return self._given_out
        if self._result is None:
            results = self._outputs
            if self._kind is not NUMPY:
                results = [self._hand_over(memory) for memory in self._outputs]
            self._result = results[0] if len(results) == 1 else tuple(results)
        return self._result

    def _hand_over(self, memory: AnyArray) -> Any:
        try:
            return self._kind.result(memory, self.member.plan.dtype)
        except ArrayError as error:
            raise ArrayError(f"{error}\n  context: {self._where}") from error

    def abandon(self, why: str) -> None:
        """Give up."""
        if self._agreement is not None:
            self._agreement.abandon()
            self._agreement = None
        if self._work is not None:
            self._work.abandon(why)

    def explain_timeout(self, limit_s: float) -> str:
        """Text of the error when time runs out now."""
        member, plan = self.member, self.member.plan
        where = f"rank {member.rank} (host {member.endpoint.host_name(member.rank)})"
        context = f"{where}, tensor {plan.name!r}, {plan.src} -> {plan.dst}"
        if self._work is None:
            peers = self._agreement.waiting_for() if self._agreement is not None else []
            names = ", ".join(f"{p} (host {member.endpoint.host_name(p)})" for p in peers)
            rule, values = "all ranks of a plan must call", f"nothing heard from rank {names}"
            context += ", agreement before the first call"
        else:
            rule, values = "a transfer must finish", self._work.waits_for()
        return explain(
            f"{rule} within {limit_s:g} s",
            values=values,
            context=context,
            remedy="look for an error on that rank, or for a call that it did not make; raise "
            "timeout_s if it is only late; the resharder is closed now, the communicator is not",
        )

    @property
    def _where(self) -> str:
        plan = self.member.plan
        return f"rank {self.member.rank}, tensor {plan.name!r}, {plan.src} -> {plan.dst}"

    def _refuse(self, rule: str, values: str, remedy: str) -> None:
        self._own_error = ArrayError(
            explain(rule, values=values, context=self._where, remedy=remedy)
        )


def _on_gpu(arrays: Sequence[AnyArray]) -> bool:
    for array in arrays:  # noqa: SIM110 (in every call, and any() takes three times as long)
        if type(array) is DeviceArray:
            return True
    return False


def _kind_of_local(local: Any, held: Sequence[AnyArray]) -> Kind:
    """The kind of the local array, which new outputs follow."""
    if type(local) is np.ndarray or local is None or not held:
        return NUMPY
    first = local[0] if isinstance(local, (list, tuple)) else local
    return kind_of(first, held[0])
