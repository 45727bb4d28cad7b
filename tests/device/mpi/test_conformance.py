"""Every transport between processes: MPI with arrays on the host, on devices, on both; and NCCL."""

from __future__ import annotations

import conformance
import pytest
from mpi4py import MPI

from xmesh.device.memory import AwareMemory, StagedMemory
from xmesh.planner import STRATEGIES

SIZE = MPI.COMM_WORLD.size
PAIRS = {1: 6, 2: 12, 4: 12}.get(SIZE, 5)
CALLS = 100 if SIZE <= 4 else 20

WORLDS = {
    "host": ("mpi", lambda rank: False),
    "staged": ("mpi", lambda rank: True),
    "mixed": ("mpi", lambda rank: rank % 2 == 0),
    "nccl": ("nccl", lambda rank: True),
    "aware": ("mpi", lambda rank: True),
    "aware mixed": ("mpi", lambda rank: rank % 2 == 1),
}
MARKS = {"aware": [pytest.mark.aware], "aware mixed": [pytest.mark.aware]}
MARKS["nccl"] = [pytest.mark.cupy13]
DEVICES = ("staged", "nccl", "aware")


def params(names):
    return [pytest.param(name, marks=MARKS.get(name, ())) for name in names]


def made(comm, name):
    return conformance.OverMpi(comm, *WORLDS[name])


@pytest.fixture(autouse=True)
def _nobody_waits_for_the_device():
    conformance.engine.counters.clear()
    yield
    assert conformance.engine.counters["deviceSynchronize"] == 0


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
@pytest.mark.parametrize("name", params(WORLDS))
def test_random_pairs(comm, name, strategy):
    conformance.random_pairs(made(comm, name), strategy, PAIRS)


@pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", params(WORLDS))
def test_case(comm, name, case):
    case(made(comm, name))


@pytest.mark.parametrize("name", params(DEVICES))
def test_repeated_calls_stay_flat(comm, name):
    conformance.repeated_calls_stay_flat(made(comm, name), CALLS)


@pytest.mark.parametrize("case", conformance.ON_DEVICES[1:], ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", params(DEVICES))
def test_streams(comm, name, case):
    case(made(comm, name))


@pytest.mark.parametrize("name", params(["staged", "aware"]))
def test_the_memory_is_what_the_run_is_for(comm, name):
    """Else these runs would test the same thing."""
    world = made(comm, name)
    plan = conformance.rows_to_all(world)
    with world.resharder(plan) as reshard:
        call = conformance.Call(world, plan)
        world.together(call.problem(call.start(reshard)))
        kind = type(reshard._members[0].device_memory())
    assert kind is {"staged": StagedMemory, "aware": AwareMemory}[name]
