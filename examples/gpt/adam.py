"""Adam (Kingma and Ba, arXiv 1412.6980), on whatever part of the parameters a rank has."""

from __future__ import annotations

from gpt.layers import Array, array_module
from gpt.model import Arrays


class Adam:
    """Changes parameters in place; what it remembers can be saved and put back.

    Each element goes its own way, so shards need no word from each other, and copies of a
    parameter that are given the same gradients stay the same.

    Args:
        values: the parameters.
        rate: the length of a step.
        decay: of the means of gradients and of their squares.
        epsilon: keeps gradients that are nothing but rounding from becoming steps.

    Attributes:
        step: steps done.
        means: of the gradients, by name.
        squares: means of the squares.
    """

    def __init__(
        self,
        values: Arrays,
        rate: float,
        decay: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
    ) -> None:
        self.step = 0
        self.means: Arrays = {name: 0 * value for name, value in values.items()}
        self.squares: Arrays = {name: 0 * value for name, value in values.items()}
        self._rate, self._decay, self._epsilon = rate, decay, epsilon

    def update(self, values: Arrays, gradients: Arrays) -> None:
        """Do a step."""
        self.step += 1
        first, second = (1 - decay**self.step for decay in self._decay)
        for name, value in values.items():
            gradient = gradients[name]
            mean = _follow(self.means[name], gradient, self._decay[0])
            square = _follow(self.squares[name], gradient * gradient, self._decay[1])
            root = array_module(square).sqrt(square / second)
            value -= self._rate / first * mean / (root + self._epsilon)


def _follow(mean: Array, value: Array, decay: float) -> Array:
    """Update a mean that forgets, in place."""
    mean *= decay
    mean += (1 - decay) * value
    return mean
