"""Training in a single process, without a pipeline: what the pipeline is compared with."""

from __future__ import annotations

from unet.adam import Adam
from unet.layers import Array, Later
from unet.model import Part, loss_of
from unet.settings import Settings


class Alone:
    """The whole network, and all images of a step at once.

    Args:
        settings: the training run.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        network = settings.network
        weights = {
            name: network.initial(name, settings.seed).astype(settings.dtype)
            for name in network.weights()
        }
        self._part = Part(network, range(network.layers), weights)
        self._adam = Adam(weights, settings.rate)
        self._gradients: dict[str, Array] = {}

    def step(self, step: int) -> float:
        """Train on the images of a step; the loss before it."""
        settings = self.settings
        images = settings.draw(step, range(settings.images))
        outputs, pull = self._part.forward({"x0": images.noisy})
        (name,) = outputs
        loss, gradient = loss_of(outputs[name], images.noise, settings.images)
        later: Later = {}
        pull({name: gradient}, later)
        self._gradients = {name: compute() for name, compute in later.items()}
        self._adam.update(step, self._gradients)
        return loss

    def gradients(self) -> dict[str, Array]:
        """Of all weights, in the last step."""
        return self._gradients

    def state(self) -> dict[str, Array]:
        """All that training changes."""
        return self._adam.arrays()

    def restore(self, state: dict[str, Array]) -> None:
        """Go on from a state of this network."""
        for name, array in self._adam.arrays().items():
            array[...] = state[name]
