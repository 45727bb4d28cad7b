"""examples/gpt with arrays of CuPy: losses and gradients are those of NumPy in one process."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
from gpt import checkpoint
from gpt.check import Check
from gpt.layers import on_host
from gpt.model import Config
from gpt.parallel import Grid
from gpt.text import Text
from gpt.trainer import Trainer
from mpi4py import MPI

from xmesh import World

SIZE = MPI.COMM_WORLD.size
GRIDS = {1: (1, 1, 1), 2: (1, 1, 2), 4: (2, 1, 2), 8: (2, 2, 2)}
SMALL = Config(sequence=6, hidden=8, heads=2, layers=2, dtype="float64")
pytestmark = pytest.mark.skipif(SIZE not in GRIDS, reason="needs 1, 2, 4 or 8 ranks")


def text() -> Text:
    return Text("the ranks that share a host share its card, and the card has one wire. " * 4, 6, 1)


def grid(schedule: str) -> Grid:
    dp, tp, pp = GRIDS[SIZE]
    return Grid(dp, tp, pp, rows=8, microbatches=4, schedule=schedule)


@pytest.mark.parametrize("schedule", ["eager-1f1b", "zb-h1"])
def test_training_on_gpus_equals_numpy_in_one_process(comm, schedule):
    with World(comm) as world, Trainer(SMALL, grid(schedule), text(), world, 1e-2, xp=cupy) as gpt:
        check = Check(gpt, text(), 1e-2)
        for step in range(3):
            errors = check(step, gpt.step(step))
            assert max(errors.loss, errors.gradient) < 1e-10, errors
        gradients: Any = gpt.driver.gradients
        assert all(type(g) is cupy.ndarray for found in gradients.values() for g in found.values())


def test_a_checkpoint_of_gpus_is_resumed_on_the_host(comm, tmp_path):
    folder = comm.bcast(tmp_path if comm.rank == 0 else None)
    with World(comm) as world:
        with Trainer(SMALL, grid("1f1b"), text(), world, 1e-2, xp=cupy) as gpt:
            gpt.step(0)
            checkpoint.save(folder, 1, gpt)
            values = [
                {name: on_host(value) for name, value in stage.values.items()}
                for stage in gpt.shard.stages.values()
            ]
        with Trainer(SMALL, grid("1f1b"), text(), world, 1e-2, xp=np) as gpt:
            assert checkpoint.load(folder, gpt) == 1
            for stage, wanted in zip(gpt.shard.stages.values(), values, strict=True):
                assert all(np.array_equal(stage.values[name], wanted[name]) for name in wanted)
        with Trainer(SMALL, grid("1f1b"), text(), world, 1e-2, xp=cupy) as gpt:
            assert checkpoint.load(folder, gpt) == 1
            for stage, wanted in zip(gpt.shard.stages.values(), values, strict=True):
                assert all(np.array_equal(on_host(stage.values[n]), wanted[n]) for n in wanted)
