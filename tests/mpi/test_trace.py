"""A measured trace over MPI has each message of the plan once as sent and once as received."""

from __future__ import annotations

import json
import time
from typing import Any

import draws
import numpy as np
import oracle
import pytest
from mpi4py import MPI
from traces import bars, ends, messages_of

import xmesh
from xmesh import DeviceMesh, Layout, Resharder, Trace, World
from xmesh.clocks import read_clock
from xmesh.errors import OptionError, TransferTimeout

SIZE = MPI.COMM_WORLD.size


def arguments(plan: Any, rank: int) -> Any:
    array = oracle.whole(plan.src.shape, plan.dtype, 1)
    return oracle.as_argument(list(oracle.held(array, plan.src, rank)))


def folder(comm: MPI.Intracomm, tmp_path: Any) -> Any:
    return comm.bcast(tmp_path)


def test_each_message_once_on_both_sides(comm, tmp_path):
    rng = np.random.default_rng([SIZE, 77])
    path = folder(comm, tmp_path) / "trace.json"
    for i in range(6):
        plan = draws.plan(rng, comm.size)
        trace = Trace(comm)
        with Resharder(plan, comm, trace=trace) as reshard:
            for _ in range(2):
                reshard(arguments(plan, comm.rank))
        trace.write(str(path), None if i % 2 else 0)
        problem = ""
        if comm.rank == 0:
            data = json.loads(path.read_text())
            wanted = messages_of(plan)
            for run in ("measured", "simulated"):
                calls, found = bars(data, run)
                if ends(found) != (wanted, wanted):
                    problem = f"{run}: {ends(found)}\n{wanted}\n{plan}"
                if run == "measured" and len(calls) != len(plan.ranks):
                    problem = f"{len(calls)} calls on {len(plan.ranks)} ranks"
            if set(data["otherData"]["processors"]) != {str(rank) for rank in plan.ranks}:
                problem = f"processors {data['otherData']['processors']}"
        draws.together(comm, problem)


@pytest.mark.skipif(SIZE < 3, reason="needs a rank in neither mesh")
def test_rank_0_may_have_no_part(comm, tmp_path):
    """It makes the trace and writes it; on a World, and with ranks that make no resharder."""
    path = folder(comm, tmp_path) / "trace.json"
    src, dst = Layout(DeviceMesh([1]), "R", (99,)), Layout(DeviceMesh([2]), "R", (99,))
    plan = xmesh.plan(src, dst)
    with World(comm) as world:
        trace = Trace(world)
        if comm.rank in plan.ranks:
            with Resharder(plan, world, trace=trace) as reshard:
                reshard(np.zeros(99, "float32") if comm.rank == 1 else None)
        trace.write(str(path))
    found = []
    if comm.rank == 0:
        _, found = bars(json.loads(path.read_text()), "measured")
    draws.together(comm, "" if len(found) == 2 * (comm.rank == 0) else f"{found}")


def test_all_ranks_raise_alike(comm, tmp_path):
    path = folder(comm, tmp_path)
    trace = Trace(comm)
    with pytest.raises(OptionError, match="a call must have been recorded"):
        trace.write(str(path / "trace.json"))
    layout = Layout(DeviceMesh.arange((comm.size,)), "S0", (64,))
    plan = xmesh.plan(layout, Layout(DeviceMesh.arange((comm.size,)), "R", (64,)))
    with Resharder(plan, comm, trace=trace) as reshard:
        reshard(arguments(plan, comm.rank))
    with pytest.raises(OptionError, match="a file that can be written"):
        trace.write(str(path / "no" / "trace.json"))
    with pytest.raises(OptionError, match="a trace records one resharder"):
        Resharder(plan, comm, trace=trace)


def test_clocks_that_are_apart_are_found_so(comm):
    ahead_s = 1000.0 * comm.rank
    private = comm.Dup()
    reading = read_clock(private, rounds=8, clock=lambda: time.perf_counter() + ahead_s)
    private.Free()
    # All ranks run on one machine here, where they have one clock.
    wrong = abs(reading.ahead_s - ahead_s) > reading.error_s + 1e-6
    draws.together(comm, f"{reading} and not {ahead_s}" if wrong else "")


@pytest.mark.skipif(SIZE < 2, reason="nobody else to stay away")
def test_what_one_rank_gets_wrong_is_told_to_all_and_nobody_waits_for_ever(comm, monkeypatch):
    with pytest.raises(OptionError, match="a trace keeps one call or more"):
        Trace(comm, keep=0 if comm.rank == 0 else 16)
    trace = Trace(comm)
    monkeypatch.setattr("xmesh.binding.agree_all.__defaults__", (0.3, None))
    if comm.rank:
        with pytest.raises(TransferTimeout, match=r"Trace\.write"):
            trace.write("never.json")
    comm.Barrier()
