"""A rank that stays away: the others give up in time, say what is missing, and can go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import draws
import numpy as np
import oracle
import pytest
from mpi4py import MPI

import xmesh
from xmesh import DeviceMesh, Layout, Plan, Resharder, Topology, World
from xmesh.errors import ClosedError, TransferTimeout, XmeshError
from xmesh.planner import STRATEGIES

SIZE = MPI.COMM_WORLD.size
ABSENT = sorted({0, SIZE // 2, SIZE - 1} if SIZE <= 4 else {0, SIZE // 2 + 1})
LIMIT_S = 0.3
LONG_S = 60.0  # for what must not run out of time; far above what any of it takes

pytestmark = pytest.mark.skipif(SIZE < 2, reason="needs at least 2 ranks")


def gather_plan(name: str = "weights", width: int = 3, **options: Any) -> Plan:
    mesh = DeviceMesh.arange((SIZE,))
    shape = (2 * SIZE, width)
    src, dst = Layout(mesh, "S0 R", shape), Layout(mesh, "R R", shape)
    # A searched plan takes long where many ranks share a core, and matters nothing here.
    return xmesh.plan(src, dst, "<f4", name=name, scheduler="naive", **options)


def local_of(plan: Plan, rank: int, seed: int = 0) -> Any:
    array = oracle.whole(plan.src.shape, plan.dtype, seed)
    return oracle.as_argument(oracle.held(array, plan.src, rank))


def works(comm: MPI.Intracomm, plan: Plan, reshard: Resharder, seed: int) -> None:
    array = oracle.whole(plan.src.shape, plan.dtype, seed)
    result = reshard(local_of(plan, comm.rank, seed))
    wanted = oracle.held(array, plan.dst, comm.rank)
    draws.together(comm, oracle.difference(oracle.as_arrays(result), wanted))


def usable(comm: MPI.Intracomm) -> None:
    """The communicator is as before: a barrier, other plans, then the plan that failed."""
    comm.Barrier()
    for seed, plan in enumerate((gather_plan("other", 5), gather_plan())):
        with Resharder(plan, comm, timeout_s=LONG_S) as reshard:
            works(comm, plan, reshard, seed)
            works(comm, plan, reshard, seed + 7)


def timed_out(call: Callable[[], Any]) -> tuple[str, str]:
    """The text of its TransferTimeout, and what is wrong otherwise."""
    began = time.monotonic()
    try:
        call()
    except TransferTimeout as error:
        # It waits in steps of microseconds; the rest is for a machine that is busy.
        late = time.monotonic() - began > LIMIT_S + 20
        return str(error), "gave up late" if late else ""
    except XmeshError as error:
        return str(error), f"{type(error).__name__}: {error}"
    return "", "no TransferTimeout"


@pytest.mark.parametrize("absent", ABSENT)
def test_init_times_out_when_a_rank_never_constructs(comm, absent):
    text, problem = "", ""
    if comm.rank != absent:
        text, problem = timed_out(lambda: Resharder(gather_plan(), comm, timeout_s=LIMIT_S))
        for part in ("'weights'", f"within {LIMIT_S:g} s", f"rank {comm.rank} has heard nothing"):
            if not problem and part not in text:
                problem = f"{part!r} is not in {text}"
    draws.together(comm, problem)
    texts = comm.allgather(text)
    assert any(f"from rank {absent}" in text for text in texts), texts
    usable(comm)


@pytest.mark.parametrize("absent", ABSENT)
def test_a_rank_that_constructs_late(comm, absent):
    """It finds the others gone, and says so; nothing of the failed attempts is left behind."""
    if comm.rank == absent:
        time.sleep(3 * LIMIT_S)
    _, problem = timed_out(lambda: Resharder(gather_plan(), comm, timeout_s=LIMIT_S))
    draws.together(comm, problem)
    usable(comm)


@pytest.mark.parametrize("absent", ABSENT)
def test_one_call_times_out(comm, absent):
    plan = gather_plan()
    problem = ""
    if comm.rank != absent:
        local = local_of(plan, comm.rank)
        text, problem = timed_out(
            lambda: xmesh.reshard(
                local, plan.src, plan.dst, comm, scheduler="naive", timeout_s=LIMIT_S, name="x7"
            )
        )
        problem = problem or ("" if "'x7'" in text else text)
    draws.together(comm, problem)
    usable(comm)


@pytest.mark.parametrize("absent", ABSENT)
def test_a_rank_that_never_makes_the_first_call(comm, absent):
    plan = gather_plan()
    reshard = Resharder(plan, comm, timeout_s=LONG_S)
    comm.Barrier()
    text, problem = "", ""
    if comm.rank != absent:
        request = reshard.start(local_of(plan, comm.rank))
        text, problem = timed_out(lambda: request.wait(timeout_s=LIMIT_S))
        host = MPI.Get_processor_name()
        for part in ("'weights'", f"rank {comm.rank} (host {host})", "S0R@"):
            if not problem and part not in text:
                problem = f"{part!r} is not in {text}"
        with pytest.raises(ClosedError, match="it gave up after"):
            reshard(local_of(plan, comm.rank))
    draws.together(comm, problem)
    texts = comm.allgather(text)
    assert any(f"from rank {absent} (host " in text for text in texts), texts
    reshard.close()
    usable(comm)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_misses_a_later_call(comm, strategy):
    """The text names tensor, box, peer, host and bytes outstanding."""
    topology = Topology([rank // 2 for rank in range(SIZE)])
    plan = gather_plan(strategy=strategy, topology=topology, width=300)
    absent = SIZE // 2
    reshard = Resharder(plan, comm, timeout_s=LONG_S)
    works(comm, plan, reshard, 1)
    text, problem = "", ""
    if comm.rank != absent:
        local = local_of(plan, comm.rank)
        text, problem = timed_out(lambda: reshard.start(local).wait(timeout_s=LIMIT_S))
        parts = ("'weights'", "bytes outstanding", "next is box [", "(host ", "bytes) from rank ")
        for part in (*parts, f"rank {comm.rank} (host "):
            if not problem and part not in text:
                problem = f"{part!r} is not in {text}"
    draws.together(comm, problem)
    rows = plan.src.boxes(absent)[0]
    texts = [text for text in comm.allgather(text) if f"from rank {absent} (host " in text]
    assert texts
    if strategy == "send_recv":
        assert any(f"box {rows} ({rows.volume * 4} bytes) from rank {absent}" in t for t in texts)
    reshard.close()
    usable(comm)


def test_a_rank_that_makes_a_later_call_late(comm):
    """After the others have given up: it gives up too, and its messages reach nobody."""
    plan = gather_plan(width=5000)
    reshard = Resharder(plan, comm, timeout_s=LIMIT_S)
    works(comm, plan, reshard, 1)
    if comm.rank == 0:
        time.sleep(3 * LIMIT_S)
    _, problem = timed_out(lambda: reshard(local_of(plan, comm.rank, 2)))
    draws.together(comm, problem)
    reshard.close()
    usable(comm)


def test_a_rank_that_is_late_but_within_the_limit(comm):
    plan = gather_plan()
    if comm.rank == 0:
        time.sleep(0.3)
    with Resharder(plan, comm, timeout_s=LONG_S) as reshard:
        for late in (0, comm.size - 1):
            if comm.rank == late:
                time.sleep(0.3)
            works(comm, plan, reshard, late)


def test_others_on_the_same_communicator_go_on_after_a_timeout(comm):
    """Two resharders share a private communicator; what one gives up does not harm the other."""
    plan, other_plan = gather_plan(), gather_plan("other", 7)
    other = Resharder(other_plan, comm, timeout_s=LONG_S)
    reshard = Resharder(plan, comm, timeout_s=LONG_S)
    works(comm, other_plan, other, 1)
    works(comm, plan, reshard, 1)
    problem = ""
    if comm.rank != 0:
        local = local_of(plan, comm.rank)
        _, problem = timed_out(lambda: reshard.start(local).wait(timeout_s=LIMIT_S))
    draws.together(comm, problem)
    works(comm, other_plan, other, 2)
    usable(comm)
    reshard.close()
    other.close()
    usable(comm)


def test_all_requests_of_a_resharder_that_gives_up_fail(comm):
    plan = gather_plan()
    reshard = Resharder(plan, comm, timeout_s=LONG_S)
    works(comm, plan, reshard, 1)
    problem = ""
    if comm.rank != 0:
        requests = [reshard.start(local_of(plan, comm.rank, seed)) for seed in range(3)]
        _, problem = timed_out(lambda: requests[0].wait(timeout_s=LIMIT_S))
        for request in requests[1:]:
            if not request.test():
                problem = problem or "a request is still under way"
            with pytest.raises(ClosedError, match="while a call was in flight"):
                request.wait()
    draws.together(comm, problem)
    reshard.close()
    usable(comm)


def test_world_times_out(comm):
    problem = ""
    if comm.rank != SIZE - 1:
        text, problem = timed_out(lambda: World(comm, timeout_s=LIMIT_S))
    draws.together(comm, problem)
    with World(comm, timeout_s=LONG_S) as world:
        mesh = DeviceMesh.arange((SIZE,))
        if comm.rank != 0:
            world._timeout_s = LIMIT_S
            text, problem = timed_out(lambda: world.communicator(mesh))
            world._timeout_s = LONG_S
            problem = problem or ("" if "mesh (" in text else text)
        draws.together(comm, problem)
        found = world.communicator(mesh)
        assert found is not None
        assert found.size == comm.size
    usable(comm)


def test_abandoned_buffers_stay_alive(comm):
    """Messages that nobody received arrive after their request was given up and forgotten."""
    plan = gather_plan(width=20_000, strategy="send_recv")
    for seed in range(3):
        reshard = Resharder(plan, comm, timeout_s=LONG_S)
        works(comm, plan, reshard, seed)
        if comm.rank % 2:
            request = reshard.start(local_of(plan, comm.rank, seed))
            _, problem = timed_out(partial(request.wait, timeout_s=0.05))
        else:
            problem = ""
        draws.together(comm, problem)
        reshard.close()
        junk = [np.full(20_000, 3, "<f4") for _ in range(20)]
        usable(comm)
        assert all((array == 3).all() for array in junk)
