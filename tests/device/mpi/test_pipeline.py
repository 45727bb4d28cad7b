"""Pipelines on GPUs: the same results, by MPI and by NCCL, and a host that goes on."""

from __future__ import annotations

import cupy
import draws
import pytest
from cupy import _engine
from pipelines import SIZE, Model, Stage, batch_of, compare, cut_in_groups, pipeline, raised

from xmesh import World
from xmesh.errors import CallbackError
from xmesh.pipeline import Driver, Pipeline, Tied

TRANSPORTS = ["mpi", "nccl"]
TRAINING = [("gpipe", False, None), ("1f1b", True, None), ("interleaved-1f1b", False, 2)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("name", "weight_delay", "chunks"), TRAINING)
def test_a_pipeline_on_gpus_gives_what_one_process_does(
    comm, transport, name, weight_delay, chunks
):
    for seed, groups in ((1, min(2, SIZE)), (2, min(4, SIZE))):
        options = {"weight_delay": weight_delay, "chunks": chunks, "skips": 1}
        model, pipe = pipeline(name, groups, 3, seed, **options)
        stage = Stage(model, pipe, comm.rank, cupy)
        before = _engine.counters["deviceSynchronize"]
        with (
            World(comm) as world,
            Driver(
                pipe, world, stage, gradient_scale=0.5, transport=transport, like=cupy, timeout_s=60
            ) as driver,
        ):
            for step in range(2):
                batch = batch_of(3, 10 * seed + step)
                losses = driver.step(batch)
                draws.together(comm, compare(driver, stage, losses, batch))
            if driver.group is not None:
                assert {r.transport for r in driver.resharders.values()} <= {transport}
        assert _engine.counters["deviceSynchronize"] == before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_host_runs_ahead_of_the_gpu(comm, transport):
    """A callback is called while the GPU still computes what the callbacks before it gave it."""
    if SIZE < 2:
        pytest.skip("needs two ranks")
    model, pipe = pipeline("gpipe", 2, 4)
    stage = Stage(model, pipe, comm.rank, cupy)
    ahead = []

    def before(op, number, microbatch):
        stream = cupy.cuda.get_current_stream()
        ahead.append(not stream.done)
        _engine.delay(stream.ptr, 0.02)

    stage.before = before
    with (
        World(comm) as world,
        Driver(pipe, world, stage, transport=transport, like=cupy, timeout_s=60) as driver,
        cupy.cuda.Stream(non_blocking=True),
    ):
        batch = batch_of(4, 3)
        losses = driver.step(batch)
        draws.together(comm, compare(driver, stage, losses, batch))
        draws.together(comm, "" if any(ahead) else f"never ahead: {ahead}")


class OneWeight(Stage):
    """Every stage has a weight of its own, and one that all of them share."""

    def backward_weight(self, stage, microbatch, saved):
        shared = cupy.full(3, 10.0**stage)
        return {"w": cupy.full(2, stage + 1.0), "shared": shared}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.skipif(SIZE % 2 != 0, reason="needs two meshes of one shape")
def test_tied_gradients_on_gpus_are_summed(comm, transport):
    meshes = cut_in_groups(2)
    model = Model(len(meshes))
    tied = [Tied("shared", tuple(range(len(meshes))))]
    pipe = Pipeline(meshes, model.edges, "1f1b", 4, tied=tied)
    stage = OneWeight(model, pipe, comm.rank, cupy)
    wanted = sum(10.0**s for s in range(len(meshes)))
    with (
        World(comm) as world,
        Driver(
            pipe, world, stage, gradient_scale=0.25, transport=transport, like=cupy, timeout_s=60
        ) as driver,
    ):
        for _ in range(2):  # sums begin at 0 again
            driver.step(batch_of(4, 0))
            for number, found in driver.gradients.items():
                assert (found["w"].get() == number + 1).all()
                assert (found["shared"].get() == wanted).all()


def test_an_array_of_the_host_under_nccl_is_the_callbacks_mistake(comm):
    if SIZE < 2:
        pytest.skip("needs two ranks")
    model, pipe = pipeline("gpipe", 2, 2)
    stage = Stage(model, pipe, comm.rank)  # returns arrays of NumPy
    with (
        World(comm) as world,
        Driver(pipe, world, stage, transport="nccl", like=cupy, timeout_s=60) as driver,
    ):
        assert driver.transport == "nccl"
        error = raised(lambda: driver.step(batch_of(2, 1)))
        assert isinstance(error, CallbackError)
        for words in ("lies in host memory, and NCCL moves none", "action 0F0", "rank 0"):
            assert words in str(error)
        stage.xp = cupy
        batch = batch_of(2, 2)
        draws.together(comm, compare(driver, stage, driver.step(batch), batch))
