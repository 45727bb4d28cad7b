"""NCCL between processes: communicators are shared and freed, and launches have one order."""

from __future__ import annotations

from functools import partial
from typing import Any

import conformance
import cupy
import draws
import numpy as np
import pytest
from cupy import _double_nccl
from mpi4py import MPI

import xmesh
from xmesh import Box, DeviceMesh, Layout, Plan
from xmesh.nccl import library, making
from xmesh.nccl import program as nccl_program

SIZE = MPI.COMM_WORLD.size
engine: Any = cupy._engine
several = pytest.mark.skipif(SIZE < 2, reason="needs at least 2 ranks")
many = pytest.mark.skipif(SIZE < 4, reason="needs at least 4 ranks")
pytestmark = pytest.mark.cupy13


@pytest.fixture
def world(comm):
    engine.counters.clear()
    yield conformance.OverMpi(comm, "nccl", lambda rank: True)
    comm.Barrier()
    draws.together(comm, "; ".join(_double_nccl.violations()))
    assert _double_nccl.live() == 0
    assert engine.counters["deviceSynchronize"] == 0


@pytest.fixture(params=["split", "by ids"])
def _way(request, monkeypatch):
    """How communicators are made; CuPy 13 knows the second way alone."""
    if request.param == "by ids":
        monkeypatch.setattr(making, "can_split", lambda nccl: False)


def works(world, reshard, seed=0):
    call = conformance.Call(world, reshard.plan, seed)
    world.together(call.problem(call.start(reshard)))


def made_everywhere(comm, before):
    """How many communicators all ranks together have made since."""
    return comm.allreduce(_double_nccl.created() - before)


def halves(world, **options: Any) -> Plan:
    """From rank 0 to each half of the ranks: groups that are not all ranks."""
    lower = DeviceMesh.arange((max(1, world.size // 2),))
    upper = DeviceMesh.arange((world.size,))
    src = Layout(lower, "S0 R", (4 * world.size, 3))
    dst = Layout(upper, "R R", (4 * world.size, 3))
    return xmesh.plan(src, dst, "<f4", scheduler="naive", strategy="broadcast", **options)


@pytest.mark.usefixtures("_way")
def test_communicators_are_shared_by_resharders_and_freed_with_the_last(world, comm):
    before = _double_nccl.created()
    first = world.resharder(halves(world))
    works(world, first)
    made = made_everywhere(comm, before)
    live = _double_nccl.live()
    assert SIZE == 1 or live > 0
    others = [world.resharder(halves(world, name=f"tensor {i}")) for i in range(5)]
    assert made_everywhere(comm, before) == made
    first.close()
    for seed, reshard in enumerate(others):
        works(world, reshard, seed)
        assert _double_nccl.live() == live
        reshard.close()
    assert _double_nccl.live() == 0
    with world.resharder(halves(world)) as again:
        works(world, again)
        assert made_everywhere(comm, before) == 2 * made


@pytest.mark.usefixtures("_way")
def test_open_and_close_many_times(world):
    """Communicators neither leak nor run out."""
    for i in range(20):
        with world.resharder(halves(world)) as reshard:
            works(world, reshard, seed=i)
        assert _double_nccl.live() == 0


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("seed", range(3))
def test_resharders_with_other_groups_share_what_they_can(world, seed):
    """Made and closed in the same order on all ranks, used in between."""
    rng = np.random.default_rng([SIZE, seed])
    opened: list[Any] = []
    for i in range(8):
        strategy = draws.choice(rng, ("broadcast", "send_recv"))
        plan = draws.plan(rng, world.size, strategy=strategy, scheduler="naive")
        opened.append(world.resharder(plan))
        for reshard in opened:
            works(world, reshard, i)
        if rng.random() < 0.4:
            opened.pop(int(rng.integers(len(opened)))).close()
    for reshard in opened:
        reshard.close()


def test_the_way_is_what_cupy_and_nccl_allow():
    nccl = cupy.cuda.nccl
    assert library.can_split(nccl) == (not cupy.__version__.startswith("13."))
    one = nccl.get_unique_id()
    assert library.id_of(library.id_text(one)) == one


@several
@pytest.mark.usefixtures("_way")
def test_calls_begin_in_another_order_on_each_rank(world, comm):
    """Edges of a pipeline: neighbours share an edge, and each rank begins its edges as it likes."""
    edges = []
    for i in range(SIZE):
        ends = sorted({i, (i + 1) % SIZE})
        src, dst = Layout(DeviceMesh([i]), "R", (50,)), Layout(DeviceMesh([ends[-1]]), "R", (50,))
        if i == ends[-1]:
            dst = Layout(DeviceMesh([ends[0]]), "R", (50,))
        edges.append(xmesh.plan(src, dst, "<f4", name=f"edge {i}"))
    edges.append(conformance.rows_to_all(world, name="to all"))
    opened = {plan.name: world.resharder(plan) for plan in edges if comm.rank in plan.ranks}
    own = np.random.default_rng([SIZE, comm.rank])
    problem = ""
    for turn in range(4):
        calls = {}
        for plan in (edges[int(i)] for i in own.permutation(len(edges))):
            if plan.name in opened:
                call = conformance.Call(world, plan, turn)
                calls[plan.name] = call, call.start(opened[plan.name])
        # Waited for in an order of its own, too.
        for name in [list(calls)[int(i)] for i in own.permutation(len(calls))]:
            call, request = calls[name]
            problem = problem or call.problem(request)
    for plan in edges:
        if plan.name in opened:
            opened[plan.name].close()
    world.together(problem)


@several
def test_opposite_orders_on_two_ranks_with_receives_ahead(world, comm):
    """Rank 0 begins A then B, the others B then A; and B's second call before A's first."""
    plans = [conformance.rows_to_all(world, (2 * SIZE, 3), name=name) for name in "AB"]
    opened = [world.resharder(plan) for plan in plans]
    problem = ""
    for turn in range(5):
        order = (0, 1, 1) if comm.rank == 0 else (1, 1, 0)
        calls = [conformance.Call(world, plans[i], turn + k) for k, i in enumerate(sorted(order))]
        left = {0: [calls[0]], 1: calls[1:]}
        begun = []
        for i in order:
            call = left[i].pop(0)
            begun.append((call, call.start(opened[i])))
        for call, request in reversed(begun):
            problem = problem or call.problem(request)
    for reshard in opened:
        reshard.close()
    world.together(problem)


@several
def test_two_communicators_of_the_user_at_once(world, comm):
    """Ranks begin and wait in opposite orders, on communicators that know nothing of each other."""
    duplicate = comm.Dup()
    other = conformance.OverMpi(duplicate, "nccl", lambda rank: True)
    plan = conformance.rows_to_all(world, (2 * SIZE, 3))
    opened = [(world, world.resharder(plan)), (other, other.resharder(plan))]
    problem = ""
    for turn in range(6):
        both = opened if (comm.rank + turn) % 2 else opened[::-1]
        calls = [conformance.Call(where, plan, turn) for where, _ in both]
        begun = [
            (call, call.start(reshard)) for call, (_, reshard) in zip(calls, both, strict=True)
        ]
        for call, request in begun if turn % 3 else begun[::-1]:
            problem = problem or call.problem(request)
    for _, reshard in opened:
        reshard.close()
    duplicate.Free()
    world.together(problem)


@many
@pytest.mark.usefixtures("_way")
def test_more_groups_than_communicators(world, comm, monkeypatch):
    """Each row goes to two ranks, other ones for every row: the rest is sent one by one."""
    rows = SIZE
    src = Layout.from_boxes({r: [Box((r,), (r + 1,))] for r in range(SIZE)}, (rows,))
    wanted: dict[int, list[Box]] = {r: [] for r in range(SIZE)}
    for row in range(rows):
        for r in sorted({(row + 1) % SIZE, (row + 2) % SIZE}):
            wanted[r].append(Box((row,), (row + 1,)))
    plan = xmesh.plan(src, Layout.from_boxes(wanted, (rows,)), "<i4", strategy="broadcast")
    assert len(nccl_program.groups_of(plan)) > 2
    few = partial(nccl_program.groups_of, most=2)
    monkeypatch.setattr(nccl_program, "groups_of", few)
    with world.resharder(plan) as reshard:
        (member,) = reshard._members
        assert len(member.nccl.program.groups) == 2
        for seed in range(3):
            works(world, reshard, seed)
        assert comm.allreduce(_double_nccl.live(), MPI.MAX) <= 3


def test_pieces_are_packed_while_others_travel(world, monkeypatch):
    """Large transfers in small pieces, more of them than slots, from and to strided arrays."""
    monkeypatch.setattr(nccl_program, "PIECE_NBYTES", 64)
    for strategy in ("broadcast", "send_recv"):
        plan = conformance.rows_to_all(world, (2 * SIZE, 37), strategy=strategy)
        with world.resharder(plan) as reshard:
            for seed in range(6 if SIZE <= 4 else 2):
                works(world, reshard, seed)


@several
def test_ranks_that_share_a_gpu_are_refused_in_words(comm, monkeypatch):
    """NCCL would hang, or say less."""
    monkeypatch.setattr(cupy.cuda.runtime, "deviceGetPCIBusId", lambda device: "0000:3B:00.0")
    world = conformance.OverMpi(comm, "nccl", lambda rank: True)
    with pytest.raises(xmesh.errors.TransportError, match="a GPU of its own for each rank") as info:
        world.resharder(conformance.rows_to_all(world))
    assert "ranks 0 and 1 both use GPU 0000:3B:00.0 of host" in str(info.value)
    auto = conformance.OverMpi(comm, "auto", lambda rank: True)
    with auto.resharder(conformance.rows_to_all(world)) as reshard:
        assert reshard.transport == "mpi"
        assert "both use GPU" in reshard.why_transport
        works(auto, reshard)


def test_auto_takes_nccl_where_all_arrays_are_on_devices(comm):
    auto = conformance.OverMpi(comm, "auto", lambda rank: True)
    with auto.resharder(conformance.rows_to_all(auto)) as reshard:
        assert reshard.transport == "nccl"
        assert "a GPU of its own for each rank" in reshard.why_transport
        works(auto, reshard)
    if SIZE > 1:
        mixed = conformance.OverMpi(comm, "auto", lambda rank: rank > 0)
        with mixed.resharder(conformance.rows_to_all(mixed)) as reshard:
            assert reshard.transport == "mpi"
            assert "has not said, by like=, that its arrays lie on a GPU" in reshard.why_transport
            works(mixed, reshard)
