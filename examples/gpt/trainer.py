"""Training steps on all ranks."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np

import xmesh
from gpt.adam import Adam
from gpt.collectives import all_reduce
from gpt.model import Config
from gpt.parallel import Grid, Shard, pipeline
from gpt.text import Text
from xmesh.pipeline import Driver


class Trainer:
    """A model in training; all ranks of the World make it, and call it together.

    Args:
        config: sizes of the model.
        grid: how ranks share the work.
        text: where rows come from.
        world: as many ranks as the grid has.
        rate: of Adam.
        record: keep the times of the last step.
        xp: ``numpy``, or ``cupy`` for arrays on this rank's GPU.

    Attributes:
        shard: what this rank has of the model.
        adam: stage of this rank -> its optimiser.
        driver: has the gradients of the last step.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        text: Text,
        world: xmesh.World,
        rate: float,
        record: bool = False,
        xp: Any = np,
    ) -> None:
        self.grid, self.config, self.world = grid, config, world
        pipe = pipeline(config, grid)
        self.shard = Shard(config, grid, pipe, world, xp)
        self.adam = {index: Adam(stage.values, rate) for index, stage in self.shard.stages.items()}
        self._text = text
        # Gradients are of the sum over all tokens; here, once, they become those of the mean.
        self._scale = 1 / (grid.rows * config.sequence)
        self._xp = xp
        self.driver = Driver(
            pipe, world, self.shard, gradient_scale=self._scale, record=record, like=xp
        )

    def step(self, step: int) -> float:
        """Do a step.

        Returns:
            The mean loss of a token in nats, on all ranks.
        """
        rows, size = self.shard.rows, self.grid.rows // self.grid.microbatches
        losses = self.driver.step(
            [
                tuple(
                    map(
                        self._xp.asarray,
                        self._text.rows(step, start + rows.start, start + rows.stop),
                    )
                )
                for start in range(0, self.grid.rows, size)
            ]
        )
        for index, stage in self.shard.stages.items():
            self.adam[index].update(stage.values, self.driver.gradients[index])
        total = np.array([float(sum(losses)) if self.shard.counts else 0.0])
        return float(all_reduce(self.world.comm, total)[0]) * self._scale

    def close(self) -> None:
        """Free what the driver has."""
        self.driver.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
