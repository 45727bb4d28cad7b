"""Training on the ranks of a pipeline, with the methods that training alone has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np

import xmesh
from unet.adam import Adam
from unet.data import Images
from unet.layers import Array
from unet.settings import Settings
from unet.stages import Computation, Stages
from xmesh.pipeline import Driver, Pipeline


class Pipelined:
    """A network in stages; all ranks make it and call its methods together.

    Args:
        settings: the training run.
        world: the ranks.
        groups: (data-parallel, tensor-parallel) ranks of each stage group.
        schedule: name of a schedule.
        microbatches: of a step.
        weight_delay: see ``xmesh.pipeline.schedule``.
        chunks: stages of each group; stages go round the groups.
    """

    def __init__(
        self,
        settings: Settings,
        world: xmesh.World,
        groups: Sequence[tuple[int, int]],
        schedule: str = "eager-1f1b",
        microbatches: int = 4,
        weight_delay: bool = False,
        chunks: int = 1,
    ) -> None:
        self.settings = settings
        self._comm = world.comm
        meshes, first = [], 0
        for shape in groups:
            mesh = xmesh.DeviceMesh.arange(shape, first, ("data", "tensor"))
            meshes.append(mesh)
            first += mesh.size
        self._stages = stages = Stages(settings, tuple(meshes * chunks), microbatches)
        self._shards = stages.shards(self._comm.rank)
        weights = {
            name: settings.network.initial(name, settings.seed)[part].astype(settings.dtype)
            for name, part in self._shards.items()
        }
        self._adam = Adam(weights, settings.rate)
        self.pipeline = Pipeline(
            stages=stages.meshes,
            edges=stages.edges(),
            schedule=schedule,
            num_microbatches=microbatches,
            weight_delay=weight_delay,
            chunks=chunks if chunks > 1 else None,
        )
        self._driver = Driver(
            self.pipeline,
            world,
            Computation(stages, weights, world),
            # Losses are means over a micro-batch; that of a step is the mean of those.
            gradient_scale=1 / microbatches,
        )

    def step(self, step: int) -> float:
        """Train on the images of a step; the loss before it, on all ranks."""
        losses = self._driver.step([self._draw(step, k) for k in range(self._stages.microbatches)])
        self._adam.update(step, self._local_gradients())
        # Each data-parallel rank has its share of the loss, and tensor-parallel ones have the same.
        last = self._stages.meshes[-1]
        rank = self._comm.rank
        counts = rank in last and last.coordinates(rank)[1] == 0
        share = sum(losses) / self._stages.microbatches if counts else 0.0
        return float(self._comm.allreduce(share))

    def gradients(self) -> dict[str, Array]:
        """Whole gradients of the last step on rank 0; nothing on the others."""
        return self._whole(self._local_gradients())

    def state(self) -> dict[str, Array]:
        """All that training changes as whole arrays on rank 0; nothing on the others."""
        return self._whole(self._adam.arrays())

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from a state of this network, which all ranks have; each takes its part."""
        for name, array in self._adam.arrays().items():
            array[...] = state[name][self._shards[name.rpartition("/")[2]]]

    def _draw(self, step: int, microbatch: int) -> Images | None:
        """Images that this rank's stages need, which are those at the ends."""
        for stage in (0, len(self._stages.meshes) - 1):
            if self._comm.rank in self._stages.meshes[stage]:
                numbers = self._stages.numbers(stage, microbatch, self._comm.rank)
                return self.settings.draw(step, numbers)
        return None

    def _local_gradients(self) -> dict[str, Array]:
        return {
            name: gradient
            for gradients in self._driver.gradients.values()
            for name, gradient in gradients.items()
        }

    def _whole(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Put shards of all ranks together on rank 0."""
        network = self.settings.network
        weights = network.weights()
        parts = [(name, self._shards[name.rpartition("/")[2]], a) for name, a in arrays.items()]
        whole: dict[str, Array] = {}
        for of_rank in self._comm.gather(parts) or []:
            for name, part, array in of_rank:
                shape = weights[name.rpartition("/")[2]].shape
                whole.setdefault(name, np.empty(shape, array.dtype))[part] = array
        return whole

    def close(self) -> None:
        """Close the driver."""
        self._driver.close()

    def __enter__(self) -> Pipelined:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
