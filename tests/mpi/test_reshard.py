"""Resharding over MPI, element by element against the oracle, with guard elements all around."""

from __future__ import annotations

from typing import Any

import draws
import numpy as np
import oracle
import pytest
from mpi4py import MPI

import xmesh
from xmesh import DeviceMesh, Layout, Plan, Resharder, Topology, World
from xmesh.planner import STRATEGIES

SIZE = MPI.COMM_WORLD.size
# Many ranks share few cores, and each of them plans: fewer pairs there, of bigger meshes.
PAIRS = 15 if SIZE <= 4 else 40 // SIZE + 2
several = pytest.mark.skipif(SIZE < 2, reason="needs at least 2 ranks")


class Call:
    """One rank's arguments, inside guard elements, and what must come of them."""

    def __init__(self, plan: Plan, rank: int, seed: int) -> None:
        array = oracle.whole(plan.src.shape, plan.dtype, seed)
        memory = oracle.MEMORY[(rank + seed) % 5]
        self.sources = [oracle.guarded_copy(a, memory) for a in oracle.held(array, plan.src, rank)]
        self.wanted = oracle.held(array, plan.dst, rank)
        self.local = oracle.as_argument([made.view for made in self.sources])
        self.guards: list[oracle.Guarded] = []
        if seed % 3 != 1:
            memory = oracle.MEMORY[(rank + 2 * seed) % 5]
            self.guards = [oracle.guarded(a.shape, a.dtype, memory) for a in self.wanted]
        self.out = oracle.as_argument([made.view for made in self.guards])

    def problem(self, result: Any) -> str:
        if not self.wanted:
            return "" if result is None else f"got {result!r} and wants nothing"
        if self.out is not None and result is not self.out:
            return "the result is not out"
        if not all(made.intact() for made in self.guards):
            return "elements around an output changed"
        if any(made.buffer.tobytes() != made.before.tobytes() for made in self.sources):
            return "an input changed"
        return oracle.difference(oracle.as_arrays(result), self.wanted)


def run(comm: MPI.Intracomm, plan: Plan, everyone: bool, calls: int = 2, seed: int = 0) -> str:
    """Make a resharder and call it, on all ranks or on those of the plan."""
    if not everyone and comm.rank not in plan.ranks:
        return ""
    with Resharder(plan, comm, staging_nbytes=[0, 1000, 1 << 26][seed % 3]) as reshard:
        for i in range(calls):
            call = Call(plan, comm.rank, seed + i)
            problem = call.problem(reshard(call.local, call.out))
            if problem:
                return f"{problem}\n{plan}"
    return ""


@pytest.mark.parametrize("scheduler", draws.SCHEDULERS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_random_pairs(comm, strategy, scheduler):
    rng = np.random.default_rng([SIZE, len(strategy), len(scheduler)])
    for i in range(PAIRS):
        plan = draws.plan(rng, comm.size, strategy=strategy, scheduler=scheduler)
        draws.together(comm, run(comm, plan, everyone=i % 2 == 0, seed=i))


@several
def test_ranks_in_neither_mesh_get_none(comm):
    src = Layout(DeviceMesh([0]), "R", (5,))
    dst = Layout(DeviceMesh([comm.size - 1]), "R", (5,))
    plan = xmesh.plan(src, dst, "<i4")
    wants = comm.rank == comm.size - 1
    with Resharder(plan, comm) as reshard:
        call = Call(plan, comm.rank, 0)
        request = reshard.start(call.local, call.out)
        problem = call.problem(request.wait())
        assert request.test()
        again = reshard(call.local)
    one = xmesh.reshard(call.local, src, dst, comm)
    if (again is not None, one is not None) != (wants, wants):
        problem = problem or f"got {again!r} and {one!r}"
    draws.together(comm, problem)


@several
def test_sub_communicators(comm):
    """Each half of the ranks reshards among itself, numbered backwards, at the same time."""
    half = comm.Split(comm.rank % 2, key=-comm.rank)
    rng = np.random.default_rng(7 + half.size)
    problem = ""
    for i in range(6):
        problem = problem or run(half, draws.plan(rng, half.size), everyone=True, seed=i)
    half.Free()
    draws.together(comm, problem)


def test_a_duplicate_has_a_context_of_its_own(comm):
    rng = np.random.default_rng(3)
    plan = draws.plan(rng, comm.size)
    with Resharder(plan, comm) as reshard:
        call = Call(plan, comm.rank, 0)
        reshard(call.local, call.out)
        for i in range(3):
            duplicate = comm.Dup()
            problem = run(duplicate, draws.plan(rng, comm.size), everyone=True, seed=i)
            duplicate.Free()
            draws.together(comm, problem)
        draws.together(comm, call.problem(reshard(call.local, call.out)))


def test_communicators_are_waited_for_in_opposite_orders(comm):
    """A wait on one moves the other on, too: its own ranks may wait there first."""
    duplicate = comm.Dup()
    mesh = DeviceMesh.arange((comm.size,))
    shape = (comm.size, 40_000)
    src, dst = Layout(mesh, "S0 R", shape), Layout(mesh, "R S0", shape)
    plan = xmesh.plan(src, dst, "<i4", scheduler="naive", chunk_nbytes=4096)
    both = [Resharder(plan, where, timeout_s=30) for where in (comm, duplicate)]
    problem = ""
    for turn in range(3):
        calls = [Call(plan, comm.rank, 2 * turn + i) for i in range(2)]
        begun = [r.start(c.local, c.out) for r, c in zip(both, calls, strict=True)]
        for i in (0, 1) if comm.rank % 2 else (1, 0):
            problem = problem or calls[i].problem(begun[i].wait())
    for reshard in both:
        reshard.close()
    duplicate.Free()
    draws.together(comm, problem)


def test_one_call(comm):
    """The dtype is known to source ranks only; topology and World may be given."""
    rng = np.random.default_rng(11)
    with World(comm) as world:
        for i in range(12):
            dtype = np.dtype(draws.choice(rng, draws.DTYPES))
            src, dst = draws.pair(rng, comm.size)
            plan = xmesh.plan(src, dst, dtype, draws.topology(rng, comm.size))
            call = Call(plan, comm.rank, i)
            options: dict[str, Any] = {"topology": plan.topology} if i % 3 == 0 else {}
            if 0 in src.shape or not any(src.boxes(r) for r in src.ranks):
                options["dtype"] = dtype
            where: Any = world if i % 2 else comm
            result = xmesh.reshard(call.local, src, dst, where, out=call.out, **options)
            draws.together(comm, call.problem(result))


def test_one_call_without_an_array_needs_a_dtype(comm):
    layout = Layout(DeviceMesh.arange((comm.size,)), "S0", (0,))
    with pytest.raises(xmesh.errors.ArrayError, match="a dtype is needed"):
        xmesh.reshard(None, layout, layout, comm)
    result = xmesh.reshard(None, layout, layout, comm, dtype="<f8")
    assert result.shape == (0,)
    assert result.dtype == np.dtype("<f8")


def test_reuse_with_several_in_flight(comm):
    """Different data in each; every rank waits in an order of its own."""
    rng = np.random.default_rng(5)
    own = np.random.default_rng(comm.rank)
    for strategy in STRATEGIES:
        plan = draws.plan(rng, comm.size, strategy=strategy)
        with Resharder(plan, comm, staging_nbytes=0) as reshard:
            problem = ""
            for turn in range(3):
                calls = [Call(plan, comm.rank, 3 * i + turn) for i in range(5)]
                requests = [reshard.start(call.local, call.out) for call in calls]
                for i in own.permutation(5):
                    if own.random() < 0.5:
                        requests[i].test()
                    problem = problem or calls[i].problem(requests[i].wait())
        draws.together(comm, problem)


def test_send_recv_order_does_not_hang(comm):
    """Two resharders in flight at once, waited for in opposite orders on different ranks."""
    rng = np.random.default_rng(17)
    for strategy in STRATEGIES:
        plans = [draws.plan(rng, comm.size, strategy=strategy) for _ in range(2)]
        resharders = [Resharder(plan, comm) for plan in plans]
        problem = ""
        for turn in range(3):
            calls = [Call(plan, comm.rank, turn) for plan in plans]
            requests = [
                reshard.start(call.local, call.out)
                for reshard, call in zip(resharders, calls, strict=True)
            ]
            for i in ([0, 1], [1, 0])[(comm.rank + turn) % 2]:
                problem = problem or calls[i].problem(requests[i].wait())
        for reshard in resharders:
            reshard.close()
        draws.together(comm, problem)


@several
def test_a_relay_that_waits_for_another_transfer_passes_chunks_on(comm):
    """No progress until Wait: a wait must move everything that is in flight here."""
    last = comm.size - 1
    everyone = DeviceMesh.arange((comm.size,))
    chain = xmesh.plan(
        Layout(DeviceMesh([0]), "R", (4096,)),
        Layout(everyone, "R", (4096,)),
        "<i8",
        strategy="broadcast",
        chunk_nbytes=1024,
    )
    back = xmesh.plan(
        Layout(DeviceMesh([last]), "R", (8,)), Layout(DeviceMesh([0]), "R", (8,)), "<i8"
    )
    with Resharder(chain, comm) as broadcast, Resharder(back, comm) as reply:
        there = Call(chain, comm.rank, 0)
        request = broadcast.start(there.local, there.out)
        if comm.rank in (0, last):
            answer = Call(back, comm.rank, 1)
            if comm.rank == last:  # replies only once it has the end of the chain
                request.wait()
            other = reply.start(answer.local, answer.out)
            problem = answer.problem(other.wait())
        else:
            problem = ""
        draws.together(comm, problem or there.problem(request.wait()))


def test_out_is_used_again_and_never_stale(comm):
    """A sync that succeeds with stale data: every call must bring what the sources hold now."""
    mesh = DeviceMesh.arange((comm.size,))
    src = Layout(mesh, "S0 R", (2 * comm.size, 3))
    dst = Layout(mesh, "R S0", (2 * comm.size, 3))
    plan = xmesh.plan(src, dst, "<i8", scheduler="naive", chunk_nbytes=16)
    local = np.empty(src.local_shape(comm.rank), "<i8")
    out = np.empty(dst.local_shape(comm.rank), "<i8")
    problem = ""
    with Resharder(plan, comm) as reshard:
        for seed in range(40):
            array = oracle.whole(src.shape, "<i8", seed)
            local[...] = oracle.held(array, src, comm.rank)[0]
            result = reshard(local, out)
            assert result is out
            problem = problem or oracle.difference([out], oracle.held(array, dst, comm.rank))
    draws.together(comm, problem)


def test_the_callers_own_messages_do_not_meet_ours(comm):
    """Receives from anyone with any tag are pending on the caller's communicator meanwhile."""
    plan = draws.plan(np.random.default_rng(23), comm.size)
    with Resharder(plan, comm) as reshard:
        theirs = np.zeros(4, "<i8")
        request = comm.Irecv(theirs, MPI.ANY_SOURCE, MPI.ANY_TAG)
        comm.Barrier()
        call = Call(plan, comm.rank, 0)
        problem = call.problem(reshard(call.local, call.out))
        comm.Barrier()
        comm.Send(np.full(4, comm.rank, "<i8"), (comm.rank + 1) % comm.size, 5)
        request.Wait()
        assert theirs.tolist() == [(comm.rank - 1) % comm.size] * 4
    draws.together(comm, problem)


def test_world_in_place_of_a_communicator(comm):
    rng = np.random.default_rng(29)
    with World(comm) as world:
        for i in range(4):
            plan = draws.plan(rng, comm.size)
            call = Call(plan, comm.rank, i)
            with Resharder(plan, world) as reshard:
                draws.together(comm, call.problem(reshard(call.local, call.out)))


def test_two_tensors_of_different_shapes_between_the_same_ranks(comm):
    """Later shapes are not cut to the first's, nor one shape taken for the other's."""
    mesh = DeviceMesh.arange((comm.size,))
    shapes = [(comm.size, 3), (3, comm.size), (2 * comm.size, 5), (1, 1)]
    plans = [
        xmesh.plan(
            Layout(mesh, "S0 R", s), Layout(mesh, "R S0", s), "<f4", scheduler="naive", name=f"t{i}"
        )
        for i, s in enumerate(shapes)
    ]
    resharders = [Resharder(plan, comm) for plan in plans]
    calls = [Call(plan, comm.rank, i) for i, plan in enumerate(plans)]
    requests = [r.start(c.local, c.out) for r, c in zip(resharders, calls, strict=True)]
    problems = [c.problem(q.wait()) for c, q in zip(calls[::-1], requests[::-1], strict=True)]
    for reshard in resharders:
        reshard.close()
    draws.together(comm, "\n".join(filter(None, problems)))


def test_a_plan_from_json_runs(comm):
    plan = draws.plan(np.random.default_rng(31), comm.size)
    text = comm.bcast(plan.to_json() if comm.rank == 0 else None)
    draws.together(comm, run(comm, Plan.from_json(text), everyone=True))


def test_hosts_that_are_not_in_blocks(comm):
    """All ranks of a mesh in reverse order, hosts dealt in turn."""
    ranks = list(range(comm.size))[::-1]
    mesh = DeviceMesh(ranks)
    topology = Topology([rank % 3 for rank in range(comm.size)])
    for i, strategy in enumerate(STRATEGIES):
        src, dst = Layout(mesh, "S0 R", (17, 4)), Layout(mesh, "R R", (17, 4), uneven="balanced")
        plan = xmesh.plan(src, dst, "<f8", topology, strategy, "naive", chunk_nbytes=64)
        draws.together(comm, run(comm, plan, everyone=True, seed=i))
