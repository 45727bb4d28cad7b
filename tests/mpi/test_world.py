"""World: the topology as MPI and Slurm tell it, communicators on meshes, and no leak of either."""

from __future__ import annotations

import os
import time

import draws
import numpy as np
import oracle
import pytest
from mpi4py import MPI

import xmesh
from xmesh import DeviceMesh, Layout, Plan, Resharder, Topology, World
from xmesh.errors import AgreementError, ClosedError, MeshError, TopologyError

SIZE = MPI.COMM_WORLD.size
several = pytest.mark.skipif(SIZE < 2, reason="needs at least 2 ranks")


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch):
    """The machine that runs these tests may itself be a Slurm node."""
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)


def as_if_by_slurm(monkeypatch, rank: int, nodes: int) -> list[str]:
    """Set the variables of a step of SIZE ranks on some nodes; the node of each rank."""
    counts = [SIZE // nodes + (i < SIZE % nodes) for i in range(nodes)]
    for name, value in {
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        "SLURM_STEP_NUM_TASKS": str(SIZE),
        "SLURM_PROCID": str(rank),
    }.items():
        monkeypatch.setenv(name, value)
    return [f"n{node + 1}" for node, count in enumerate(counts) for _ in range(count)]


def names(topology: Topology) -> list[str]:
    return [topology.host_name(rank) for rank in range(topology.num_ranks)]


def test_topology_by_shared_memory(comm):
    with World(comm) as world:
        shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
        mates = shared.allgather(comm.rank)
        shared.Free()
        topology = world.topology
        assert world.topology_source == "mpi"
        assert topology.num_ranks == comm.size
        mine = topology.host(comm.rank)
        assert [r for r in range(comm.size) if topology.host(r) == mine] == sorted(mates)
        assert topology.host_name(comm.rank).startswith(MPI.Get_processor_name())
        assert all(other == topology.to_json() for other in comm.allgather(topology.to_json()))


def test_topology_from_slurm(comm, monkeypatch):
    nodes = min(3, comm.size)
    expected = as_if_by_slurm(monkeypatch, comm.rank, nodes)
    with World(comm, topology="slurm") as world:
        assert names(world.topology) == expected
        assert world.topology_source == "slurm"
    with World(comm, topology="mpi") as world:
        assert world.topology_source == "mpi"
    with World(comm) as world:  # Slurm's, where all ranks have its variables
        assert world.topology_source == "slurm"


@several
def test_slurm_variables_that_one_rank_lacks(comm, monkeypatch):
    as_if_by_slurm(monkeypatch, comm.rank, 2)
    if comm.rank == comm.size - 1:
        monkeypatch.delenv("SLURM_PROCID")
    with World(comm) as world:
        assert world.topology_source == "mpi"
    with pytest.raises(TopologyError, match="needs its variables on every rank") as caught:
        World(comm, topology="slurm")
    assert f"rank {comm.size - 1} has none" in str(caught.value)
    if comm.rank == 0:
        monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-")
    with pytest.raises(TopologyError) as caught:
        World(comm, topology="slurm")
    assert "rank 0" in str(caught.value)


def test_given_topology(comm):
    topology = Topology([rank % 2 for rank in range(comm.size)])
    with World(comm, topology) as world:
        assert world.topology == topology
        assert world.topology_source == "given"
    with pytest.raises(TopologyError):
        World(comm, Topology([0] * (comm.size - 1)) if comm.size > 1 else "no such")
    with pytest.raises(TopologyError, match="topology must be a Topology or one of"):
        World(comm, "hostfile")


@several
def test_topologies_that_differ_between_ranks(comm):
    hosts = [0] * comm.size
    hosts[-1] = int(comm.rank == 0)
    with pytest.raises(AgreementError, match="all ranks must call with the same topology"):
        World(comm, Topology(hosts))
    World(comm).close()


def grid() -> DeviceMesh:
    """All ranks in reverse, as (SIZE / 2, 2) where that is possible."""
    ranks = np.arange(SIZE)[::-1]
    shape = (SIZE // 2, 2) if SIZE % 2 == 0 else (SIZE, 1)
    return DeviceMesh(ranks.reshape(shape), axis_names=("dp", "tp"))


def test_communicators_on_a_mesh_and_its_axes(comm):
    mesh = grid()
    table = np.array(mesh.ranks).reshape(mesh.shape)
    row, column = mesh.coordinates(comm.rank)
    with World(comm) as world:
        whole = world.communicator(mesh)
        assert whole is not None
        assert whole.rank == mesh.ranks.index(comm.rank)  # numbered as in the mesh
        assert whole.allreduce(comm.rank) == sum(range(comm.size))
        for axis, name, line in ((0, "dp", table[:, column]), (1, "tp", table[row])):
            by_index = world.communicator(mesh, axis=axis)
            by_name = world.communicator(mesh, axis=name)
            assert by_index is by_name
            assert by_index is not None
            assert by_index.allgather(comm.rank) == line.tolist()
            assert by_index.allreduce(comm.rank) == line.sum()
        assert world.communicator(mesh) is whole
        same_ranks = DeviceMesh(list(mesh.ranks))
        assert world.communicator(same_ranks) is whole
        with pytest.raises(MeshError, match="axis"):
            world.communicator(mesh, axis="pp")
        with pytest.raises(MeshError):
            world.communicator(mesh, axis=2)
    assert whole == MPI.COMM_NULL
    with pytest.raises(ClosedError, match="after close"):
        world.communicator(mesh)
    world.close()
    assert comm.allreduce(1) == comm.size  # the caller's communicator stays


@several
def test_rival_groups_do_not_hang(comm):
    """Overlapping meshes, made in an order of which each rank sees only its own part."""
    meshes = [DeviceMesh([r, r + 1]) for r in range(comm.size - 1)]
    meshes += [DeviceMesh([0, comm.size - 1]), DeviceMesh.arange((comm.size,)), DeviceMesh([1, 0])]
    with World(comm) as world:
        for mesh in meshes:
            found = world.communicator(mesh)
            assert (found is None) == (comm.rank not in mesh)
            if found is not None:
                assert found.allgather(comm.rank) == list(mesh.ranks)


def small_plan(ranks: list[int], name: str = "t") -> Plan:
    mesh = DeviceMesh(ranks)
    shape = (len(ranks) + 1, 2)
    src, dst = Layout(mesh, "S0 R", shape), Layout(mesh, "R S0", shape)
    return xmesh.plan(src, dst, "<i4", strategy="broadcast", scheduler="naive", name=name)


def move(reshard: Resharder, rank: int, seed: int) -> str:
    plan = reshard.plan
    array = oracle.whole(plan.src.shape, plan.dtype, seed)
    result = reshard(oracle.as_argument(oracle.held(array, plan.src, rank)))
    return oracle.difference(oracle.as_arrays(result), oracle.held(array, plan.dst, rank))


def mates(rank: int) -> list[int]:
    """Ranks in pairs: many ranks share few cores, and what runs out is counted by process."""
    return [r for r in (rank & ~1, rank | 1) if r < SIZE]


def test_communicators_do_not_run_out(comm):
    """Thousands of resharders, one after the other; MPICH has about 2000 communicators to give."""
    problem = ""
    if comm.rank < 2:  # what runs out is counted by process, and many ranks share few cores
        plan = small_plan(mates(comm.rank))
        for i in range(3000 if comm.size <= 4 else 2200):
            with Resharder(plan, comm) as reshard:
                if i % 100 == 0:
                    problem = problem or move(reshard, comm.rank, i)
    over = comm.Ibarrier()
    while not over.Test():
        time.sleep(0.01)
    draws.together(comm, problem)


def test_500_resharders_are_open_at_once(comm):
    """On a few sets of ranks, closed in another order than opened, the others still at work."""
    sets = [mates(comm.rank), list(range(comm.size)), list(range(comm.size))[::-1]]
    plans = [small_plan(ranks, name=f"w{i}") for i, ranks in enumerate(sets)]
    opened = []
    for i in range(500):
        # Of the sets with more ranks fewer, for the same reason.
        opened.append(Resharder(plans[1 + i % 2 if i % 25 == 0 else 0], comm))
    problem = ""
    for i in (0, 25, 250, 499):
        problem = problem or move(opened[i], comm.rank, i)
    for reshard in opened[1::2]:
        reshard.close()
    for i in (0, 26, 250):
        problem = problem or move(opened[i], comm.rank, i)
    for reshard in opened[::2]:
        reshard.close()
    with Resharder(plans[1], comm) as reshard:
        problem = problem or move(reshard, comm.rank, 1)
    draws.together(comm, problem)


def test_worlds_open_and_close_hundreds_of_times(comm):
    mesh = grid()
    for i in range(300 if comm.size <= 4 else 15):
        with World(comm) as world:
            for axis in (None, "dp", 1):
                found = world.communicator(mesh, axis=axis)
                assert found is not None
                if i % 10 == 0:
                    assert comm.rank in found.allgather(comm.rank)


def test_communicators_of_the_caller_come_and_go(comm):
    """A context is kept on each communicator; freeing that must take it along."""
    plan = small_plan(list(range(comm.size)))
    for i in range(60 if comm.size <= 4 else 8):
        duplicate = comm.Dup()
        with World(duplicate) as world, Resharder(plan, world) as reshard:
            problem = move(reshard, comm.rank, i)
        duplicate.Free()
        draws.together(comm, problem)
