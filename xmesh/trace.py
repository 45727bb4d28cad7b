"""Trace: records what a resharder's calls do, and writes it beside what the planner predicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmesh.binding import agree_all
from xmesh.call import CALLS_IN_FLIGHT
from xmesh.clocks import Reading, now_s, read_clock, to_axis
from xmesh.errors import OptionError, explain
from xmesh.planner import Plan
from xmesh.planner.simulate import simulate
from xmesh.planner.size import count_messages
from xmesh.program import Program
from xmesh.recording import CallRecord, RecordingEndpoint, on_one_axis
from xmesh.report import Call, Span, both_ends, chrome_trace
from xmesh.transport.base import Endpoint

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.world import World

#: Messages up to which a plan is simulated beside its measured run.
_MAX_SIMULATED = 10_000


class Trace:
    """Records the calls of one resharder.

    Every rank of the communicator makes it, gives it to the resharder and writes it; making and
    writing are collective, recording is not::

        trace = xmesh.Trace(comm)
        with xmesh.Resharder(plan, comm, trace=trace) as reshard:
            out = reshard(local)
        trace.write("trace.json")  # open it at ui.perfetto.dev

    Clocks are compared when it is made and when it is written, never during a call.

    Args:
        comm: the communicator, or World, of the resharder; None under loopback.
        keep: calls that are kept, the last ones.

    Raises:
        OptionError: ``keep`` is no integer >= 1; on all ranks.
        TransferTimeout: a rank did not make its trace in time.
        TransportError: ``comm`` is no communicator.
    """

    def __init__(self, comm: MPI.Intracomm | World | None = None, keep: int = 16) -> None:
        problem: OptionError | None = None
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            problem = OptionError(
                explain(
                    "a trace keeps one call or more",
                    values=f"keep={keep!r}",
                    remedy="leave it at its default of 16",
                )
            )
        if comm is None and problem is not None:
            raise problem
        self._comm = None if comm is None else agree_all(comm, "Trace", problem=problem).comm
        self._keep = keep
        self._plan: Plan | None = None
        self._ranks: list[int] = []
        self._processors: list[str] = []
        #: Call -> parts of the ranks that live here.
        self._calls: dict[int, list[CallRecord]] = {}
        self._latest: list[int] = [-1] * CALLS_IN_FLIGHT
        self._readings = [self._read_clock()]

    def write(self, path: str, call: int | None = None) -> None:
        """Write one call as a Chrome trace: measured, and simulated for the plan's cost model.

        All ranks of the communicator call it; rank 0 writes. Time 0 is when the first rank made
        the call. A bar is one message on one of its two ranks, from when it was posted (a receive:
        from when its send was posted too) to when the rank saw that it had ended; a send has ended
        when its memory is free again, which may be long before its data are there. ``otherData`` in
        the file says, among other things, by how much clocks may be off.

        Args:
            path: the file.
            call: which call of the resharder, from 0; None for the last one.

        Raises:
            OptionError: on all ranks: no such call was recorded, or the file cannot be written.
            TransferTimeout: a rank did not call in time.
        """
        if self._comm is not None:
            agree_all(self._comm, "Trace.write")
        private = None if self._comm is None else self._comm.Dup()
        try:
            problem = self._write(private, path, call)
        finally:
            if private is not None:
                private.Free()
        if problem:
            raise OptionError(problem)

    # --- For Resharder ----------------------------------------------------------------------------

    def begin_plan(self, plan: Plan) -> None:
        """A resharder will use this trace.

        Raises:
            OptionError: another one does.
        """
        if self._plan is not None:
            raise OptionError(
                explain(
                    "a trace records one resharder",
                    values=f"it has that of tensor {self._plan.name!r} already",
                    context=f"tensor {plan.name!r}",
                    remedy="make a Trace for each Resharder",
                )
            )
        self._plan = plan

    def endpoint(self, endpoint: Endpoint, program: Program, first_tag: int) -> Endpoint:
        """An endpoint that is recorded, in place of one that is not."""
        assert self._plan is not None
        self._ranks.append(endpoint.rank)
        self._processors = [endpoint.host_name(rank) for rank in endpoint.ranks]
        place = len(self._ranks) - 1

        def call_of(slot: int) -> CallRecord | None:
            parts = self._calls.get(self._latest[slot])
            return parts[place] if parts is not None else None

        return RecordingEndpoint(endpoint, self._plan, program, first_tag, call_of)

    def begin_call(self, call: int) -> None:
        """The resharder's next call begins."""
        began_s = now_s()
        self._latest[call % CALLS_IN_FLIGHT] = call
        self._calls[call] = [CallRecord(rank, began_s) for rank in self._ranks]
        self._calls.pop(call - self._keep, None)

    def end_call(self, call: int) -> None:
        """A call is over, or was given up."""
        ended_s = now_s()
        for part in self._calls.get(call, ()):
            part.ended_s = ended_s

    # --- Writing ----------------------------------------------------------------------------------

    def _read_clock(self) -> Reading:
        if self._comm is None:
            return Reading(now_s(), 0.0, 0.0)
        private = self._comm.Dup()
        try:
            return read_clock(private)
        finally:
            private.Free()

    def _write(self, comm: MPI.Intracomm | None, path: str, call: int | None) -> str:
        """The problem on all ranks, empty if there is none."""
        last = max(self._calls, default=-1)
        plan, processors = self._plan, self._processors
        everyone = [(self._readings, self._calls.get(last if call is None else call, []))]
        if comm is not None:
            from mpi4py import MPI

            last = comm.allreduce(last, op=MPI.MAX)
            readings = [*self._readings, read_clock(comm)]
            mine = readings, self._calls.get(last if call is None else call, [])
            everyone = comm.gather(mine) or []
            # Rank 0 may be in neither layout: it need not have the plan, and knows no hosts.
            with_plan = comm.rank if self._ranks else comm.size
            owner = comm.allreduce(with_plan, op=MPI.MIN)
            if 0 < owner < comm.size:
                text = plan.to_json() if plan is not None and comm.rank == owner else ""
                text, processors = comm.bcast((text, processors), root=owner)
                plan = Plan.from_json(text)
        problem = ""
        if comm is None or comm.rank == 0:
            chosen = last if call is None else call
            parts = [part for _, found in everyone for part in found]
            if plan is None or not parts:
                problem = explain(
                    "a call must have been recorded to be written",
                    values=f"call {chosen}" if chosen >= 0 else "no call",
                    context=f"the trace keeps the last {self._keep} calls, of {last + 1}",
                    remedy="pass trace= to the Resharder, and write one of its last calls",
                )
            else:
                problem = _save(path, _as_json(plan, chosen, everyone, processors))
        return problem if comm is None else str(comm.bcast(problem))


def _as_json(
    plan: Plan,
    call: int,
    everyone: Sequence[tuple[Sequence[Reading], Sequence[CallRecord]]],
    processors: Sequence[str],
) -> dict[str, Any]:
    measured = on_one_axis(
        [(part, to_axis(readings)) for readings, parts in everyone for part in parts]
    )
    runs: dict[str, Sequence[Span | Call]] = {"measured": measured}
    errors_s = [max(reading.error_s for reading in readings) for readings, _ in everyone]
    about: dict[str, Any] = {
        "tensor": plan.name,
        "src": plan.src.describe(),
        "dst": plan.dst.describe(),
        "strategy": plan.strategy,
        "call": call,
        "axis": "0 is when the first rank made the call; the simulation begins there too",
        "measured_s": max((span.end_s for span in measured), default=0.0),
        "clock_error_bound_s": max(errors_s),
        "clock_error_bound_s_of_rank": errors_s,
        "processors": dict(zip(map(str, plan.ranks), processors, strict=True)),
    }
    if count_messages(plan)[0] <= _MAX_SIMULATED:
        simulation = simulate(plan, sharing="fair")
        runs["simulated"] = both_ends(simulation.messages, plan.topology, plan.cost)
        about["simulated_s"] = simulation.makespan_s
        about["cost"] = plan.cost.to_json()
    return chrome_trace(runs, plan.topology, about)


def _save(path: str, data: dict[str, Any]) -> str:
    try:
        Path(path).write_text(json.dumps(data), encoding="utf-8")
    except OSError as error:
        return explain(
            "a trace is written to a file that can be written",
            values=str(error),
            remedy="choose a folder that is there and yours, on the host of rank 0",
        )
    return ""
