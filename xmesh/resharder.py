"""Resharder: a plan bound to ranks that run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xmesh.binding import TIMEOUT_S, Binding, bind
from xmesh.call import CALLS_IN_FLIGHT, NUM_TAGS, Member, Part
from xmesh.device.gpu import Gpu
from xmesh.errors import (
    ArrayError,
    ClosedError,
    OptionError,
    PlanError,
    TransportError,
    XmeshError,
    explain,
)
from xmesh.like import Kind, kind_of
from xmesh.planner import Plan
from xmesh.progress import Progress, seconds
from xmesh.request import Request
from xmesh.wait_policy import choose_pause, sleep, wanted_policy

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.trace import Trace
    from xmesh.world import World

#: Memory for packing on each rank, unless told otherwise.
STAGING_NBYTES = 64 * 2**20


class Resharder:
    """Moves arrays from one layout to another, as often as wanted; set-up happens here, once.

    Every rank of the plan makes it, in the same order on all of them (ranks in neither layout may).
    Use it as a context manager, or call ``close``.

    Args:
        plan: what to do; the same on every rank.
        comm: an mpi4py communicator that holds every rank of both meshes, or a World on one; None
            for the loopback transport.
        transport: "mpi"; "nccl", for arrays in GPU memory only; "loopback": all ranks live in this
            process, and calls take and return a dict from rank to array. "auto" is loopback without
            a communicator; with one, NCCL where all ranks say by ``like`` that their arrays lie on
            a GPU, each has one of its own and NCCL is there, and else MPI. MPI takes arrays of the
            host and of a GPU, also different ones on different ranks.
        timeout_s: seconds after which making it, or a wait, gives up.
        staging_nbytes: memory per rank for chunks that are not contiguous in the caller's arrays;
            at least four chunks. Where waiting for memory could hang, each call in flight goes
            past it, by one chunk and one for each channel to a peer at the most. Nothing else that
            grows with the array is allocated, except outputs. Arrays on a GPU have as much again:
            pinned host memory, or memory of the GPU where MPI takes it. NCCL takes four pieces of
            32 MiB on the GPU at the most, and none for what is contiguous.
        wait: what a rank does while nothing comes: "spin" looks again at once, "sleep" leaves its
            core to others, "auto" spins where each rank of the host has a core of its own. "auto"
            is overruled by the environment variable XMESH_WAIT.
        trace: records every call, see ``xmesh.Trace``; over messages, so not under NCCL.
        like: kind of new outputs: the module of a library (``numpy``, ``cupy``, ``jax.numpy``,
            ``torch``, or another one with ``from_dlpack``), or one of its arrays, whose device
            counts too. None for the kind of this rank's local array, and NumPy where it has none.

    Raises:
        AgreementError: ranks have different plans; on all of them.
        PlanError: the communicator lacks a rank of the plan; on all of them.
        TransferTimeout: some rank did not make its resharder in time.
        TransportError: the transport is not there.
        OptionError: a time-out or size without meaning, or a trace that is in use.
        ArrayError: ``like`` is no such thing, or its library is not there.
    """

    def __init__(
        self,
        plan: Plan,
        comm: MPI.Intracomm | World | None = None,
        *,
        transport: str = "auto",
        timeout_s: float = TIMEOUT_S,
        staging_nbytes: int = STAGING_NBYTES,
        wait: str = "auto",
        trace: Trace | None = None,
        like: Any = None,
    ) -> None:
        if not isinstance(plan, Plan):
            raise PlanError(
                explain(
                    "a Resharder needs a Plan",
                    values=f"{type(plan).__name__}",
                    remedy="make one with xmesh.plan(src, dst, ...)",
                )
            )
        self.plan = plan
        self.timeout_s = TIMEOUT_S
        problem: XmeshError | None = None
        kind: Kind | None = None
        gpu: Gpu | None = None
        try:
            self.timeout_s = seconds(timeout_s)
            _check_staging(staging_nbytes)
            wait = wanted_policy(wait, os.environ)
            if trace is not None:
                _require_trace(trace)
                transport = _with_messages(transport, comm)
                trace.begin_plan(plan)
            if like is not None:
                kind = kind_of(like)
                if kind.device is not None:
                    gpu = Gpu(kind.device)
                    gpu.compile()
        except (OptionError, ArrayError, TransportError) as error:
            # Told to all ranks, which would otherwise wait for this one.
            problem = error
        self._calls = 0
        self._in_flight: list[Request] = []
        self._closed = ""
        self._binding: Binding = bind(plan, comm, transport, self.timeout_s, NUM_TAGS, problem, gpu)
        self.loopback = alone = self._binding.loopback
        dedicated = all(endpoint.own_cores for endpoint in self._binding.endpoints)
        self.pause = None if alone else choose_pause(wait, dedicated)
        if self._binding.nccl is not None:
            self.pause = sleep  # spinning would keep the interpreter from the thread that launches
        self._trace = trace
        self._members = []
        for endpoint, program in zip(self._binding.endpoints, self._binding.programs, strict=True):
            if trace is not None:
                endpoint = trace.endpoint(endpoint, program, self._binding.first_tag + 1)
            nccl = self._binding.nccl
            gpu = gpu if nccl is None else nccl.gpu
            self._members.append(Member(plan, endpoint, program, staging_nbytes, kind, gpu, nccl))

    @property
    def staging_nbytes(self) -> int:
        """Staging memory that this process holds now, in bytes."""
        return sum(member.staging_nbytes for member in self._members)

    @property
    def progress(self) -> Progress:
        """Moves what is in flight on the communicator."""
        return self._binding.progress

    @property
    def transport(self) -> str:
        """What moves the bytes: "mpi", "nccl" or "loopback"; "none" on ranks in neither layout."""
        return self._binding.transport

    @property
    def why_transport(self) -> str:
        """What decided on the transport, in words."""
        return self._binding.why

    def __call__(self, local: Any = None, out: Any = None, timeout_s: float | None = None) -> Any:
        """Reshard and wait: ``start`` and ``wait`` in one."""
        return self.start(local, out).wait(timeout_s)

    def start(self, local: Any = None, out: Any = None) -> Request:
        """Begin to reshard; all ranks of the plan call it, in the same order.

        Progress is made while anyone in this process waits, or tests a call on this communicator.
        The first call compares the arguments of all ranks before a byte moves; later calls exchange
        nothing but data, except over NCCL (docs/gpu.md).

        Args:
            local: on ranks of the source layout the array they hold (one array for each box where
                there are several), of any strides; None elsewhere. NumPy's or CuPy's, or of any
                library with the buffer protocol, ``__array_interface__``,
                ``__cuda_array_interface__`` or DLPack. It must not change until the request is
                done, or a stream has been made to wait for it.
            out: on ranks of the destination layout an array to write to, of any such library and
                strides, which must not share memory with ``local``, nor with what a call in flight
                reads or writes; None for a new one.

        At most 31 calls are in flight: one more waits first for the oldest to end.

        Returns:
            A request; its ``wait`` gives the output, or raises.

        Raises:
            ClosedError: the resharder was closed, or failed before.
            TransferTimeout: the oldest of 31 calls in flight did not end in time, or one that a
                stream waits for, and whose memory this call is to use.
        """
        if self._closed:
            raise ClosedError(
                explain(
                    "a resharder that was closed, or that gave up, cannot be used again",
                    values=self._closed,
                    context=f"tensor {self.plan.name!r}, {self.plan.src} -> {self.plan.dst}",
                    remedy="make a new Resharder on all ranks",
                )
            )
        # Calls may end out of order: what counts is the oldest, whose tags would be used again. All
        # ranks must make the call, so it waits where it might have been refused.
        oldest = next(iter(self._in_flight), None)
        while oldest is not None and self._calls - oldest.call >= CALLS_IN_FLIGHT:
            oldest.finish(self.timeout_s)
            oldest = next(iter(self._in_flight), None)
        if self._trace is not None:
            self._trace.begin_call(self._calls)
        if self.loopback:
            _require_mapping(local, self.plan)
            _require_mapping(out, self.plan)
        with self._binding.progress.lock:
            return self._start(local, out)

    def _start(self, local: Any, out: Any) -> Request:
        loopback = self.loopback
        parts, in_flight = [], tuple(self._in_flight)
        for member in self._members:
            mine = (local or {}).get(member.rank) if loopback else local
            target = (out or {}).get(member.rank) if loopback else out
            parts.append(
                Part(member, mine, target, self._calls, self._binding.first_tag, in_flight)
            )
        request = Request(self, parts, self._calls)
        self._calls += 1
        request.step()
        if not request.over:
            self._in_flight.append(request)
            self._binding.progress.add(request)
        return request

    def close(self, why: str = "close() was called") -> None:
        """Free communicators and buffers. Requests in flight are given up. Idempotent.

        Args:
            why: what errors of later calls say.
        """
        if not self._closed:
            self._closed = why
            with self._binding.progress.lock:
                self._close()

    def _close(self) -> None:
        try:
            for request in list(self._in_flight):
                if request.enqueued:
                    # The GPU does the rest by itself, and its arrays must stay until then.
                    with contextlib.suppress(XmeshError):
                        request.finish(self.timeout_s)
                    continue
                request.give_up(
                    ClosedError(
                        explain(
                            "a resharder was closed while a call was in flight",
                            context=f"tensor {self.plan.name!r}",
                            remedy="wait for its requests before close()",
                        )
                    )
                )
        finally:
            self._binding.release()
            self._members = []

    def __enter__(self) -> Resharder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def finished(self, request: Request) -> None:
        """A request is over; it tells so itself."""
        if request in self._in_flight:  # not when it ended as soon as it began
            self._in_flight.remove(request)
            self._binding.progress.remove(request)
        if self._trace is not None:
            self._trace.end_call(request.call)


def _check_staging(staging_nbytes: Any) -> None:
    """Refuse a size without meaning."""
    if not isinstance(staging_nbytes, int) or staging_nbytes < 0:
        raise OptionError(
            explain(
                "staging_nbytes must be an integer >= 0",
                values=f"{staging_nbytes!r}",
                remedy=f"leave it at its default of {STAGING_NBYTES}",
            )
        )


def _require_trace(trace: Any) -> None:
    """Refuse what is no trace."""
    from xmesh.trace import Trace

    if not isinstance(trace, Trace):
        raise OptionError(
            explain(
                "trace must be a Trace",
                values=f"{trace!r} of type {type(trace).__name__}",
                remedy="make one with xmesh.Trace(comm) on all ranks",
            )
        )


def _with_messages(transport: str, comm: Any) -> str:
    """The transport where a trace is to see its messages: "auto" does not mean NCCL then."""
    if transport == "nccl":
        raise OptionError(
            explain(
                "a trace records messages, and NCCL sends none that it could see",
                values="transport='nccl' with a trace",
                remedy="trace with transport='mpi', or NCCL with NVIDIA's own profilers",
            )
        )
    return "mpi" if transport == "auto" and comm is not None else transport


def _require_mapping(argument: Any, plan: Plan) -> None:
    """Check the form of an argument under loopback."""
    if argument is not None and not isinstance(argument, Mapping):
        raise ArrayError(
            explain(
                "under the loopback transport arguments are dicts from rank to array",
                values=f"{type(argument).__name__}",
                context=f"tensor {plan.name!r}, {plan.src} -> {plan.dst}",
                remedy="pass {rank: array, ...} for all ranks of the mesh",
            )
        )
    strangers = [rank for rank in argument or {} if rank not in plan.ranks]
    if strangers:
        raise ArrayError(
            explain(
                "under the loopback transport arguments are given for ranks of the plan",
                values=f"{', '.join(map(repr, strangers[:8]))} is not among them",
                context=f"tensor {plan.name!r}, {plan.src} -> {plan.dst}",
                remedy="use the ranks of the two meshes as keys",
            )
        )
