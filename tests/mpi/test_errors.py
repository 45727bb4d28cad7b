"""One rank's mistake: the same words on all ranks, nobody hangs, all of it usable afterwards."""

from __future__ import annotations

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
from xmesh.errors import (
    AgreementError,
    ArrayError,
    MeshError,
    PeerError,
    PlanError,
    TransportError,
    XmeshError,
)
from xmesh.planner import STRATEGIES

SIZE = MPI.COMM_WORLD.size
BAD = sorted({0, SIZE // 2, SIZE - 1} if SIZE <= 4 else {0, SIZE // 2 + 1})
several = pytest.mark.skipif(SIZE < 2, reason="needs at least 2 ranks")
WRONG: dict[str, Callable[[Any], Any]] = {
    "shape": lambda local: np.concatenate([local, local]),
    "dtype": lambda local: np.zeros(local.shape, "<f8"),
    "missing": lambda local: None,
    "list": lambda local: local.tolist(),
}


def gather_plan(**options: Any) -> Plan:
    """From a part on each rank to everything on each rank."""
    mesh = DeviceMesh.arange((SIZE,))
    shape = (2 * SIZE, 3)
    # A searched plan takes long where many ranks share a core, and matters nothing here.
    options = {"dtype": "<f4", "name": "weights", "scheduler": "naive", **options}
    return xmesh.plan(Layout(mesh, "S0 R", shape), Layout(mesh, "R R", shape), **options)


def arguments(plan: Plan, rank: int, seed: int = 0) -> tuple[Any, list[Any]]:
    array = oracle.whole(plan.src.shape, plan.dtype, seed)
    local = oracle.as_argument(oracle.held(array, plan.src, rank))
    return local, oracle.held(array, plan.dst, rank)


def error_of(call: Callable[[], Any]) -> XmeshError | None:
    try:
        call()
    except XmeshError as error:
        return error
    return None


def same_on_all(comm: MPI.Intracomm, error: XmeshError | None, kind: type[XmeshError]) -> str:
    """Check that all ranks got an error of this kind with the same text; the text."""
    seen = comm.allgather((type(error).__name__, str(error)))
    assert set(seen) == {seen[0]}, f"ranks got different errors: {sorted(set(seen))}"
    assert seen[0][0] == kind.__name__, seen[0]
    return str(error)


def still_works(comm: MPI.Intracomm, reshard: Resharder) -> None:
    plan = reshard.plan
    for seed in (5, 6):
        local, wanted = arguments(plan, comm.rank, seed)
        result = reshard(local)
        draws.together(comm, oracle.difference(oracle.as_arrays(result), wanted))


def a_new_one_works(comm: MPI.Intracomm) -> None:
    comm.Barrier()
    with Resharder(gather_plan(name="again", dtype="<i2"), comm) as reshard:
        still_works(comm, reshard)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("bad", BAD)
def test_one_rank_raises_and_the_rest_do_not_hang_at_the_first_call(comm, wrong, bad):
    with Resharder(gather_plan(), comm) as reshard:
        local, _ = arguments(reshard.plan, comm.rank)
        if comm.rank == bad:
            local = WRONG[wrong](local)
        text = same_on_all(comm, error_of(lambda: reshard(local)), ArrayError)
        assert f"rank {bad}," in text
        assert "'weights'" in text
        still_works(comm, reshard)
    a_new_one_works(comm)


@pytest.mark.parametrize(
    ("strategy", "wrong"),
    [
        *((strategy, "missing") for strategy in STRATEGIES),
        *(("broadcast", w) for w in WRONG if w != "missing"),
    ],
)
def test_one_rank_raises_and_the_rest_do_not_hang_at_a_later_call(comm, strategy, wrong):
    """Its own error there; those that wait for its data are told which rank it was."""
    plan = gather_plan(strategy=strategy, topology=Topology([r // 2 for r in range(SIZE)]))
    with Resharder(plan, comm, timeout_s=60) as reshard:
        still_works(comm, reshard)
        for bad in BAD:
            local, _ = arguments(plan, comm.rank)
            if comm.rank == bad:
                local = WRONG[wrong](local)
            error = error_of(partial(reshard, local))
            problem = ""
            if comm.rank == bad:
                if not isinstance(error, ArrayError) or f"rank {bad}," not in str(error):
                    problem = f"own error: {error!r}"
            elif not isinstance(error, PeerError):
                problem = f"error of a peer: {error!r}"
            else:
                for part in (f"no data came from rank {bad} (host ", f"rank {comm.rank},"):
                    if part not in str(error):
                        problem = f"{part!r} not in {error}"
            draws.together(comm, problem)
            still_works(comm, reshard)
    a_new_one_works(comm)


@several
def test_ranks_that_do_not_wait_for_the_bad_rank_are_unaffected(comm):
    pairs = comm.size // 2
    src = Layout(DeviceMesh.arange((pairs,)), "S0", (4 * pairs,))
    dst = Layout(DeviceMesh.arange((pairs,), start=pairs), "S0", (4 * pairs,))
    plan = xmesh.plan(src, dst, "<i4")
    with Resharder(plan, comm) as reshard:
        still_works(comm, reshard)
        local, wanted = arguments(plan, comm.rank)
        if comm.rank == 0:
            local = None
        request = reshard.start(local)
        error = error_of(request.wait)
        kinds = comm.allgather(type(error).__name__)
        expected = ["NoneType"] * comm.size
        expected[0], expected[pairs] = "ArrayError", "PeerError"
        assert kinds == expected
        if error is None:
            problem = oracle.difference(oracle.as_arrays(request.wait()), wanted)
        else:
            assert error_of(request.wait) is error
            problem = ""
        draws.together(comm, problem)
        still_works(comm, reshard)


@several
def test_all_bad_ranks_are_named(comm):
    plan = gather_plan(strategy="broadcast", chunk_nbytes=8)
    with Resharder(plan, comm) as reshard:
        still_works(comm, reshard)
        good = comm.size - 1
        local, _ = arguments(plan, comm.rank)
        error = error_of(lambda: reshard(local if comm.rank == good else None))
        if comm.rank == good:
            assert isinstance(error, PeerError)
            assert all(f"{bad} (host " in str(error) for bad in range(good))
        else:
            assert isinstance(error, ArrayError)
        still_works(comm, reshard)


@several
def test_a_bad_call_among_good_ones_in_flight(comm):
    plan = gather_plan()
    with Resharder(plan, comm) as reshard:
        still_works(comm, reshard)
        requests, problem = [], ""
        for seed in range(4):
            local, _ = arguments(plan, comm.rank, seed)
            requests.append(reshard.start(None if (seed, comm.rank) == (2, 0) else local))
        for seed in (3, 2, 0, 1):
            if seed == 2:
                kind = ArrayError if comm.rank == 0 else PeerError
                if not isinstance(error_of(requests[2].wait), kind):
                    problem = "call 2 did not fail"
            else:
                _, wanted = arguments(plan, comm.rank, seed)
                problem = problem or oracle.difference([requests[seed].wait()], wanted)
        draws.together(comm, problem)
        still_works(comm, reshard)


def test_bad_out_on_one_rank(comm):
    plan = gather_plan()
    with Resharder(plan, comm) as reshard:
        local, _ = arguments(plan, comm.rank)
        out = np.zeros((1, 1), "<f4") if comm.rank == comm.size - 1 else None
        text = same_on_all(comm, error_of(lambda: reshard(local, out)), ArrayError)
        assert "out must have the shape" in text
        still_works(comm, reshard)
        error = error_of(lambda: reshard(local, out))
        if comm.rank == comm.size - 1:
            assert isinstance(error, ArrayError)
        else:
            assert isinstance(error, PeerError)
        still_works(comm, reshard)


@several
@pytest.mark.parametrize("what", ["seed", "dtype", "shape", "strategy", "name", "topology"])
def test_plans_that_differ_between_ranks(comm, what):
    odd = comm.rank == comm.size - 1
    options: dict[str, Any] = {}
    if odd:
        by_name: dict[str, dict[str, Any]] = {
            "seed": {"seed": 1},
            "dtype": {"dtype": "<f8"},
            "strategy": {"strategy": "send_recv"},
            "name": {"name": "bias"},
            "topology": {"topology": Topology([0] * comm.size)},
            "shape": {},
        }
        options = by_name[what]
    plan = gather_plan(**options)
    if what == "shape" and odd:
        mesh = DeviceMesh.arange((comm.size,))
        shape = (2 * comm.size, 4)
        plan = xmesh.plan(
            Layout(mesh, "S0 R", shape),
            Layout(mesh, "R R", shape),
            "<f4",
            name="weights",
            scheduler="naive",
        )
    text = same_on_all(comm, error_of(lambda: Resharder(plan, comm)), AgreementError)
    assert "all ranks must call with the same" in text
    assert f"rank {comm.size - 1} has" in text
    a_new_one_works(comm)


@several
def test_one_call_with_arguments_that_differ(comm):
    plan = gather_plan()
    local, wanted = arguments(plan, comm.rank)

    def once(local: Any, seed: int = 0) -> Any:
        return xmesh.reshard(local, plan.src, plan.dst, comm, scheduler="naive", seed=seed)

    call = error_of(lambda: once(local, seed=int(comm.rank == 1)))
    assert "rank 1 has" in same_on_all(comm, call, AgreementError)
    other = np.zeros(local.shape, "<f8") if comm.rank == 1 else local
    call = error_of(lambda: once(other))
    text = same_on_all(comm, call, AgreementError)
    assert "all source ranks must pass arrays of the same dtype" in text
    for bad in (WRONG["shape"], WRONG["missing"], WRONG["list"]):
        other = bad(local) if comm.rank == 1 else local
        call = error_of(partial(once, other))
        assert "rank 1" in same_on_all(comm, call, ArrayError)
    result = once(local)
    draws.together(comm, oracle.difference([result], wanted))


def test_communicator_too_small(comm):
    mesh = DeviceMesh.arange((comm.size + 2,))
    layout = Layout(mesh, "S0", (9,))
    text = same_on_all(
        comm, error_of(lambda: Resharder(xmesh.plan(layout, layout), comm)), PlanError
    )
    assert "the communicator must hold every rank of both meshes" in text
    assert f"ranks {comm.size}, {comm.size + 1} of the plan" in text
    assert f"mpiexec -n {comm.size + 2}" in text
    error = error_of(lambda: xmesh.reshard(None, layout, layout, comm, dtype="i1"))
    same_on_all(comm, error, PlanError)
    with World(comm) as world:
        error = error_of(lambda: world.communicator(mesh))
        assert "must hold every rank of the mesh" in same_on_all(comm, error, MeshError)
    a_new_one_works(comm)


@pytest.mark.parametrize("what", ["null", "number", "group", "class"])
def test_what_is_no_communicator(comm, what):
    value: Any = {"null": MPI.COMM_NULL, "number": 3, "group": comm.Get_group(), "class": MPI}[what]
    text = same_on_all(comm, error_of(lambda: Resharder(gather_plan(), value)), TransportError)
    assert "comm must be an mpi4py communicator" in text
    plan = gather_plan()
    call = error_of(lambda: xmesh.reshard(None, plan.src, plan.dst, value))
    same_on_all(comm, call, TransportError)


def test_a_long_text_in_any_script_reaches_all_ranks(comm):
    """Error texts travel in messages of fixed size."""
    for letter in ("x", "é", "重", "🚀", "\x01", '"'):
        plan = gather_plan(name=letter * 3000)
        with Resharder(plan, comm) as reshard:
            error = error_of(partial(reshard, np.zeros(1, "<f4")))
            assert repr(letter)[1:-1] in same_on_all(comm, error, ArrayError)


def test_a_dtype_with_hundreds_of_fields(comm):
    """Its name travels in a message of fixed size: it works, or all ranks say why it does not."""
    plan = gather_plan(dtype=[(f"a_field_with_a_long_name_{i}", "<f4") for i in range(600)])
    local, wanted = arguments(plan, comm.rank)
    with Resharder(plan, comm) as reshard:
        draws.together(comm, oracle.difference([reshard(local)], wanted))
    results: list[Any] = []

    def once() -> None:
        results.append(xmesh.reshard(local, plan.src, plan.dst, comm, scheduler="naive"))

    error = error_of(once)
    if error is None:
        draws.together(comm, oracle.difference(results, wanted))
    else:
        same_on_all(comm, error, ArrayError)
    a_new_one_works(comm)


@several
@pytest.mark.parametrize("options", [{"staging_nbytes": "much"}, {"timeout_s": None}])
def test_options_of_one_rank_without_meaning_reach_all(comm, options):
    plan = gather_plan()
    mine = options if comm.rank == comm.size - 1 else {}
    error = error_of(lambda: Resharder(plan, comm, **mine))
    text = same_on_all(comm, error, xmesh.errors.OptionError)
    assert repr(next(iter(options.values()))) in text
    with Resharder(plan, comm) as reshard:
        still_works(comm, reshard)


def test_a_plan_wholly_outside_the_communicator(comm):
    layout = Layout(DeviceMesh([comm.size + 5]), "R", (4,))
    for call in (
        lambda: Resharder(xmesh.plan(layout, layout), comm),
        lambda: xmesh.reshard(np.zeros(4), layout, layout, comm),
    ):
        text = same_on_all(comm, error_of(call), PlanError)
        assert "the communicator must hold every rank of both meshes" in text
