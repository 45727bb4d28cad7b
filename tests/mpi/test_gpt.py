"""examples/gpt on ranks: losses and gradients are those of one process, also after a resume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpt import checkpoint, parallel
from gpt.check import Check, Errors
from gpt.model import Config
from gpt.parallel import Grid
from gpt.text import Text
from gpt.trainer import Trainer
from mpi4py import MPI

from xmesh import World
from xmesh.pipeline import Pipeline

SIZE = MPI.COMM_WORLD.size
#: (dp, tp, pp) that are tried on so many ranks; the first of them for every schedule.
GRIDS = {
    1: [(1, 1, 1)],
    2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)],
    4: [(1, 2, 2), (2, 1, 2), (1, 1, 4)],
    8: [(2, 2, 2), (1, 4, 2), (4, 1, 2)],
}
pytestmark = pytest.mark.skipif(SIZE not in GRIDS, reason="needs 1, 2, 4 or 8 ranks")
SHAPES = GRIDS.get(SIZE, [(1, 1, 1)])
SCHEDULES = [
    (name, weight_delay)
    for name in ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b")
    for weight_delay in (False, True)
] + [("zb-h1", False)]
SMALL = Config(sequence=8, hidden=16, heads=4, layers=4, dtype="float64")
STEPS = 20
RATE = 1e-2


def text() -> Text:
    """A little Markov chain, so that there is something to learn."""
    rng = np.random.default_rng(0)
    words = ["".join(chr(c) for c in rng.integers(97, 123, n)) for n in rng.integers(2, 6, 30)]
    return Text(" ".join(words[i] for i in rng.integers(30, size=400)), SMALL.sequence, seed=1)


def grid(shape: tuple[int, int, int], schedule: str = "eager-1f1b", **more: Any) -> Grid:
    dp, tp, pp = shape
    chunks = 2 if schedule == "interleaved-1f1b" and pp < 4 else 1
    options: dict[str, Any] = {"rows": 16, "microbatches": 4, "chunks": chunks, **more}
    return Grid(dp, tp, pp, schedule=schedule, **options)


def compare(comm: Any, run: Grid, config: Config = SMALL, steps: int = STEPS) -> Errors:
    """Train, beside one process; the largest differences of all steps, alike on all ranks."""
    with World(comm) as world, Trainer(config, run, text(), world, RATE) as trainer:
        check = Check(trainer, text(), RATE)
        found = [check(step, trainer.step(step)) for step in range(steps)]
    worst = max(found, key=lambda errors: errors.gradient)
    return worst._replace(loss=max(errors.loss for errors in found))


@pytest.mark.parametrize(("schedule", "weight_delay"), SCHEDULES)
def test_every_step_of_every_schedule_equals_one_process(comm, schedule, weight_delay):
    errors = compare(comm, grid(SHAPES[0], schedule, weight_delay=weight_delay))
    assert errors.loss < 1e-5, errors
    assert errors.gradient < 1e-5, errors


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_other_grids(comm, shape):
    errors = compare(comm, grid(shape), steps=5)
    assert max(errors.loss, errors.gradient) < 1e-5, errors


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_do_not_divide_and_a_head_of_its_own(comm, shape):
    config = replace(SMALL, tied=False)
    errors = compare(comm, grid(shape, "1f1b", rows=15, microbatches=3), config, steps=3)
    assert max(errors.loss, errors.gradient) < 1e-5, errors


def test_single_precision(comm):
    config = replace(SMALL, dtype="float32")
    errors = compare(comm, grid(SHAPES[0]), config, steps=10)
    assert errors.loss < 1e-4, errors
    assert errors.gradient < 1e-2, errors


@pytest.mark.skipif(SIZE == 1, reason="nothing is shared by one rank")
@pytest.mark.parametrize("broken", ["tied", "dp", "tp"])
def test_a_sum_that_is_left_out_is_noticed(comm, monkeypatch, broken):
    """The comparison would see what people forget."""
    axis = {"dp": 0, "tp": 1, "tied": 2}[broken]
    shapes = [shape for shape in SHAPES if shape[axis] > 1]
    if broken == "tied":
        monkeypatch.setattr(
            parallel, "Pipeline", lambda *args, tied, **more: Pipeline(*args, **more)
        )
    elif broken == "dp":
        monkeypatch.setattr(parallel, "all_reduce_together", lambda comm, arrays: None)
    else:
        monkeypatch.setattr(parallel, "all_reduce", lambda comm, array: array)
    errors = compare(comm, grid(shapes[0]), steps=1)
    assert errors.gradient > 1e-3, errors


def losses(world: World, run: Grid, folder: Any, first: int, stop: int) -> list[float]:
    """Train on from a checkpoint, where first is not 0, and write one after 3 steps."""
    found = []
    with Trainer(SMALL, run, text(), world, RATE) as trainer:
        if first:
            assert checkpoint.load(folder, trainer) == first
        for step in range(first, stop):
            found.append(trainer.step(step))
            if step == 2:
                checkpoint.save(folder, step + 1, trainer)
    return found


@pytest.mark.parametrize("schedule", ["eager-1f1b", "interleaved-1f1b"])
def test_a_run_that_is_resumed_has_the_same_losses(comm, tmp_path, schedule):
    folder = comm.bcast(tmp_path) / "checkpoints"
    with World(comm) as world:
        through = losses(world, grid(SHAPES[0], schedule), folder, 0, 6)
        assert losses(world, grid(SHAPES[0], schedule), folder, 3, 6) == through[3:]
        for shape in SHAPES[1:]:  # and as well on another grid
            found = losses(world, grid(shape, weight_delay=True), folder, 3, 6)
            np.testing.assert_allclose(found, through[3:], rtol=1e-9)


def test_a_checkpoint_that_one_rank_cannot_use_is_an_error_on_all(comm, tmp_path, monkeypatch):
    folder = comm.bcast(tmp_path) / "checkpoints"
    with World(comm) as world, Trainer(SMALL, grid(SHAPES[0]), text(), world, RATE) as trainer:
        before = trainer.step(0)
        checkpoint.save(folder, 1, trainer)
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:
                patch.setattr(checkpoint, "_files", lambda *_: folder / "latest.json" / "under")
            with pytest.raises(checkpoint.CheckpointError, match=f"^rank {comm.size - 1}: .*under"):
                checkpoint.save(folder, 2, trainer)
            with pytest.raises(checkpoint.CheckpointError, match=f"^rank {comm.size - 1}: .*under"):
                checkpoint.load(folder, trainer)
        assert checkpoint.load(folder, trainer) == 1  # the one before is still in force
        assert trainer.step(1) < before
