"""Stages of the network: meshes, edges, shards of weights, and what each rank computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import xmesh
from unet.data import Images
from unet.layers import Array, Later
from unet.model import Part, PullPart, loss_of
from unet.settings import Settings
from unet.sums import Sum
from xmesh.pipeline import Backward, BackwardInput, Edge, Forward

#: Of images on an edge: cut over the data-parallel axis of a mesh, alike along the other one.
IMAGES = "S0 R R R"


@dataclass(frozen=True)
class Stages:
    """How the network is cut into stages, and where these are.

    Attributes:
        settings: the training run.
        meshes: of each stage, with a data-parallel and a tensor-parallel axis.
        microbatches: in a step.
    """

    settings: Settings
    meshes: tuple[xmesh.DeviceMesh, ...]
    microbatches: int

    def __post_init__(self) -> None:
        if self.microbatches < 1 or self.settings.images % self.microbatches:
            raise ValueError("micro-batches must divide the images of a step")
        if len(self.meshes) > self.settings.network.layers:
            raise ValueError("every stage needs a layer")

    @property
    def images(self) -> int:
        """Of a micro-batch."""
        return self.settings.images // self.microbatches

    def layers(self, stage: int) -> range:
        """Layers of a stage."""
        layers, stages = self.settings.network.layers, len(self.meshes)
        return range(layers * stage // stages, layers * (stage + 1) // stages)

    def edges(self) -> list[Edge]:
        """One for each value that one stage makes and another one takes."""
        network = self.settings.network
        makes: dict[str, int] = {}
        edges = []
        for stage in range(len(self.meshes)):
            for layer in self.layers(stage):
                taken, given = network.values(layer)
                for name in taken:
                    source = makes.get(name, stage)
                    if source != stage:
                        shape = (self.images, *network.shape(name))
                        dtype = self.settings.dtype
                        edges.append(Edge(name, source, stage, IMAGES, IMAGES, shape, dtype))
                makes.update(dict.fromkeys(given, stage))
        return edges

    def numbers(self, stage: int, microbatch: int, rank: int) -> range:
        """Which images of a step a rank has in a micro-batch."""
        shape = (self.images, *self.settings.network.shape("x0"))
        (box,) = xmesh.Layout(self.meshes[stage], IMAGES, shape).boxes(rank)
        first = microbatch * self.images
        return range(first + box.start[0], first + box.stop[0])

    def shards(self, rank: int) -> dict[str, tuple[slice, ...]]:
        """Name of a weight -> the part of it that a rank holds, of all stages of the rank."""
        found = {}
        for stage, mesh in enumerate(self.meshes):
            if rank in mesh:
                for name, weight in self.settings.network.weights(self.layers(stage)).items():
                    # Balanced, so that four heads on three ranks are two, one and one.
                    layout = xmesh.Layout(mesh, weight.spec, weight.shape, uneven="balanced")
                    found[name] = layout.boxes(rank)[0].slices()
        return found


class Computation:
    """The callbacks: what a rank computes of its stages.

    Args:
        stages: all of them.
        weights: shards that this rank holds.
        world: ranks and their communicators.
    """

    def __init__(self, stages: Stages, weights: Mapping[str, Array], world: xmesh.World) -> None:
        self._stages = stages
        self._parts: dict[int, Part] = {}
        self._over_images: dict[int, Sum] = {}
        for stage, mesh in enumerate(stages.meshes):
            copies, cut = (world.communicator(mesh, axis) for axis in ("data", "tensor"))
            if copies is not None and cut is not None:
                part = Part(stages.settings.network, stages.layers(stage), weights, Sum(cut))
                self._parts[stage], self._over_images[stage] = part, Sum(copies)

    def forward(
        self, stage: int, microbatch: int, inputs: dict[str, Array], data: Images
    ) -> Forward:
        """All layers of the stage; the last one compares with the noise."""
        if stage == 0:
            inputs = {"x0": data.noisy}
        outputs, pull = self._parts[stage].forward(inputs)
        if stage < len(self._stages.meshes) - 1:
            return Forward(outputs, saved=(pull, {}))
        ((name, prediction),) = outputs.items()
        loss, gradient = loss_of(prediction, data.noise, self._stages.images)
        return Forward(saved=(pull, {name: gradient}), loss=loss)

    def backward_input(
        self,
        stage: int,
        microbatch: int,
        gradients: dict[str, Array],
        saved: tuple[PullPart, dict[str, Array]],
    ) -> BackwardInput:
        """What other stages wait for; what weights need is kept for later."""
        pull, of_loss = saved
        later: Later = {}
        inputs = pull({**gradients, **of_loss}, later)
        inputs.pop("x0", None)  # the image comes from no edge
        return BackwardInput(inputs, saved=later)

    def backward_weight(self, stage: int, microbatch: int, saved: Later) -> dict[str, Array]:
        """Gradients of this rank's shards from this rank's images."""
        return {name: compute() for name, compute in saved.items()}

    def backward(
        self,
        stage: int,
        microbatch: int,
        gradients: dict[str, Array],
        saved: tuple[PullPart, dict[str, Array]],
    ) -> Backward:
        """Both halves at once."""
        inputs, later = self.backward_input(stage, microbatch, gradients, saved)
        return Backward(inputs, self.backward_weight(stage, microbatch, later))

    def reduce(self, stage: int, gradients: dict[str, Array]) -> None:
        """Sum over the ranks that had other images, in one message."""
        names = sorted(gradients)
        flat = np.concatenate([gradients[name].ravel() for name in names])
        flat = self._over_images[stage](flat)
        ends = np.cumsum([gradients[name].size for name in names])
        for name, part in zip(names, np.split(flat, ends[:-1]), strict=True):
            gradients[name][...] = part.reshape(gradients[name].shape)
