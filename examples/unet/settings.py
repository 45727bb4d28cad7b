"""What a training run is, apart from who computes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from unet.data import Images, draw
from unet.model import Network


@dataclass(frozen=True)
class Settings:
    """A training run.

    Attributes:
        network: size of the network.
        images: of a step.
        dtype: of weights, images and all that is computed, ``float32`` or ``float64``.
        rate: see Adam.
        seed: of weights and images.
    """

    network: Network = field(default_factory=Network)
    images: int = 32
    dtype: str = "float32"
    rate: float = 2e-3
    seed: int = 0

    def draw(self, step: int, numbers: range) -> Images:
        """Some of the images of a step."""
        return draw(self.seed, step, numbers, self.network.side, self.dtype)
