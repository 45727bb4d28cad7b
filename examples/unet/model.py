"""The network: halves of the layers go down and up, and each layer down feeds its mirror image up.

With n layers, layer i < n/2 works on images of side / 2^i: its output goes to layer n-1-i as the
value ``skip<i>``, and at half the size to the next layer. Layer n-1-i brings what comes from the
layer before to double size, joins it with the skip, and works on that. ``x<i>`` is the value that
enters layer i: ``x0`` the noisy image, ``x<n>`` the noise that the network sees in it.

A `Part` is some consecutive layers, that is a stage; values that one part makes and another one
needs are what edges carry. One part of all layers is the whole network.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from unet.layers import Array, Later, Layer, Layers, chain, residual

#: From the gradients of what a part gave to those of what it took; what its weights need is left
#: in the second argument.
PullPart = Callable[[Mapping[str, Array], Later], dict[str, Array]]


class Weight(NamedTuple):
    """Shape of a weight, and how a mesh of (data, tensor) parallel ranks holds it."""

    shape: tuple[int, ...]
    spec: str


@dataclass(frozen=True)
class Network:
    """The size of a network.

    Attributes:
        side: rows, and columns, of an image; divisible by 2^(layers/2).
        width: channels of the outermost layers; i + 1 times as many where images are halved i
            times. Divisible by heads.
        layers: an even number.
        heads: of the attention, which all but the outermost layers have.

    Raises:
        ValueError: numbers that do not go together.
    """

    side: int = 16
    width: int = 16
    layers: int = 6
    heads: int = 4

    def __post_init__(self) -> None:
        if min(self.side, self.width, self.layers, self.heads) < 1:
            raise ValueError("side, width, layers and heads are at least 1")
        if self.layers % 2 or self.side % 2**self.half or self.width % self.heads:
            raise ValueError(
                "layers must be even, side divisible by 2^(layers/2), width by heads; "
                f"they are {self.layers}, {self.side}, {self.width}, {self.heads}"
            )

    @property
    def half(self) -> int:
        """How many layers go down; as many go up."""
        return self.layers // 2

    def channels(self, level: int) -> int:
        """Channels of images that were halved so many times."""
        return self.width * (level + 1)

    def shape(self, value: str) -> tuple[int, int, int]:
        """Rows, columns and channels of ``x<i>`` or ``skip<i>``."""
        i = int(value.removeprefix("skip").removeprefix("x"))
        level = min(i, self.layers - i)
        ends = value in ("x0", f"x{self.layers}")
        return self.side >> level, self.side >> level, 1 if ends else self.channels(level)

    def values(self, layer: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of what a layer takes and of what it gives."""
        if layer < self.half:
            return (f"x{layer}",), (f"x{layer + 1}", f"skip{layer}")
        return (f"x{layer}", f"skip{self.layers - 1 - layer}"), (f"x{layer + 1}",)

    def weights(self, layers: range | None = None) -> dict[str, Weight]:
        """Weights of some layers, or of all."""
        found = {}
        for layer in range(self.layers) if layers is None else layers:
            found.update({f"{layer}.{k}": weight for k, weight in self._weights(layer).items()})
        return found

    def _weights(self, layer: int) -> dict[str, Weight]:
        level = min(layer, self.layers - 1 - layer)
        c, deeper = self.channels(level), self.channels(level + 1)
        down = layer < self.half
        found = {
            "norm": Weight((c,), "R"),
            # Hidden channels, and heads, are cut over the tensor-parallel ranks; axis 1 of a mesh.
            "conv1": Weight((3, 3, c, c), "RRRS1"),
            "conv2": Weight((3, 3, c, c), "RRS1R"),
        }
        if level > 0:
            d = c // self.heads
            found["attention.norm"] = Weight((c,), "R")
            found["attention.in"] = Weight((c, 3, self.heads, d), "RRS1R")
            found["attention.out"] = Weight((self.heads, d, c), "S1RR")
        if down:
            found["down"] = Weight((4 * c, deeper), "RR")
        else:
            found["up"] = Weight((deeper, 4 * c), "RR")
            found["join"] = Weight((2 * c, c), "RR")
        if level == 0 and down:
            found["stem"] = Weight((3, 3, 1, c), "RRRR")
        elif level == 0:
            found["head.norm"] = Weight((c,), "R")
            found["head"] = Weight((3, 3, c, 1), "RRRR")
        return found

    def initial(self, name: str, seed: int) -> Array:
        """A whole weight before training, in float64; it depends on name and seed alone."""
        shape = self.weights()[name].shape
        if len(shape) == 1:  # of a norm
            return np.ones(shape)
        # "attention.out" sums over its first two axes, the others over all but what comes out.
        out = shape[-1] if not name.endswith(".in") else shape[1] * shape[2] * shape[3]
        random = np.random.default_rng((seed, zlib.crc32(name.encode())))
        spread = (np.prod(shape) / out) ** -0.5
        # At first the network sees hardly any noise, so that its loss begins at 1.
        return random.standard_normal(shape) * spread * (0.1 if name.endswith(".head") else 1)


class Part:
    """Some consecutive layers of a network.

    Args:
        network: of which it is a part.
        layers: which ones.
        weights: by name; this rank's shard of each.
        total: the sum of an array over the ranks that weights are cut over; None where they are
            whole.
        xp: the array module.
    """

    def __init__(
        self,
        network: Network,
        layers: range,
        weights: Mapping[str, Array],
        total: Callable[[Array], Array] | None = None,
        xp: Any = np,
    ) -> None:
        self.network = network
        self.layers = layers
        self._xp = xp
        self._ops = Layers(xp, weights, total or (lambda array: array))

    def forward(self, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], PullPart]:
        """From the values that enter to those that leave, and the way back.

        Args:
            inputs: arrays of shape (images, rows, columns, channels) by the names of values.
        """
        values, pulls = dict(inputs), []
        for layer in self.layers:
            taken, given = self.network.values(layer)
            step = self._down if layer < self.network.half else self._up
            made, pull = step(layer, *(values.pop(name) for name in taken))
            values.update(zip(given, made, strict=True))
            pulls.append((taken, given, pull))

        def back(gradients: Mapping[str, Array], later: Later) -> dict[str, Array]:
            flow = dict(gradients)
            for taken, given, pull in reversed(pulls):
                found = pull(later, *(flow.pop(name) for name in given))
                flow.update(zip(taken, found, strict=True))
            return flow

        return values, back

    def _down(self, layer: int, x: Array) -> tuple[tuple[Array, Array], Any]:
        ops, name = self._ops, f"{layer}."
        enter = [ops.conv(name + "stem")] if layer == 0 else []
        skip, pull_work = chain(*enter, *self._work(layer))(x)
        y, pull_down = chain(ops.halve, ops.linear(name + "down"))(skip)

        def back(later: Later, g_y: Array, g_skip: Array) -> tuple[Array]:
            return (pull_work(pull_down(g_y, later) + g_skip, later),)

        return (y, skip), back

    def _up(self, layer: int, x: Array, skip: Array) -> tuple[tuple[Array], Any]:
        ops, name = self._ops, f"{layer}."
        up, pull_up = chain(ops.linear(name + "up"), ops.double)(x)
        leave: list[Layer] = []
        if layer == self.network.layers - 1:
            leave = [ops.norm(name + "head.norm"), ops.silu, ops.conv(name + "head")]
        both = self._xp.concatenate([up, skip], -1)
        y, pull_work = chain(ops.linear(name + "join"), *self._work(layer), *leave)(both)
        channels = up.shape[-1]

        def back(later: Later, g_y: Array) -> tuple[Array, Array]:
            g = pull_work(g_y, later)
            return pull_up(g[..., :channels], later), g[..., channels:]

        return (y,), back

    def _work(self, layer: int) -> list[Layer]:
        """What each layer does at its own size."""
        ops, name = self._ops, f"{layer}."
        conv = [ops.shared, ops.conv(name + "conv1"), ops.silu, ops.conv(name + "conv2"), ops.total]
        found = [residual(chain(ops.norm(name + "norm"), ops.silu, *conv))]
        if layer not in (0, self.network.layers - 1):
            name += "attention."
            look = [ops.linear(name + "in"), ops.attend, ops.linear(name + "out", axes=2)]
            found.append(residual(chain(ops.norm(name + "norm"), ops.shared, *look, ops.total)))
        return found


def loss_of(prediction: Array, noise: Array, images: int) -> tuple[float, Array]:
    """How much noise is left in the image, as a share of what was there, and its gradient.

    Args:
        prediction: of some images.
        noise: what it should be; mean square 1.
        images: how many there are in all; the shares of all ranks add up to the mean over them.
    """
    pixels = images * prediction.shape[1] * prediction.shape[2]
    difference = prediction - noise
    return float((difference * difference).sum()) / pixels, difference * (2 / pixels)
