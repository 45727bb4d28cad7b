"""The U-Net of the examples in stages: losses and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from unet import checkpoint
from unet.alone import Alone
from unet.model import Network
from unet.pipelined import Pipelined
from unet.settings import Settings

from xmesh import World

SIZE = MPI.COMM_WORLD.size
SETTINGS = Settings(Network(side=8, width=4, layers=4, heads=2), images=16, dtype="float64")
STEPS = 20 if SIZE == 4 else 5

#: For each number of ranks, (data, tensor) parallel ranks of the stage groups. Four images of a
#: micro-batch on three ranks are two, two and none.
GROUPS: dict[int, list[tuple[tuple[int, int], ...]]] = {
    2: [((1, 1), (1, 1))],
    3: [((1, 1), (1, 2)), ((2, 1), (1, 1))],
    4: [
        ((2, 1), (1, 2)),
        ((1, 2), (2, 1)),
        ((1, 1), (3, 1)),
        ((1, 3), (1, 1)),
        ((1, 1),) * 4,  # a skip goes over two stages
    ],
    5: [((2, 1), (3, 1)), ((3, 1), (1, 2))],
    8: [((2, 1), (3, 2))],
}
pytestmark = pytest.mark.skipif(SIZE not in GROUPS, reason="for 2, 3, 4, 5 or 8 ranks")
NAMES = ("gpipe", "1f1b", "eager-1f1b")
SCHEDULES = [
    *((name, delay, 1) for name in NAMES for delay in (False, True)),
    ("zb-h1", False, 1),
    ("interleaved-1f1b", False, 2),
    ("interleaved-1f1b", True, 2),
]


@pytest.fixture
def world(comm) -> Iterator[World]:
    with World(comm) as world:
        yield world


def apart(found: float | np.ndarray, wanted: float | np.ndarray) -> float:
    """Largest difference, relative to the largest element."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def compare(training: Pipelined, steps: int) -> None:
    """Train, beside a single process; on all ranks, for rank 0 alone has whole gradients."""
    alone = Alone(training.settings)
    for step in range(steps):
        loss, wanted = training.step(step), alone.step(step)
        assert loss == pytest.approx(wanted, rel=1e-10)
        found = training.gradients()
        if found:
            assert found.keys() == alone.gradients().keys()
            for name, gradient in alone.gradients().items():
                assert apart(found[name], gradient) < 1e-9, (step, name)


@pytest.mark.parametrize(("name", "delay", "chunks"), SCHEDULES)
def test_losses_and_gradients_equal_one_process(world, name, delay, chunks):
    options = {"weight_delay": delay, "chunks": chunks}
    with Pipelined(SETTINGS, world, GROUPS[SIZE][0], name, 4, **options) as training:
        edges = {(edge.name, edge.src_stage, edge.dst_stage) for edge in training.pipeline.edges}
        if chunks == 1:  # both skips cross, and the value that goes straight on
            assert edges == {("x2", 0, 1), ("skip0", 0, 1), ("skip1", 0, 1)}
        else:
            assert {("skip0", 0, 3), ("skip1", 1, 2)} < edges
        compare(training, STEPS)


@pytest.mark.parametrize("groups", GROUPS.get(SIZE, [])[1:])
def test_other_layouts(world, groups):
    with Pipelined(SETTINGS, world, groups, "eager-1f1b", 4, weight_delay=True) as training:
        compare(training, 4)


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_other_numbers_of_microbatches(world, microbatches):
    with Pipelined(SETTINGS, world, GROUPS[SIZE][0], "zb-h1", microbatches) as training:
        compare(training, 2)


def test_resumed_training_has_the_same_losses(world, comm, tmp_path):
    groups = GROUPS[SIZE][0]
    folder = Path(comm.bcast(str(tmp_path)))
    with Pipelined(SETTINGS, world, groups) as straight:
        losses = []
        for step in range(8):
            if step == 4:
                state = straight.state()
                if comm.rank == 0:
                    checkpoint.save(folder, step, state)
            losses.append(straight.step(step))
    comm.barrier()
    first, state = checkpoint.load(folder, SETTINGS.network)
    assert first == 4
    with Pipelined(SETTINGS, world, groups) as resumed:
        resumed.restore(state)
        assert [resumed.step(step) for step in range(first, 8)] == losses[4:]
    # A checkpoint holds whole arrays, so that other ranks, other layouts or one process can go on.
    alone = Alone(SETTINGS)
    alone.restore(state)
    assert [alone.step(step) for step in range(first, 8)] == pytest.approx(losses[4:], rel=1e-10)
    with Pipelined(SETTINGS, world, GROUPS[SIZE][-1], "gpipe", 2) as elsewhere:
        elsewhere.restore(state)
        found = [elsewhere.step(step) for step in range(first, 8)]
    assert found == pytest.approx(losses[4:], rel=1e-10)
