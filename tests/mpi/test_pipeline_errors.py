"""Errors in a pipeline reach all ranks, nobody hangs, and the next step works."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import draws
import pytest
from mpi4py import MPI
from pipelines import SIZE, Model, Stage, batch_of, compare, cut_in_groups, pipeline, raised

from xmesh import World
from xmesh.errors import (
    AgreementError,
    CallbackError,
    ClosedError,
    OptionError,
    ScheduleError,
    TransferTimeout,
    TransportError,
)
from xmesh.pipeline import (
    Driver,
    Forward,
    Pipeline,
)


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
        for options in (
            {"progress": "magic"},
            {"gradient_scale": "half"},
            {"timeout_s": -1},
            {"transfers": "none"},
            {"transport": "pigeon"},
        ):
            mine = options if comm.rank == 0 else {}
            error = raised(functools.partial(Driver, pipe, world, stage, **mine))
            kind = TransportError if "transport" in options else OptionError
            assert isinstance(error, kind), error


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
