"""Memory: a call allocates its output and nothing else that grows; calls leave nothing behind."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import draws
import numpy as np
import oracle
import pytest
from mpi4py import MPI

import xmesh
from xmesh import DeviceMesh, Layout, Plan, Resharder
from xmesh.planner import STRATEGIES
from xmesh.program import compile_program

SIZE = MPI.COMM_WORLD.size
CHUNK_NBYTES = 32 * 1024
# Elements of one byte on each rank.
SMALL, BIG = (64 * 1024, 1024 * 1024) if SIZE <= 4 else (32 * 1024, 256 * 1024)


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def plan_of(
    elements: int, strategy: str = "broadcast", to: str = "R S0", chunk_nbytes: int = CHUNK_NBYTES
) -> Plan:
    """From rows to columns, or from rows to everything."""
    mesh = DeviceMesh.arange((SIZE,))
    shape = (SIZE * 64, elements // 64)
    src, dst = Layout(mesh, "S0 R", shape), Layout(mesh, to, shape)
    return xmesh.plan(
        src, dst, "u1", strategy=strategy, scheduler="naive", chunk_nbytes=chunk_nbytes
    )


def arguments(plan: Plan, rank: int, contiguous: bool) -> tuple[Any, Any]:
    shape, out_shape = plan.src.local_shape(rank), plan.dst.local_shape(rank)
    if contiguous:
        return np.full(shape, rank, "u1"), np.empty(out_shape, "u1")
    return np.full(shape[::-1], rank, "u1").T, np.empty(out_shape[::-1], "u1").T


def peak_nbytes(comm: MPI.Intracomm, elements: int, contiguous: bool, to: str) -> int:
    """Memory that one call has at its peak beyond what was there before."""
    plan = plan_of(elements, to=to)
    local, out = arguments(plan, comm.rank, contiguous)
    with Resharder(plan, comm) as reshard:
        for _ in range(2):
            reshard(local, out)
        gc.collect()
        comm.Barrier()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        reshard(local, out)
        _, peak = tracemalloc.get_traced_memory()
        comm.Barrier()
    return peak - before


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("to", ["R S0", "S0 R"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_a_call_allocates_nothing_that_grows_with_the_array(comm, contiguous, to):
    small, big = (peak_nbytes(comm, n, contiguous, to) for n in (SMALL, BIG))
    # A few hundred bytes of bookkeeping for each chunk, and no copy of what is in it.
    chunks = SIZE * SIZE * (1 + BIG // SIZE // CHUNK_NBYTES) + SIZE * BIG // CHUNK_NBYTES
    problem = ""
    if big > small + 600 * chunks + 16_384 or big > BIG // 2:
        problem = f"{small} bytes for {SMALL}, {big} bytes for {BIG}"
    draws.together(comm, problem)


@pytest.mark.usefixtures("_traced")
def test_a_new_output_is_the_only_array_allocated(comm):
    plan = plan_of(BIG)
    local, _ = arguments(plan, comm.rank, contiguous=True)
    with Resharder(plan, comm) as reshard:
        for _ in range(2):
            reshard(local)
        comm.Barrier()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        result = reshard(local)
        after, peak = tracemalloc.get_traced_memory()
        nbytes = result.nbytes
    problem = ""
    if after - before > nbytes + 65_536 or peak - before > nbytes * 3 // 2:
        problem = f"{after - before} bytes kept, {peak - before} at the peak, output {nbytes}"
    draws.together(comm, problem)


@pytest.mark.parametrize("limit_chunks", [0, 5, 10_000])
def test_staging_stays_within_its_limit(comm, limit_chunks):
    """Strided on both sides, so every chunk is packed; several calls in flight."""
    problem = ""
    chunk_nbytes = 4096
    limit_nbytes = limit_chunks * chunk_nbytes
    for strategy in STRATEGIES:
        plan = plan_of(
            SMALL * 4 // max(comm.size, 2 * comm.size - 8),
            strategy,
            to="R R",
            chunk_nbytes=chunk_nbytes,
        )
        local, out = arguments(plan, comm.rank, contiguous=False)
        program = compile_program(plan, comm.rank)
        channels = len({(message.peer, message.channel) for message in program.sends})
        with Resharder(plan, comm, staging_nbytes=limit_nbytes) as reshard:
            most, outs = 0, []
            for in_flight in (1, 5) if comm.size <= 4 else (2,):
                # As the documentation says.
                extra = in_flight * (1 + channels) * chunk_nbytes
                outs = [out, *(np.empty(out.shape[::-1], "u1").T for _ in range(in_flight - 1))]
                requests = [reshard.start(local, each) for each in outs]
                for request in requests:
                    while not request.test():
                        most = max(most, reshard.staging_nbytes - extra)
                    request.wait()
                most = max(most, reshard.staging_nbytes)
        for each in outs:
            for rank in range(comm.size):
                problem = problem or oracle.difference(
                    [each[64 * rank : 64 * rank + 64]],
                    [np.full((64, out.shape[1]), rank, "u1")],
                )
        if most > max(4 * chunk_nbytes, limit_nbytes):
            problem = problem or f"{strategy}: {most} bytes with a limit of {limit_nbytes}"
    draws.together(comm, problem)


@pytest.mark.usefixtures("_traced")
def test_repeat_calls_leave_memory_flat(comm):
    """And so do requests that fail: repeated calls neither grow nor grow slower."""
    calls = 3000 if comm.size <= 4 else 150
    plan = plan_of(64)
    local, out = arguments(plan, comm.rank, contiguous=False)
    seen = []
    with Resharder(plan, comm) as reshard:
        for i in range(calls):
            bad = i % 50 == 7
            try:
                reshard(None if bad and comm.rank == 0 else local, out)
            except (xmesh.errors.ArrayError, xmesh.errors.PeerError):
                assert bad
            if i in (calls // 3, calls - 1):
                gc.collect()
                seen.append(tracemalloc.get_traced_memory()[0])
    problem = "" if seen[1] < seen[0] + 20_000 else f"{seen[0]} bytes, then {seen[1]}"
    draws.together(comm, problem)


@pytest.mark.usefixtures("_traced")
def test_resharders_leave_memory_flat(comm):
    plan = plan_of(64)
    local, out = arguments(plan, comm.rank, contiguous=True)
    seen = []
    turns = 120 if comm.size <= 4 else 12
    for i in range(turns):
        with Resharder(plan, comm) as reshard:
            reshard(local, out)
        if i in (turns // 3, turns - 1):
            gc.collect()
            seen.append(tracemalloc.get_traced_memory()[0])
    problem = "" if seen[1] < seen[0] + 20_000 else f"{seen[0]} bytes, then {seen[1]}"
    draws.together(comm, problem)
