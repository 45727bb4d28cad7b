"""Adam (Kingma & Ba, arXiv 1412.6980), on whatever part of the weights a rank holds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unet.layers import Array


class Adam:
    """Changes weights in place.

    Args:
        weights: by name; the same arrays in every step.
        rate: how far a weight moves in a step, at the most about that.
    """

    def __init__(self, weights: Mapping[str, Array], rate: float) -> None:
        self.weights = weights
        self.rate = rate
        self.means = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.squares = {name: np.zeros_like(weight) for name, weight in weights.items()}

    def update(self, step: int, gradients: Mapping[str, Array]) -> None:
        """One step; the first one has number 0."""
        by_mean, by_square = 1 - 0.9 ** (step + 1), 1 - 0.99 ** (step + 1)
        for name, weight in self.weights.items():
            gradient, mean, square = gradients[name], self.means[name], self.squares[name]
            mean += 0.1 * (gradient - mean)
            square += 0.01 * (gradient * gradient - square)
            weight -= self.rate * (mean / by_mean) / (np.sqrt(square / by_square) + 1e-8)

    def arrays(self) -> dict[str, Array]:
        """All that training changes, by names such as ``mean/3.conv1``."""
        kinds = {"weight": self.weights, "mean": self.means, "square": self.squares}
        return {
            f"{kind}/{name}": array
            for kind, arrays in kinds.items()
            for name, array in arrays.items()
        }
