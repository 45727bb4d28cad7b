"""Resharder: a plan bound to ranks that run."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from xmesh.agreement import Agreement, Record
from xmesh.arguments import check_local, check_out, check_overlap, plain
from xmesh.binding import TIMEOUT_S, Binding, bind
from xmesh.errors import (
    ArrayError,
    ClosedError,
    PeerError,
    PlanError,
    TransferTimeout,
    TransportError,
    XmeshError,
    explain,
)
from xmesh.execution import Execution
from xmesh.planner import Plan
from xmesh.program import CHANNELS, Program
from xmesh.staging import Staging
from xmesh.transport.base import Endpoint

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.world import World

#: Memory for packing on each rank, unless told otherwise.
STAGING_NBYTES = 64 * 2**20
#: Calls of one resharder that may be in flight; each has tags of its own.
CALLS_IN_FLIGHT = 31
#: One for the agreement of the first call, and those of the calls.
_NUM_TAGS = 1 + CALLS_IN_FLIGHT * CHANNELS


class Resharder:
    """Moves arrays from one layout to another, as often as wanted; set-up happens here, once.

    Every rank of the plan makes it, in the same order on all of them (ranks in neither layout may).
    Use it as a context manager, or call ``close``.

    Args:
        plan: what to do; the same on every rank.
        comm: an mpi4py communicator that holds every rank of both meshes, or a World on one; None
            for the loopback transport.
        transport: "auto" (MPI with a communicator, loopback without), "mpi" or "loopback". Under
            loopback all ranks live in this process: calls take and return a dict from rank to
            array.
        timeout_s: seconds after which making it, or a wait, gives up.
        staging_nbytes: memory per rank for chunks that are not contiguous in the caller's arrays;
            at least four chunks. Where waiting for memory could hang, each call in flight goes
            past it, by one chunk and one for each channel to a peer at the most. Nothing else that
            grows with the array is allocated, except outputs.

    Raises:
        AgreementError: ranks have different plans; on all of them.
        PlanError: the communicator lacks a rank of the plan; on all of them.
        TransferTimeout: some rank did not make its resharder in time.
        TransportError: the transport is not there.
    """

    def __init__(
        self,
        plan: Plan,
        comm: MPI.Intracomm | World | None = None,
        *,
        transport: str = "auto",
        timeout_s: float = TIMEOUT_S,
        staging_nbytes: int = STAGING_NBYTES,
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
        self._timeout_s = timeout_s
        self._calls = 0
        self._in_flight: list[Request] = []
        self._closed = ""
        self._binding: Binding = bind(plan, comm, transport, timeout_s, _NUM_TAGS)
        self._members = [
            _Member(plan, endpoint, program, staging_nbytes)
            for endpoint, program in zip(
                self._binding.endpoints, self._binding.programs, strict=True
            )
        ]

    @property
    def staging_nbytes(self) -> int:
        """Staging memory that this process holds now, in bytes."""
        return sum(member.staging.nbytes for member in self._members)

    def __call__(self, local: Any = None, out: Any = None, timeout_s: float | None = None) -> Any:
        """Reshard and wait: ``start`` and ``wait`` in one."""
        return self.start(local, out).wait(timeout_s)

    def start(self, local: Any = None, out: Any = None) -> Request:
        """Begin to reshard; all ranks of the plan call it, in the same order.

        Progress is made while anyone on this communicator waits or tests. The first call compares
        the arguments of all ranks before a byte moves; later calls exchange nothing but data.

        Args:
            local: on ranks of the source layout the array they hold (one array for each box where
                there are several), of any strides; None elsewhere. It must not change until the
                request is done.
            out: on ranks of the destination layout an array to write to, of any strides, which
                must not overlap ``local``; None for a new one.

        Returns:
            A request; its ``wait`` gives the output, or raises.

        Raises:
            ClosedError: the resharder was closed, or failed before.
            TransportError: too many calls in flight.
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
        # Calls may end out of order: what counts is the oldest, whose tag would be used again.
        oldest = self._in_flight[0].call if self._in_flight else self._calls
        if self._calls - oldest >= CALLS_IN_FLIGHT:
            raise TransportError(
                explain(
                    f"at most {CALLS_IN_FLIGHT} calls of one resharder may be in flight",
                    values=f"call {oldest} is not over, and this is call {self._calls}",
                    context=f"tensor {self.plan.name!r}",
                    remedy="wait for the earlier requests first",
                )
            )
        loopback = self._binding.loopback
        if loopback:
            _require_mapping(local, self.plan)
            _require_mapping(out, self.plan)
        parts = []
        for member in self._members:
            mine = (local or {}).get(member.rank) if loopback else local
            target = (out or {}).get(member.rank) if loopback else out
            parts.append(_Part(member, mine, target, self._calls, self._binding.first_tag))
        request = Request(self, parts, self._calls)
        self._calls += 1
        self._in_flight.append(request)
        self._binding.progress.active.append(request)
        request.step()
        return request

    def close(self) -> None:
        """Free communicators and buffers. Requests in flight are given up. Idempotent."""
        if not self._closed:
            self._closed = "close() was called"
            for request in list(self._in_flight):
                request._give_up(
                    ClosedError(
                        explain(
                            "a resharder was closed while a call was in flight",
                            context=f"tensor {self.plan.name!r}",
                            remedy="wait for its requests before close()",
                        )
                    )
                )
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

    def _finished(self, request: Request) -> None:
        if request in self._in_flight:
            self._in_flight.remove(request)
            self._binding.progress.active.remove(request)


class Request:
    """One call under way; made by ``Resharder.start``."""

    def __init__(self, resharder: Resharder, parts: list[_Part], call: int) -> None:
        self._resharder = resharder
        self.call = call
        self._parts = parts
        self._finished = False
        self._error: XmeshError | None = None

    def test(self) -> bool:
        """Move everything on this communicator on once; True when this call is over.

        Over means done or failed: ``wait`` then returns, or raises, at once.
        """
        if not self._finished:
            self._resharder._binding.progress.step()
        return self._finished

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the call and return its output.

        Args:
            timeout_s: seconds; None for what the Resharder was made with.

        Returns:
            The array (a tuple of arrays where the rank needs several boxes), ``out`` itself where
            it was given, None on ranks that need nothing. Under loopback a dict by rank.

        Raises:
            ArrayError: this rank's argument is wrong; at the first call any rank's, on all ranks.
            PeerError: data of another rank did not come because its argument was refused there.
            TransferTimeout: time ran out; the resharder is closed then.
        """
        resharder = self._resharder
        if not self._finished:
            limit = resharder._timeout_s if timeout_s is None else timeout_s
            resharder._binding.progress.wait(
                lambda: self._finished, limit, lambda: self._time_out(limit)
            )
        if self._error is not None:
            raise self._error
        results = {part.member.rank: part.result() for part in self._parts}
        if resharder._binding.loopback:
            return {rank: result for rank, result in results.items() if result is not None}
        return next(iter(results.values()), None)

    def step(self) -> bool:
        """Move this call on without waiting; True when anything happened."""
        moved = False
        over = True
        for part in self._parts:
            moved |= part.step()
            over &= part.over
        if over and not self._finished:
            errors = [part.error() for part in self._parts]
            self._finish(next((error for error in errors if error is not None), None))
            moved = True
        return moved

    def _finish(self, error: XmeshError | None) -> None:
        self._finished = True
        self._error = error
        self._resharder._finished(self)

    def _give_up(self, error: XmeshError) -> None:
        for part in self._parts:
            part.abandon()
        self._finish(error)

    def _time_out(self, limit_s: float) -> XmeshError:
        waiting = next(part for part in self._parts if not part.over)
        error = TransferTimeout(waiting.explain_timeout(limit_s))
        self._give_up(error)
        self._resharder.close()
        self._resharder._closed = f"it gave up after {limit_s:g} s"
        return error


class _Member:
    """One rank of the plan that runs in this process."""

    def __init__(
        self, plan: Plan, endpoint: Endpoint, program: Program, staging_nbytes: int
    ) -> None:
        self.plan = plan
        self.rank = endpoint.rank
        self.endpoint = endpoint
        self.program = program
        slot_nbytes = max((piece.nbytes for piece in self.program.pieces), default=0)
        self.staging = Staging(slot_nbytes, staging_nbytes)


class _Part:
    """One member's part of one call: agree first, at the first call, then move."""

    def __init__(self, member: _Member, local: Any, out: Any, call: int, first_tag: int) -> None:
        self.member = member
        self._given_out = out
        self._tag = first_tag + 1 + call % CALLS_IN_FLIGHT * CHANNELS
        self._own_error: XmeshError | None = None
        self._shared_error: XmeshError | None = None
        self._outputs: list[NDArray[Any]] = []
        self._sources: list[NDArray[Any]] | None = None
        self._execution: Execution | None = None
        self._agreement: Agreement | None = None
        plan, rank = member.plan, member.rank
        try:
            sources = check_local(plan, member.program, local)
            self._outputs = check_out(plan, member.program, out)
            check_overlap(plan, rank, sources, self._outputs)
            self._sources = plain(sources)
        except ArrayError as error:
            self._own_error = error
        if call == 0:
            record = Record(rank)
            if self._own_error is not None:
                record = Record.of_error(rank, self._own_error)
            self._agreement = Agreement(member.endpoint, first_tag, record)
        else:
            self._begin()

    def _begin(self) -> None:
        member = self.member
        if self._own_error is not None:
            # The others do not know and must not wait for ever: take part without data.
            self._sources = None
            self._outputs = check_out(member.plan, member.program, None)
        self._execution = Execution(
            member.program,
            member.endpoint,
            self._tag,
            member.staging,
            self._sources,
            plain(self._outputs),
        )

    @property
    def over(self) -> bool:
        """Done, or failed."""
        if self._agreement is not None:
            return False
        return self._execution is None or self._execution.done

    def step(self) -> bool:
        """Move on; True when anything happened."""
        if self._agreement is not None:
            moved = self._agreement.step()
            if not self._agreement.over:
                return moved
            verdict, self._agreement = self._agreement.verdict, None
            self._shared_error = verdict.error() if verdict is not None else None
            if self._shared_error is None:
                self._begin()
            return True
        if self._execution is None or self._execution.done:
            return False
        return self._execution.step()

    def error(self) -> XmeshError | None:
        """What to raise, once it is over."""
        if self._shared_error is not None or self._own_error is not None:
            return self._shared_error or self._own_error
        refused = sorted(self._execution.refused) if self._execution is not None else []
        if not refused:
            return None
        member = self.member
        names = ", ".join(f"{rank} (host {member.endpoint.host_name(rank)})" for rank in refused)
        return PeerError(
            explain(
                "every source rank must pass a valid array",
                values=f"no data came from rank {names}: its own argument was refused there",
                context=f"rank {member.rank}, tensor {member.plan.name!r}, "
                f"{member.plan.src} -> {member.plan.dst}; the output is incomplete",
                remedy="see the ArrayError on that rank; the resharder can be used again",
            )
        )

    def result(self) -> Any:
        """The output in the form in which the caller wants it."""
        if not self.member.program.needed:
            return None
        if self._given_out is not None:
            return self._given_out
        return self._outputs[0] if len(self._outputs) == 1 else tuple(self._outputs)

    def abandon(self) -> None:
        """Give up."""
        if self._agreement is not None:
            self._agreement.abandon()
            self._agreement = None
        if self._execution is not None:
            self._execution.abandon()

    def explain_timeout(self, limit_s: float) -> str:
        """Text of the error when time runs out now."""
        member, plan = self.member, self.member.plan
        where = f"rank {member.rank} (host {member.endpoint.host_name(member.rank)})"
        context = f"{where}, tensor {plan.name!r}, {plan.src} -> {plan.dst}"
        remedy = (
            "look for an error on that rank, or for a call that it did not make; raise timeout_s "
            "if it is only late; the resharder is closed now, the communicator is not"
        )
        if self._execution is None:
            peers = self._agreement.waiting_for() if self._agreement is not None else []
            names = ", ".join(f"{p} (host {member.endpoint.host_name(p)})" for p in peers)
            return explain(
                f"all ranks of a plan must call within {limit_s:g} s",
                values=f"nothing heard from rank {names}",
                context=f"{context}, agreement before the first call",
                remedy=remedy,
            )
        nbytes, message, incoming = self._execution.outstanding()
        values = f"{nbytes} bytes outstanding"
        if message is not None:
            piece = member.program.pieces[message.piece]
            direction = "from" if incoming else "to"
            boxes = " ".join(map(str, piece.boxes[:4]))
            values += (
                f"; next is box {boxes} ({piece.nbytes} bytes) {direction} rank {message.peer} "
                f"(host {member.endpoint.host_name(message.peer)})"
            )
        return explain(
            f"a transfer must finish within {limit_s:g} s",
            values=values,
            context=context,
            remedy=remedy,
        )


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
