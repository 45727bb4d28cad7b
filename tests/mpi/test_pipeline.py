"""Pipelines on real ranks: every schedule gives what one process does, and errors reach all."""

from __future__ import annotations

import gc
import json
import time

import draws
import numpy as np
import pytest
from pipelines import SIZE, Model, Stage, batch_of, compare, cut_in_groups, pipeline, raised

from xmesh import DeviceMesh, World
from xmesh.errors import (
    CallbackError,
    OptionError,
)
from xmesh.pipeline import (
    Driver,
    Pipeline,
    PipelineSchedule,
    Tied,
)

#: Schedule, weight delay, chunks.
TRAINING = [
    ("gpipe", False, None),
    ("gpipe", True, None),
    ("1f1b", False, None),
    ("1f1b", True, None),
    ("eager-1f1b", False, None),
    ("eager-1f1b", True, None),
    ("interleaved-1f1b", False, 2),
    ("zb-h1", False, None),
]


@pytest.mark.parametrize(("name", "weight_delay", "chunks"), TRAINING)
@pytest.mark.parametrize("skips", [0, 2])
def test_every_schedule_gives_what_one_process_does(comm, name, weight_delay, chunks, skips):
    for seed, groups, count in ((1, min(2, SIZE), 3), (2, min(4, SIZE), 5), (3, min(6, SIZE), 1)):
        options = {"weight_delay": weight_delay, "chunks": chunks, "skips": skips}
        model, pipe = pipeline(name, groups, count, seed, **options)
        stage = Stage(model, pipe, comm.rank)
        with World(comm) as world, Driver(pipe, world, stage, gradient_scale=0.5) as driver:
            for step in range(2):
                batch = batch_of(count, 10 * seed + step)
                losses = driver.step(batch)
                draws.together(comm, compare(driver, stage, losses, batch))
            problem = ""
            peaks = pipe.simulate().peak_activations
            parts = len(pipe.schedule.stages_of_group(driver.group))
            if parts == 1 and max(driver.peak_activations.values()) != peaks[driver.group]:
                problem = f"peak {driver.peak_activations}, the schedule has {peaks}"
            if stage.reduced != 2 * list(pipe.schedule.stages_of_group(driver.group)):
                problem = f"reduced {stage.reduced}"
            draws.together(comm, problem)


def test_inference_returns_outputs_and_keeps_nothing(comm):
    model, pipe = pipeline("inference", min(3, SIZE), 4)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world, Driver(pipe, world, stage) as driver:
        batch = batch_of(4, 0)
        losses = driver.step(batch)
        draws.together(comm, compare(driver, stage, losses, batch))
        assert not stage.reduced
        assert max(driver.peak_activations.values()) == 1


def test_a_schedule_of_ones_own(comm):
    text = "0F0 0F1 0B1 0B0" if SIZE == 1 else "0F1 0F0 0B1 0B0\n1F1 1B1 1F0 1B0"
    model = Model(min(2, SIZE))
    pipe = Pipeline(cut_in_groups(min(2, SIZE)), model.edges, PipelineSchedule.parse(text))
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world, Driver(pipe, world, stage) as driver:
        batch = batch_of(2, 0)
        draws.together(comm, compare(driver, stage, driver.step(batch), batch))


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_progress_by_a_thread_or_by_nobody(comm, progress):
    model, pipe = pipeline("eager-1f1b", min(4, SIZE), 4)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world, Driver(pipe, world, stage, progress=progress) as driver:

        def before(op: str, number: int, microbatch: int) -> None:
            time.sleep(0.001)
            driver.poll()

        stage.before = before
        for step in range(3):
            batch = batch_of(4, step)
            draws.together(comm, compare(driver, stage, driver.step(batch), batch))


@pytest.mark.skipif(SIZE < 2, reason="a rank of its own is left out")
def test_ranks_in_no_stage_look_on(comm):
    model = Model(1)
    pipe = Pipeline([DeviceMesh([SIZE - 1])], model.edges, "1f1b", 2)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world, Driver(pipe, world, stage) as driver:
        batch = batch_of(2, 0)
        losses = driver.step(batch)
        problem = compare(driver, stage, losses, batch) if comm.rank == SIZE - 1 else ""
        assert comm.rank == SIZE - 1 or (losses == [] and driver.gradients == {})
        draws.together(comm, problem)


# --- Gradients ----------------------------------------------------------------------------------


class OneWeight(Stage):
    """Its weight gradients are numbers that tell who gave them."""

    def backward_weight(self, stage, microbatch, saved):
        return {"w": np.array([stage + 1.0]), "shared": np.array([10.0**stage])}


@pytest.mark.parametrize("chunks", [None, 2])
def test_tied_weights_are_summed_once(comm, chunks):
    """In Megatron-like systems tied copies drift apart where one sum is missed, or done twice."""
    groups = 2 if SIZE % 2 == 0 else 1
    if groups == 1 and chunks is None:
        pytest.skip("one stage has no copies")
    name = "interleaved-1f1b" if chunks else "1f1b"
    meshes = cut_in_groups(groups) * (chunks or 1)
    model = Model(len(meshes))
    tied = [Tied("shared", tuple(range(len(meshes))))]
    pipe = Pipeline(meshes, model.edges, name, 4, chunks=chunks, tied=tied)
    with World(comm) as world:
        driver = Driver(pipe, world, OneWeight(model, pipe, comm.rank), gradient_scale=0.25)
        with driver:
            for _ in range(2):  # sums begin at 0 again
                driver.step(batch_of(4, 0))
                for stage, found in driver.gradients.items():
                    assert found["w"] == stage + 1
                    assert found["shared"] == sum(10.0**s for s in range(len(meshes)))


def test_a_weight_that_changes_its_shape_is_refused(comm):
    model, pipe = pipeline("1f1b", 1, 2)
    stage = Stage(model, pipe, comm.rank)
    vars(stage)["backward_weight"] = lambda s, microbatch, saved: {"w": np.zeros(1 + microbatch)}
    with World(comm) as world, Driver(pipe, world, stage) as driver:
        error = raised(lambda: driver.step(batch_of(2, 0)))
        assert isinstance(error, CallbackError)
        assert "same shape and dtype at all times" in str(error)


class OddWeights(Stage):
    """The last stage's gradient has another name, or another shape, than the first one's."""

    odd: dict[str, np.ndarray]

    def backward_weight(self, stage, microbatch, saved):
        return {"shared": np.zeros(3)} if stage == 0 else self.odd


@pytest.mark.skipif(SIZE % 2 != 0, reason="needs two meshes of one shape")
@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"share": np.zeros(3)}, "no 'shared' among those of stage 1: share"),
        ({"shared": np.zeros(4)}, r"stage 0: (3,) float64, stage 1: (4,) float64"),
    ],
)
def test_tied_weights_that_do_not_match_are_refused_on_all_ranks(comm, odd, text):
    """A rank that raised alone would leave the others in the sum for ever."""
    model = Model(2)
    meshes = cut_in_groups(2)
    pipe = Pipeline(meshes, model.edges, "1f1b", 2, tied=[Tied("shared", (0, 1))])
    stage = OddWeights(model, pipe, comm.rank)
    stage.odd = odd
    with World(comm) as world, Driver(pipe, world, stage, timeout_s=60) as driver:
        for _ in range(2):
            error = raised(lambda: driver.step(batch_of(2, 0)))
            assert isinstance(error, CallbackError)
            assert text in str(error), error


def test_gradients_that_cannot_be_scaled_are_refused_on_all_ranks(comm):
    model, pipe = pipeline("1f1b", min(2, SIZE), 2)
    stage = Stage(model, pipe, comm.rank)
    if comm.rank == 0:
        vars(stage)["backward_weight"] = lambda *_: {"w": np.ones(2, np.int64)}
    with World(comm) as world:
        driver = Driver(pipe, world, stage, gradient_scale=0.25, timeout_s=60)
        with driver:
            error = raised(lambda: driver.step(batch_of(2, 0)))
            assert isinstance(error, CallbackError)
            assert "REDUCE" in str(error)


@pytest.mark.skipif(SIZE < 2, reason="needs two stages")
def test_callbacks_may_differ_from_stage_to_stage(comm):
    """Whether there is a `reduce` is each rank's own affair."""
    model, pipe = pipeline("1f1b", 2, 2)

    class Plain:
        """Stage without reduce."""

        def __init__(self, stage: Stage) -> None:
            self.forward, self.backward = stage.forward, stage.backward

    stage = Stage(model, pipe, comm.rank)
    callbacks = Plain(stage) if comm.rank in pipe.stages[0] else stage
    with World(comm) as world, Driver(pipe, world, callbacks, timeout_s=60) as driver:
        for step in range(3):
            batch = batch_of(2, step)
            draws.together(comm, compare(driver, stage, driver.step(batch), batch))


def test_a_callback_may_use_the_same_world(comm):
    """A progress thread moves transfers on meanwhile; both look at what is in flight."""
    model, pipe = pipeline("eager-1f1b", min(2, SIZE), 4)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world, Driver(pipe, world, stage, timeout_s=60) as driver:

        def before(op: str, number: int, microbatch: int) -> None:
            line = world.communicator(pipe.stages[number])  # made at the first call
            assert line is not None
            line.allreduce(1)
            time.sleep(0.001)

        stage.before = before
        for step in range(3):
            batch = batch_of(4, step)
            draws.together(comm, compare(driver, stage, driver.step(batch), batch))


# --- Over many steps ----------------------------------------------------------------------------


def test_memory_stays_flat(comm):
    import tracemalloc

    model, pipe = pipeline("eager-1f1b", min(2, SIZE), 4)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world, Driver(pipe, world, stage) as driver:
        batch = batch_of(4, 0)
        for _ in range(20):
            driver.step(batch)
        tracemalloc.start()
        driver.step(batch)
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(60):
            driver.step(batch)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - first
        tracemalloc.stop()
    assert grown < 20_000, f"{grown} bytes more after 60 steps"


def test_a_measured_step_has_every_computation_and_transfer(comm):
    model, pipe = pipeline("1f1b", min(3, SIZE), 4, skips=1)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world, Driver(pipe, world, stage, record=True) as driver:
        driver.step(batch_of(4, 0))
        measured = driver.measured()
    assert (measured is None) == (comm.rank != 0)
    if measured is None:
        return
    found = measured.timeline()
    simulated = pipe.simulate(transfer_s=1)
    assert sorted(span.action for span in found.timeline) == sorted(
        span.action for span in simulated.timeline
    )
    for span in found.timeline:
        assert 0 <= span.start_s <= span.end_s <= found.makespan_s + 1e-3
    assert found.bubble_s >= 0
    assert 0 <= found.overlap <= 1
    trace = json.loads(json.dumps(measured.chrome_trace()))
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in bars} == set(range(1, SIZE + 1))
    assert sum(event["name"] == "0F0" for event in bars) == len(pipe.stages[0].ranks)


def test_nothing_is_measured_without_record(comm):
    model, pipe = pipeline("1f1b", 1, 2)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world, Driver(pipe, world, stage) as driver:
        driver.step(batch_of(2, 0))
        error = raised(driver.measured)
    assert isinstance(error, OptionError)
    assert "record=True" in str(error)
