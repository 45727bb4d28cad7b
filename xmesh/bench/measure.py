"""Measures reshardings on real ranks: each is run, checked to the last element, and timed."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xmesh.bench.baselines import MOVERS, applies, most_receivers
from xmesh.bench.cases import CASES, RANKS_PER_HOST, Case, scaled_shape
from xmesh.bench.content import codes, difference, key
from xmesh.bench.methods import Method
from xmesh.bench.recording import path_of_case, record
from xmesh.bench.rows import Row
from xmesh.bench.waiting import quiet_barrier
from xmesh.errors import XmeshError, explain
from xmesh.planner import CostModel, Plan, plan
from xmesh.planner.describe import host_traffic
from xmesh.planner.simulate import simulate
from xmesh.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

MIB = 2**20


class Step(NamedTuple):
    """How far a run is.

    Attributes:
        done: repeats that are over, of all cases.
        total: repeats of all cases.
        text: the case at work.
    """

    done: int
    total: int
    text: str


def run(
    comm: MPI.Intracomm,
    *,
    nbytes: int = 16 * MIB,
    repeats: int = 5,
    strategy: str = "auto",
    scheduler: str = "auto",
    methods: Sequence[Method] | None = None,
    other_repeats: int | None = None,
    topology: Topology | None = None,
    cost: CostModel | None = None,
    cases: Sequence[Case] = CASES,
    tell: Callable[[Step | Row], None] | None = None,
    trace: str | None = None,
) -> list[Row]:
    """Run cases on the ranks of a communicator; all of them call it.

    Args:
        comm: has the ranks of every case; those that a case does not need look on.
        nbytes: most bytes of an array, see ``scaled_shape``.
        repeats: calls that are timed, after one that is not; the content differs in each.
        strategy: see ``xmesh.plan``; without ``methods``.
        scheduler: see ``xmesh.plan``; without ``methods``.
        methods: the ways to move each array, one after the other; a case leaves out a baseline
            that makes no sense there. Default: the one of ``strategy`` and ``scheduler``.
        other_repeats: timed calls of methods other than "auto"; default ``repeats``.
        topology: what to plan for; default the paper's cluster, hosts of 4 consecutive ranks.
        cost: latencies and bandwidths to plan for; default ``CostModel()``.
        cases: which.
        tell: called on rank 0 after each repeat with a Step, after each measurement with its Row.
        trace: file for a Chrome trace of one more call of each case, by the first method that is
            not plain MPI; it is not timed. See ``record``.

    Returns:
        A row for each case and method, by case; the same on every rank.

    Raises:
        XmeshError: too few ranks, or repeats.
    """
    require_ranks(comm.size, cases)
    other_repeats = repeats if other_repeats is None else other_repeats
    if min(repeats, other_repeats) < 1:
        raise XmeshError(
            explain(
                "there must be a repeat to time",
                values=f"{min(repeats, other_repeats)}",
                remedy="give 1 or more",
            )
        )
    topology = topology or Topology.uniform(comm.size, RANKS_PER_HOST)
    tell = tell if tell is not None and comm.rank == 0 else _say_nothing
    work = []
    for case, method in itertools.product(cases, methods or (Method(strategy, scheduler),)):
        layouts = case.layouts(scaled_shape(case, nbytes))
        if not method.is_baseline or applies(method, *layouts):
            count = repeats if method.strategy == "auto" else other_repeats
            work.append((case, method, layouts, count))
    total, done = sum(count + 1 for *_, count in work), 0
    rows: list[Row] = []
    traced: list[Case] = []
    for serial, (case, method, (src, dst), count) in enumerate(work):
        # A baseline's row has the bound of a plan; one by naive order is made at once.
        options = (
            ("send_recv", "naive") if method.is_baseline else (method.strategy, method.scheduler)
        )
        name = f"case {case.number}"
        made = plan(src, dst, "uint32", topology, *options, cost=cost, name=name)
        text = f"{name}: {case.src_spec} -> {case.dst_spec}, {method}"

        def repeat_done(repeat: int, before: int = done, text: str = text) -> None:
            tell(Step(before + repeat, total, text))

        mover: AbstractContextManager[Any]
        if method.is_baseline:
            mover = MOVERS[method.strategy](comm, src, dst)
        else:
            from xmesh.resharder import Resharder

            mover = Resharder(made, comm)
        times_s, problem = _measure(comm, made, mover, serial + 1, count, repeat_done)
        done += count + 1
        rows.append(_row(made, case.number, method, times_s, problem))
        if trace is not None and not method.is_baseline and case not in traced:
            record(comm, made, path_of_case(trace, case.number, len(cases)))
            traced.append(case)
        tell(rows[-1])
    return rows


def _say_nothing(_: Step | Row) -> None:
    pass


def require_ranks(size: int, cases: Sequence[Case]) -> None:
    """Refuse cases that need more ranks than there are.

    Raises:
        XmeshError: says which cases would do, and how to start more ranks.
    """
    need = max((case.num_ranks for case in cases), default=0)
    if size < need:
        fitting = " ".join(str(case.number) for case in cases if case.num_ranks <= size)
        raise XmeshError(
            explain(
                "there must be a rank for every place of both meshes",
                values=f"{size} ranks; the cases asked for need {need}",
                remedy=f"start {need} ranks (mpiexec -n {need} xmesh bench paper), "
                + (f"or leave cases out: --case {fitting}, " if fitting else "")
                + "or start xmesh bench paper without mpiexec: it starts the ranks itself",
            )
        )


# --- One case -------------------------------------------------------------------------------------


def _measure(
    comm: MPI.Intracomm,
    made: Plan,
    mover: AbstractContextManager[Any],
    number: int,
    repeats: int,
    repeat_done: Callable[[int], None],
) -> tuple[list[float], str]:
    """Time of the slowest rank in each repeat, and what was wrong first, on every rank."""
    (src_box,), (dst_box,) = (layout.boxes(comm.rank) or (None,) for layout in (made.src, made.dst))
    source = None if src_box is None else codes(src_box, made.src.shape)
    wanted = None if dst_box is None else codes(dst_box, made.dst.shape)
    local = None if source is None else np.empty_like(source)
    out = None if wanted is None else np.empty_like(wanted)
    times_s, problem = [], ""
    with mover as move:
        # Repeat 0 is the first call, in which the ranks agree; it is checked but not timed.
        for repeat in range(repeats + 1):
            mask = key(number, repeat)
            if source is not None:
                np.bitwise_xor(source, mask, out=local)
            if wanted is not None:
                # No element is right before the call, so one that nobody writes is found.
                np.bitwise_xor(wanted, ~mask, out=out)
            quiet_barrier(comm)
            began_s = time.perf_counter()
            move(local, out)
            elapsed_s = time.perf_counter() - began_s
            # Ranks that are done, or not in the case at all, must not slow down the others.
            quiet_barrier(comm, longest_poll_s=5e-3)
            if wanted is not None and out is not None and dst_box is not None:
                problem = problem or difference(wanted ^ mask, out, dst_box, comm.rank, repeat)
            slowest: tuple[float, str] = comm.allreduce((elapsed_s, problem), op=_worse)
            problem = slowest[1]
            if repeat:
                times_s.append(slowest[0])
            repeat_done(repeat + 1)
    return times_s, problem


def _worse(a: tuple[float, str], b: tuple[float, str]) -> tuple[float, str]:
    return max(a[0], b[0]), a[1] or b[1]


def _row(made: Plan, number: int | str, method: Method, times_s: list[float], problem: str) -> Row:
    planned = not method.is_baseline
    traffic = host_traffic(made)
    topology = made.topology
    return Row(
        case=number,
        src=str(made.src),
        dst=str(made.dst),
        shape=made.src.shape,
        nbytes=math.prod(made.src.shape) * made.itemsize,
        unit_tasks=len(made.unit_tasks),
        strategy=made.strategy if planned else method.strategy,
        scheduler=made.scheduler if planned else "",
        ranks_per_host=max(len(topology.ranks_of_host(host)) for host in range(topology.num_hosts)),
        nic_bandwidth_Bps=made.cost.nic_bandwidth_Bps,
        sent_nbytes=tuple(host.sent_nbytes for host in traffic) if planned else (),
        received_nbytes=tuple(host.received_nbytes for host in traffic) if planned else (),
        makespan_s=made.makespan_s if planned else None,
        bound_s=made.lower_bound_s,
        ratio=_ratio(made) if planned else None,
        predicted_s=simulate(made, sharing="fair").makespan_s if planned else None,
        time_s=statistics.median(times_s),
        times_s=tuple(times_s),
        verified=not problem,
        problem=problem,
        method=str(method),
        receivers=most_receivers(made.unit_tasks),
        chunks=max((len(each.chunks) for each in made.transfers() if planned), default=0),
    )


def _ratio(made: Plan) -> float:
    return made.makespan_s / made.lower_bound_s if made.lower_bound_s else 1.0
