"""Layers of the network, forward and backward, in terms of an array module.

Arrays have the shape (images, rows, columns, channels). A layer is a function from an array to
another one and its `Pull`, the way back: it takes the gradient of the output to that of the input
at once, and leaves what the gradients of its weights need in ``later``. So the backward of a chain
of layers comes in two parts, of which the second can wait.

Some layers are one rank's part of a layer that is cut over several ranks by its channels or heads.
Between `Layers.shared` and `Layers.total` every rank has a part of the channels, outside all have
all of them (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

#: Of NumPy, or of any module that has its functions.
Array = Any
#: Name of a weight -> what computes its gradient.
Later = dict[str, Callable[[], Array]]
Pull = Callable[[Array, Later], Array]
Layer = Callable[[Array], tuple[Array, Pull]]


def chain(*layers: Layer) -> Layer:
    """Layers one after the other, as one."""

    def forward(x: Array) -> tuple[Array, Pull]:
        pulls = []
        for layer in layers:
            x, pull = layer(x)
            pulls.append(pull)

        def back(g: Array, later: Later) -> Array:
            for pull in reversed(pulls):
                g = pull(g, later)
            return g

        return x, back

    return forward


def residual(layer: Layer) -> Layer:
    """What comes in is added to what goes out."""

    def forward(x: Array) -> tuple[Array, Pull]:
        y, pull = layer(x)
        return x + y, lambda g, later: g + pull(g, later)

    return forward


class Layers:
    """Layers on some weights.

    Args:
        xp: the array module.
        weights: arrays by name.
        total: the sum of an array over the ranks that a layer is cut over.
    """

    def __init__(
        self, xp: Any, weights: Mapping[str, Array], total: Callable[[Array], Array]
    ) -> None:
        self.xp = xp
        self.weights = weights
        self.sum_over_ranks = total

    # --- Layers with weights ----------------------------------------------------------------------

    def linear(self, name: str, axes: int = 1) -> Layer:
        """Contract the last axes of an array with the first ones of the weight."""
        weight = self.weights[name]
        inner = weight.shape[:axes]
        matrix = weight.reshape(math.prod(inner), math.prod(weight.shape[axes:]))

        def forward(x: Array) -> tuple[Array, Pull]:
            outer = x.shape[: x.ndim - axes]
            rows = math.prod(outer)  # not -1, which cannot be told where a rank has no image
            flat = x.reshape(rows, matrix.shape[0])

            def back(g: Array, later: Later) -> Array:
                g = g.reshape(rows, matrix.shape[1])
                later[name] = lambda: (flat.T @ g).reshape(weight.shape)
                return (g @ matrix.T).reshape(x.shape)

            return (flat @ matrix).reshape(outer + weight.shape[axes:]), back

        return forward

    def conv(self, name: str) -> Layer:
        """3 x 3, zeros around; a weight of shape (3, 3, channels in, channels out)."""
        weight = self.weights[name]
        inside, outside = weight.shape[2:]
        matrix = weight.reshape(9 * inside, outside)

        def forward(x: Array) -> tuple[Array, Pull]:
            pixels = math.prod(x.shape[:3])

            def patches() -> Array:
                return self._patches(x).reshape(pixels, 9 * inside)

            def back(g: Array, later: Later) -> Array:
                flat = g.reshape(pixels, outside)
                # Patches take nine times the memory of x: rather made twice than kept.
                later[name] = lambda: (patches().T @ flat).reshape(weight.shape)
                return self._spread((flat @ matrix.T).reshape(*x.shape[:3], 9 * inside))

            return (patches() @ matrix).reshape(*x.shape[:3], outside), back

        return forward

    def norm(self, name: str) -> Layer:
        """Divide each pixel's channels by their root mean square; then a gain for each channel."""
        gain = self.weights[name]

        def forward(x: Array) -> tuple[Array, Pull]:
            scale = ((x * x).mean(-1, keepdims=True) + 1e-6) ** -0.5
            unit = x * scale

            def back(g: Array, later: Later) -> Array:
                later[name] = lambda: (g * unit).sum(tuple(range(g.ndim - 1)))
                d = g * gain
                return scale * (d - unit * (d * unit).mean(-1, keepdims=True))

            return unit * gain, back

        return forward

    # --- Layers without ---------------------------------------------------------------------------

    def silu(self, x: Array) -> tuple[Array, Pull]:
        """x times the logistic function of x."""
        gate = 1 / (1 + self.xp.exp(-x))
        return x * gate, lambda g, later: g * gate * (1 + x * (1 - gate))

    def attend(self, x: Array) -> tuple[Array, Pull]:
        """All pixels of an image look at each other.

        From (images, rows, columns, 3, heads, d), queries, keys and values, to the same without 3.
        """
        images, rows, columns, _, heads, d = x.shape
        xp, scale = self.xp, d**-0.5
        tokens = x.reshape(images, rows * columns, 3, heads, d)
        q, k, v = (tokens[:, :, i].swapaxes(1, 2) for i in range(3))  # (images, heads, tokens, d)
        scores = q @ k.swapaxes(2, 3) * scale
        p = xp.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)

        def back(g: Array, later: Later) -> Array:
            g = g.reshape(images, rows * columns, heads, d).swapaxes(1, 2)
            dp = g @ v.swapaxes(2, 3)
            ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
            parts = (ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g)
            return xp.stack([part.swapaxes(1, 2) for part in parts], 2).reshape(x.shape)

        return (p @ v).swapaxes(1, 2).reshape(images, rows, columns, heads, d), back

    def halve(self, x: Array) -> tuple[Array, Pull]:
        """Squares of 2 x 2 pixels become one of four times the channels."""
        return _halved(x), lambda g, later: _doubled(g)

    def double(self, x: Array) -> tuple[Array, Pull]:
        """The inverse of `halve`."""
        return _doubled(x), lambda g, later: _halved(g)

    # --- Where a layer is cut over ranks ----------------------------------------------------------

    def shared(self, x: Array) -> tuple[Array, Pull]:
        """All ranks go on from x; its gradient is the sum of theirs."""
        return x, lambda g, later: self.sum_over_ranks(g)

    def total(self, x: Array) -> tuple[Array, Pull]:
        """The sum of what the ranks have; its gradient goes to all of them."""
        return self.sum_over_ranks(x), lambda g, later: g

    # --- Helpers ----------------------------------------------------------------------------------

    def _patches(self, x: Array) -> Array:
        """Each pixel's 3 x 3 surroundings, side by side along the channels."""
        rows, columns = x.shape[1:3]
        padded = self.xp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return self.xp.concatenate(
            [padded[:, i : i + rows, j : j + columns] for i in range(3) for j in range(3)], -1
        )

    def _spread(self, g: Array) -> Array:
        """The gradient of `_patches`: what the surroundings of a pixel get, summed."""
        images, rows, columns, wide = g.shape
        inside = wide // 9
        padded = self.xp.zeros((images, rows + 2, columns + 2, inside), g.dtype)
        for place in range(9):
            i, j = divmod(place, 3)
            part = g[..., place * inside : (place + 1) * inside]
            padded[:, i : i + rows, j : j + columns] += part
        return padded[:, 1:-1, 1:-1]


def _halved(x: Array) -> Array:
    b, h, w, c = x.shape
    squares = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
    return squares.reshape(b, h // 2, w // 2, 4 * c)


def _doubled(x: Array) -> Array:
    b, h, w, c = x.shape
    squares = x.reshape(b, h, w, 2, 2, c // 4).transpose(0, 1, 3, 2, 4, 5)
    return squares.reshape(b, 2 * h, 2 * w, c // 4)
