"""Pipelines on real ranks: every schedule gives what one process does, and errors reach all."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import draws
import numpy as np
import pytest
from mpi4py import MPI

from xmesh import DeviceMesh, Layout, World
from xmesh.errors import (
    AgreementError,
    CallbackError,
    ClosedError,
    OptionError,
    ScheduleError,
    TransferTimeout,
    XmeshError,
)
from xmesh.pipeline import (
    Backward,
    BackwardInput,
    Driver,
    Edge,
    Forward,
    Pipeline,
    PipelineSchedule,
    Tied,
)

SIZE = MPI.COMM_WORLD.size
SHAPE = (6, 5)
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


def cut_in_groups(num_groups: int) -> list[DeviceMesh]:
    """Meshes of all ranks, of different sizes where they do not divide."""
    cuts = [SIZE * i // num_groups for i in range(num_groups + 1)]
    return [DeviceMesh(range(a, b)) for a, b in itertools.pairwise(cuts)]


class Model:
    """Each stage multiplies the sum of what it gets; every edge scales. All of it elementwise.

    A stage's weight gradient is kept element by element, so that any element that went the wrong
    way, or twice, shows.
    """

    def __init__(self, num_stages: int, seed: int = 0, skips: int = 0) -> None:
        rng = random.Random(seed)
        self.num_stages = num_stages
        self.weights = [rng.choice([-2.0, 0.5, 3.0]) for _ in range(num_stages)]
        self.specs = [rng.choice(["S0 R", "R S0", "R R"]) for _ in range(num_stages)]
        ends = [(s, s + 1) for s in range(num_stages - 1)]
        for _ in range(skips if num_stages > 1 else 0):
            a, b = sorted(rng.sample(range(num_stages), 2))
            ends.append((a, b))
        self.edges = [
            Edge(
                f"e{i}",
                a,
                b,
                src=self.specs[a],
                dst=self.specs[b],
                shape=SHAPE,
                dtype="float64",
                differentiable=i < num_stages - 1 or rng.random() < 0.7,
            )
            for i, (a, b) in enumerate(ends)
        ]
        self.factors = {edge.name: rng.choice([1.0, -1.5, 2.0]) for edge in self.edges}

    def into(self, stage: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.dst_stage == stage]

    def out_of(self, stage: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.src_stage == stage]

    def reference(self, batch: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Output of the last stage for each micro-batch, and the sum of each weight's gradient."""
        outputs = []
        gradients = [np.zeros(SHAPE) for _ in range(self.num_stages)]
        for data in batch:
            sums, results = [], []
            on_edge: dict[str, np.ndarray] = {}
            for stage in range(self.num_stages):
                z = sum((on_edge[e.name] for e in self.into(stage)), np.zeros(SHAPE))
                sums.append(z + (data if stage == 0 else 0))
                results.append(self.weights[stage] * sums[-1])
                on_edge |= {e.name: self.factors[e.name] * results[-1] for e in self.out_of(stage)}
            outputs.append(results[-1])
            back: dict[str, np.ndarray] = {}
            for stage in reversed(range(self.num_stages)):
                dy = np.full(SHAPE, 1.0 if stage == self.num_stages - 1 else 0.0)
                for e in self.out_of(stage):
                    if e.differentiable:
                        dy = dy + self.factors[e.name] * back[e.name]
                gradients[stage] += dy * sums[stage]
                back |= {e.name: self.weights[stage] * dy for e in self.into(stage)}
        return outputs, gradients


class Stage:
    """The model's callbacks on this rank."""

    def __init__(self, model: Model, pipe: Pipeline, rank: int) -> None:
        self.model, self.pipe, self.rank = model, pipe, rank
        self.reduced: list[int] = []
        self.before: Callable[[str, int, int], None] = lambda op, stage, microbatch: None

    def slices(self, stage: int) -> Any:
        layout = Layout(self.pipe.stages[stage], self.model.specs[stage], SHAPE)
        (box,) = layout.boxes(self.rank)
        return box.slices()

    def forward(self, stage, microbatch, inputs, data):
        self.before("F", stage, microbatch)
        assert set(inputs) == {edge.name for edge in self.model.into(stage)}
        here = np.zeros(SHAPE)[self.slices(stage)]
        z = sum(inputs.values(), here) + (data[self.slices(stage)] if stage == 0 else 0)
        y = self.model.weights[stage] * z
        outputs = {e.name: self.model.factors[e.name] * y for e in self.model.out_of(stage)}
        last = stage == self.model.num_stages - 1
        return Forward(outputs, saved=z, loss=y if last else None)

    def backward_input(self, stage, microbatch, gradients, saved):
        self.before("I", stage, microbatch)
        wanted = {edge.name for edge in self.model.out_of(stage) if edge.differentiable}
        assert set(gradients) == wanted
        dy = np.full(saved.shape, 1.0 if stage == self.model.num_stages - 1 else 0.0)
        for name, gradient in gradients.items():
            dy = dy + self.model.factors[name] * gradient
        dz = self.model.weights[stage] * dy
        inputs = {e.name: dz for e in self.model.into(stage) if e.differentiable}
        return BackwardInput(inputs, saved=(dy, saved))

    def backward_weight(self, stage, microbatch, saved):
        self.before("W", stage, microbatch)
        dy, z = saved
        return {"w": dy * z}

    def backward(self, stage, microbatch, gradients, saved):
        inputs, more = self.backward_input(stage, microbatch, gradients, saved)
        return Backward(inputs, self.backward_weight(stage, microbatch, more))

    def reduce(self, stage, gradients):
        self.reduced.append(stage)


def batch_of(count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-3, 4, SHAPE).astype("f8") for _ in range(count)]


def compare(driver: Driver, stage: Stage, losses: list[Any], batch: list[np.ndarray]) -> str:
    """What is wrong on this rank."""
    outputs, gradients = stage.model.reference(batch)
    last = stage.model.num_stages - 1
    if stage.rank in stage.pipe.stages[last]:
        for found, wanted in zip(losses, outputs, strict=True):
            if not np.array_equal(found, wanted[stage.slices(last)]):
                return f"rank {stage.rank}: wrong output\n{found}\n{wanted[stage.slices(last)]}"
    elif losses:
        return f"rank {stage.rank} has losses"
    for number, found in driver.gradients.items() if not stage.pipe.schedule.forward_only else ():
        wanted = gradients[number][stage.slices(number)] * driver.gradient_scale
        if not np.array_equal(found["w"], wanted):
            return f"rank {stage.rank}, stage {number}: gradient\n{found['w']}\n{wanted}"
    return ""


def raised(call: Callable[[], Any]) -> XmeshError | None:
    try:
        call()
    except XmeshError as error:
        return error
    return None


def pipeline(name: str, groups: int, count: int, seed: int = 0, **options: Any):
    """A model and its pipeline; interleaved ones have two stages on each group."""
    skips = options.pop("skips", 0)
    meshes = cut_in_groups(groups) * (options.get("chunks") or 1)
    model = Model(len(meshes), seed, skips)
    return model, Pipeline(meshes, model.edges, name, count, **options)


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
    text = "0F0 0F1 0B1 0B0" if SIZE == 1 else "0F0 0F1 0B1 0B0\n1F1 1B1 1F0 1B0"
    if SIZE > 1:
        text = "0F1 0F0 0B1 0B0\n1F1 1B1 1F0 1B0"
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


# --- Errors -------------------------------------------------------------------------------------


def boom(rank: int, wanted: tuple[str, int, int]) -> Callable[[str, int, int], None]:
    def check(op: str, stage: int, microbatch: int) -> None:
        if MPI.COMM_WORLD.rank == rank and (op, stage, microbatch) == wanted:
            raise ValueError("boom")

    return check


@pytest.mark.parametrize("weight_delay", [False, True])
def test_an_error_in_one_callback_reaches_all_and_the_next_step_works(comm, weight_delay):
    groups = min(4, SIZE)
    model, pipe = pipeline("eager-1f1b", groups, 4, weight_delay=weight_delay, skips=2)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world, Driver(pipe, world, stage, timeout_s=60) as driver:
        where = [("F", 0, 0), ("F", groups - 1, 2), ("I", groups - 1, 1), ("I", 0, 3)]
        for number, wanted in enumerate(where + ([("W", 0, 1)] if weight_delay else [])):
            rank = pipe.stages[wanted[1]].ranks[-1]
            stage.before = boom(rank, wanted)
            error = raised(functools.partial(driver.step, batch_of(4, number)))
            text = comm.allgather(str(error))
            assert isinstance(error, CallbackError), error
            assert len(set(text)) == 1, text
            op = wanted[0] if weight_delay or wanted[0] == "F" else "B"
            assert re.search(
                rf"ValueError: boom\s+context: action {wanted[1]}{op}{wanted[2]} \(stage "
                rf"{wanted[1]}, micro-batch {wanted[2]}\), rank {rank}, schedule",
                text[0],
            )
            stage.before = boom(-1, wanted)
            batch = batch_of(4, 100 + number)
            draws.together(comm, compare(driver, stage, driver.step(batch), batch))


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda outputs: None, "it must return a Forward of xmesh.pipeline, not NoneType"),
        (lambda outputs: Forward(), "the output for edge 'e0' is missing; it has shape"),
        (
            lambda outputs: Forward({name: array[:0] for name, array in outputs.items()}),
            "has shape (0, ",
        ),
        (
            lambda outputs: Forward({n: a.astype("f4") for n, a in outputs.items()}),
            "and dtype float32, the edge has shape",
        ),
        (lambda outputs: Forward({**outputs, "no": 1}), "no array was wanted for 'no', but for"),
    ],
)
@pytest.mark.skipif(SIZE < 2, reason="one stage has no edges")
def test_what_a_callback_returns_is_checked(comm, result, text):
    model, pipe = pipeline("1f1b", 2, 2)
    stage = Stage(model, pipe, comm.rank)
    right = stage.forward

    def wrong(number, microbatch, inputs, data):
        made = right(number, microbatch, inputs, data)
        return result(made.outputs) if number == 0 and microbatch == 1 else made

    vars(stage)["forward"] = wrong
    with World(comm) as world, Driver(pipe, world, stage, timeout_s=60) as driver:
        error = raised(lambda: driver.step(batch_of(2, 0)))
        assert isinstance(error, CallbackError)
        assert text in str(error), error


@pytest.mark.skipif(SIZE < 2, reason="needs a rank that waits for another")
def test_the_error_that_began_it_is_told_and_not_a_time_out_that_came_of_it(comm):
    model, pipe = pipeline("1f1b", 1, 2)
    stage = Stage(model, pipe, comm.rank)

    def before(op: str, number: int, microbatch: int) -> None:
        if (op, microbatch) == ("F", 1):
            raise ValueError("boom") if comm.rank == SIZE - 1 else TimeoutError("no sum came")

    stage.before = before
    with World(comm) as world, Driver(pipe, world, stage, timeout_s=60) as driver:
        error = raised(lambda: driver.step(batch_of(2, 0)))
        assert isinstance(error, CallbackError)
        assert "ValueError: boom" in str(error)
        assert f"rank {SIZE - 1}, schedule" in str(error)


def test_an_error_at_the_end_of_a_step_reaches_all(comm):
    model, pipe = pipeline("1f1b", min(2, SIZE), 2)
    stage = Stage(model, pipe, comm.rank)

    def reduce(number, gradients):
        if comm.rank == SIZE - 1:
            raise ZeroDivisionError("no samples")

    vars(stage)["reduce"] = reduce
    with World(comm) as world, Driver(pipe, world, stage, timeout_s=60) as driver:
        error = raised(lambda: driver.step(batch_of(2, 0)))
        assert isinstance(error, CallbackError)
        assert "ZeroDivisionError: no samples" in str(error)
        assert "REDUCE" in str(error)


@pytest.mark.parametrize("short", [2, None])
def test_too_few_micro_batches_on_one_rank(comm, short):
    model, pipe = pipeline("1f1b", min(2, SIZE), 3)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world, Driver(pipe, world, stage, timeout_s=60) as driver:
        wrong: Any = batch_of(2, 0) if short else iter(batch_of(3, 0))
        error = raised(lambda: driver.step(wrong if comm.rank == 0 else batch_of(3, 0)))
        assert isinstance(error, CallbackError)
        assert ("2 items" if short else "list_iterator") + ", 3 micro-batches" in str(error)
        batch = batch_of(3, 1)
        draws.together(comm, compare(driver, stage, driver.step(batch), batch))


@pytest.mark.skipif(SIZE < 2, reason="one rank agrees with itself")
@pytest.mark.parametrize("what", ["schedule", "scale", "edge", "strategy"])
def test_ranks_that_run_different_pipelines_are_told(comm, what):
    odd = comm.rank == SIZE - 1
    name = "gpipe" if odd and what == "schedule" else "1f1b"
    model = Model(2)
    if odd and what == "edge":  # shapes that were exchanged on the wrong group
        model.edges[0] = dataclasses.replace(model.edges[0], shape=(5, 6))
    strategy = "send_recv" if odd and what == "strategy" else "auto"
    pipe = Pipeline(cut_in_groups(2), model.edges, name, 4, strategy=strategy)
    scale = 0.5 if odd and what == "scale" else 1.0
    with World(comm) as world:
        error = raised(
            lambda: Driver(pipe, world, Stage(model, pipe, comm.rank), gradient_scale=scale)
        )
    assert isinstance(error, AgreementError)
    assert "all ranks must call with the same pipeline" in str(error)


def test_callbacks_that_lack_a_method_are_refused_on_all_ranks(comm):
    model, pipe = pipeline("zb-h1", min(2, SIZE), 4)

    class Half:
        forward = Stage.forward
        backward = Stage.backward

    callbacks: Any = Half() if comm.rank == 0 else Stage(model, pipe, comm.rank)
    with World(comm) as world:
        error = raised(lambda: Driver(pipe, world, callbacks))
    assert isinstance(error, ScheduleError)
    assert "Half has no backward_input, backward_weight" in str(error)


def test_options_without_meaning_are_refused_on_all_ranks(comm):
    model, pipe = pipeline("1f1b", min(2, SIZE), 2)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world:
        for options in ({"progress": "magic"}, {"gradient_scale": "half"}, {"timeout_s": -1}):
            mine = options if comm.rank == 0 else {}
            error = raised(functools.partial(Driver, pipe, world, stage, **mine))
            assert isinstance(error, OptionError), error


@pytest.mark.skipif(SIZE < 2, reason="nobody else to stay away")
def test_a_rank_that_stays_away_is_named(comm):
    model, pipe = pipeline("1f1b", 2, 2)
    stage = Stage(model, pipe, comm.rank)
    with World(comm) as world:
        driver = Driver(pipe, world, stage, timeout_s=0.5)
        if comm.rank:
            error = raised(lambda: driver.step(batch_of(2, 0)))
            assert isinstance(error, TransferTimeout), error
            closed = raised(lambda: driver.step(batch_of(2, 0)))
            assert isinstance(closed, ClosedError)
            assert "it gave up" in str(closed)
        driver.close()
        comm.Barrier()
        # The communicator is as before.
        with Driver(pipe, world, stage, timeout_s=60) as again:
            batch = batch_of(2, 1)
            draws.together(comm, compare(again, stage, again.step(batch), batch))


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
