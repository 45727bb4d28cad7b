"""Call: one rank's part of one call of a Resharder, from its arguments to its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from xmesh.agreement import Agreement, Record
from xmesh.arguments import check_local, check_out, check_overlap, sinks
from xmesh.errors import ArrayError, PeerError, XmeshError, explain
from xmesh.execution import Execution
from xmesh.memory import HostMemory
from xmesh.planner import Plan
from xmesh.program import CHANNELS, Program
from xmesh.staging import Staging
from xmesh.transport.base import Endpoint

#: Calls of one resharder that may be in flight; each has tags of its own.
CALLS_IN_FLIGHT = 31
#: One for the agreement of the first call, and those of the calls.
NUM_TAGS = 1 + CALLS_IN_FLIGHT * CHANNELS


class Member:
    """One rank of the plan that runs in this process."""

    def __init__(
        self, plan: Plan, endpoint: Endpoint, program: Program, staging_nbytes: int
    ) -> None:
        self.plan = plan
        self.rank = endpoint.rank
        self.endpoint = endpoint
        self.program = program
        slot_nbytes = max((piece.nbytes for piece in self.program.pieces), default=0)
        self.host = HostMemory(Staging(slot_nbytes, staging_nbytes))


class Part:
    """One member's part of one call: agree first, at the first call, then move."""

    def __init__(
        self,
        member: Member,
        local: Any,
        out: Any,
        call: int,
        first_tag: int,
        in_flight: Sequence[Part],
    ) -> None:
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
            if sources and self._outputs:
                check_overlap(plan, rank, sources, self._outputs)
            for other in in_flight:
                # What an unfinished call reads or writes must be left alone.
                check_overlap(plan, rank, other._sources or (), self._outputs)
                check_overlap(plan, rank, [*sources, *self._outputs], other._outputs)
            self._sources = sources
        except ArrayError as error:
            self._own_error = error
        except MemoryError as error:
            nbytes = sum(box.volume for box in member.program.needed) * plan.itemsize
            self._own_error = ArrayError(
                explain(
                    "there must be memory for the output",
                    values=f"{nbytes} bytes wanted; {error}",
                    context=f"rank {rank}, tensor {plan.name!r}",
                    remedy="free memory before the call, or pass out=",
                )
            )
        except Exception as error:
            # Whatever it is: a rank that left the call now would keep all others waiting.
            self._own_error = ArrayError(
                explain(
                    "local and out must be arrays that can be read and written",
                    values=f"{type(error).__name__}: {error}",
                    context=f"rank {rank}, tensor {plan.name!r}",
                    remedy="pass NumPy arrays",
                )
            )
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
            self._outputs = sinks(member.plan, member.program)
        self._execution = Execution(
            member.program,
            member.endpoint,
            self._tag,
            member.host,
            member.host,
            self._sources,
            self._outputs,
            sink=self._own_error is not None,
        )

    @property
    def over(self) -> bool:
        """Done, or failed."""
        if self._agreement is not None:
            return False
        return self._execution is None or self._execution.done

    def step(self) -> bool:
        """Move on; True when anything happened."""
        if self._agreement is None:
            execution = self._execution
            return execution is not None and not execution.done and execution.step()
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
        if self._shared_error is not None or self._own_error is not None:
            return self._shared_error or self._own_error
        if self._execution is None or not self._execution.refused:
            return None
        refused = sorted(self._execution.refused)
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
