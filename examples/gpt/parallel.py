"""The model over a grid of ranks: data, tensor and pipeline parallel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import xmesh
from gpt.collectives import all_reduce, all_reduce_together
from gpt.layers import Array
from gpt.model import TOKENS, Arrays, Config, Owed, Saved, Stage, initial, parameters
from xmesh.pipeline import Backward, BackwardInput, Edge, Forward, Pipeline, Tied


@dataclass(frozen=True)
class Grid:
    """How ranks share the work.

    Attributes:
        dp: ranks that share the rows of a micro-batch.
        tp: ranks that share heads of attention and features of MLPs.
        pp: stage groups, one behind the other, of ``dp * tp`` ranks each.
        chunks: stages of each group.
        rows: of a batch, cut into ``microbatches``.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    rows: int = 32
    microbatches: int = 4
    schedule: str = "eager-1f1b"
    weight_delay: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of all groups."""
        return self.dp * self.tp * self.pp

    def problem(self, config: Config) -> str:
        """Why this grid cannot run a model; empty when it can."""
        if config.hidden % config.heads:
            return f"{config.heads} heads do not divide {config.hidden} features"
        if config.heads % self.tp:
            return f"{self.tp} tensor parallel ranks do not divide {config.heads} heads"
        if self.rows % self.microbatches:
            return f"{self.microbatches} micro-batches do not divide {self.rows} rows"
        return ""


def pipeline(config: Config, grid: Grid) -> Pipeline:
    """Meshes, edges and schedule. The hidden state is cut by rows, and alike on all of tp."""
    size = grid.dp * grid.tp
    groups = [
        xmesh.DeviceMesh.arange((grid.dp, grid.tp), start=i * size, axis_names=("dp", "tp"))
        for i in range(grid.pp)
    ]
    stages = groups * grid.chunks
    shape = (grid.rows // grid.microbatches, config.sequence, config.hidden)
    edges = [
        Edge(_edge(i), i, i + 1, src="S{dp} R R", dst="S{dp} R R", shape=shape, dtype=config.dtype)
        for i in range(len(stages) - 1)
    ]
    tied = [Tied(TOKENS, (0, len(stages) - 1))] if config.tied and len(stages) > 1 else []
    return Pipeline(
        stages,
        edges,
        grid.schedule,
        grid.microbatches,
        weight_delay=grid.weight_delay,
        chunks=grid.chunks,
        tied=tied,
    )


def _edge(stage: int) -> str:
    """Name of the edge that leaves a stage."""
    return f"hidden{stage}"


class Shard:
    """What one rank has of the model, and the callbacks of its stages.

    Args:
        config: sizes of the model.
        grid: how ranks share the work.
        pipe: from ``pipeline``.
        world: of all ranks.
        xp: ``numpy`` or ``cupy``.

    Attributes:
        stages: index -> stage of this rank.
        boxes: index -> name of a parameter -> the part of it that this rank has.
        counts: this rank's losses count; replicas of it have the same ones.
    """

    def __init__(
        self, config: Config, grid: Grid, pipe: Pipeline, world: xmesh.World, xp: Any = np
    ) -> None:
        self._last = len(pipe.stages) - 1
        self._dtype = np.dtype(config.dtype)
        self._data_parallel: dict[int, MPI.Intracomm | None] = {}
        self.stages: dict[int, Stage] = {}
        self.boxes: dict[int, dict[str, xmesh.Box]] = {}
        self.rows = range(0)
        self.counts = False
        rank = world.comm.rank
        for index, mesh in enumerate(pipe.stages):
            if rank not in mesh:
                continue
            self._data_parallel[index] = world.communicator(mesh, axis="dp")
            tensor_parallel = world.communicator(mesh, axis="tp")
            boxes = {
                name: xmesh.Layout(mesh, wanted.spec, wanted.shape).boxes(rank)[0]
                for name, wanted in parameters(config, index, len(pipe.stages)).items()
            }
            # Made whole and then cut, so the model is the same whatever the grid.
            values = {
                name: xp.asarray(np.ascontiguousarray(initial(config, name)[box.slices()]))
                for name, box in boxes.items()
            }
            self.boxes[index] = boxes
            self.stages[index] = Stage(
                config, index, len(pipe.stages), values, partial(all_reduce, tensor_parallel)
            )
            rows = xmesh.Layout(mesh, "S{dp}", (grid.rows // grid.microbatches,)).boxes(rank)[0]
            self.rows = range(rows.start[0], rows.stop[0])
            self.counts = self.counts or (
                index == self._last and mesh.coordinates(rank)[mesh.axis("tp")] == 0
            )

    def forward(self, stage: int, microbatch: int, inputs: Arrays, data: Any) -> Forward:
        """F: data is this rank's rows of tokens, and of those that follow them."""
        x = inputs[_edge(stage - 1)] if stage else None
        made, loss, saved = self.stages[stage].forward(x, *data)
        if loss is not None:
            return Forward(saved=saved, loss=loss)
        return Forward({_edge(stage): made}, saved)

    def backward(self, stage: int, microbatch: int, gradients: Arrays, saved: Saved) -> Backward:
        """B: both parts of it."""
        inputs, owed = self.backward_input(stage, microbatch, gradients, saved)
        return Backward(inputs, self.backward_weight(stage, microbatch, owed))

    def backward_input(
        self, stage: int, microbatch: int, gradients: Arrays, saved: Saved
    ) -> BackwardInput:
        """I: the loss is the sum over tokens; the driver scales the gradients to its mean."""
        outgoing = None if stage == self._last else gradients[_edge(stage)]
        gradient, owed = self.stages[stage].backward_input(outgoing, saved)
        return BackwardInput({_edge(stage - 1): gradient} if stage else {}, owed)

    def backward_weight(self, stage: int, microbatch: int, saved: list[Owed]) -> Arrays:
        """W: nobody waits for it."""
        return self.stages[stage].backward_weight(saved)

    def reduce(self, stage: int, gradients: Arrays) -> None:
        """Sum over the ranks that had other rows."""
        arrays: list[Array] = [gradients[name] for name in self.stages[stage].values]
        all_reduce_together(self._data_parallel[stage], arrays)
