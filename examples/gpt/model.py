"""The model: its parameters, and what a stage of it computes forward and backward.

A block has two halves, attention and MLP, and both are ``x + down(core(up(norm(x))))``. Tensor
parallel ranks have some columns of ``up`` and the same rows of ``down`` (Megatron-LM, Shoeybi et
al., arXiv 1909.08053), so that each half adds up over them once forward and once backward.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpt import layers
from gpt.layers import Array
from gpt.text import VOCABULARY

Arrays = dict[str, Array]
TOKENS, POSITIONS, HEAD = "embedding.tokens", "embedding.positions", "head.tokens"
FINAL_GAIN, FINAL_BIAS = "final.gain", "final.bias"


@dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Attributes:
        hidden: features of a token; ``heads`` divides it.
        sequence: tokens of a row.
        tied: the head uses the table of the embedding.
        seed: of the first parameters.
    """

    vocabulary: int = VOCABULARY
    sequence: int = 64
    hidden: int = 64
    heads: int = 4
    layers: int = 4
    tied: bool = True
    dtype: str = "float32"
    seed: int = 0


class Parameter(NamedTuple):
    """What a parameter is before any rank has it.

    Attributes:
        shape: of all of it.
        spec: how a mesh with the axis "tp" cuts it.
        mean: of its first elements.
        spread: their standard deviation.
    """

    shape: tuple[int, ...]
    spec: str
    mean: float = 0
    spread: float = 0


class Half(NamedTuple):
    """One half of a block.

    Attributes:
        name: of its parameters.
        wide: columns of ``up``.
        narrow: rows of ``down``.
        core: what stands between; gives its output and what its gradient needs.
        core_input: the gradient of its input.
    """

    name: str
    wide: int
    narrow: int
    core: Callable[[Array], tuple[Array, Any]]
    core_input: Callable[[Array, Any], Array]


class Kept(NamedTuple):
    """What the gradients of a half need."""

    normal: layers.Normal
    normed: Array
    core: Any
    made: Array


class Top(NamedTuple):
    """What the gradients of the head need."""

    normal: layers.Normal
    normed: Array
    logits: Array  # the gradient of the loss by them


class Saved(NamedTuple):
    """What a stage keeps of a forward."""

    tokens: Array | None
    halves: list[Kept]
    top: Top | None = None


class Owed(NamedTuple):
    """Gradients of weights that can wait: their names, and the function that gives them."""

    names: tuple[str, ...]
    function: Callable[..., tuple[Array, ...]]
    operands: tuple[Any, ...]


def halves(config: Config, index: int, count: int) -> Iterator[Half]:
    """Halves of the blocks of stage ``index`` of ``count``."""
    h = config.hidden
    first, stop = (config.layers * i // count for i in (index, index + 1))
    core = partial(layers.attention, size=h // config.heads)
    for block in range(first, stop):
        yield Half(f"block{block}.attention", 3 * h, h, core, layers.attention_input)
        yield Half(f"block{block}.mlp", 4 * h, 4 * h, layers.gelu, layers.gelu_input)


def parameters(config: Config, index: int, count: int) -> dict[str, Parameter]:
    """Parameters of stage ``index`` of ``count``, in an order that is always the same.

    The table of a tied head is a copy of that of the embedding, under the same name.
    """
    h = config.hidden
    table = Parameter((config.vocabulary, h), "R R", spread=0.05)
    found = {}
    if index == 0:
        found = {TOKENS: table, POSITIONS: Parameter((config.sequence, h), "R R", spread=0.05)}
    for half in halves(config, index, count):
        # Each half adds to the sum of all before it; less of it where there are many.
        last = (half.narrow * 2 * config.layers) ** -0.5
        found |= {
            f"{half.name}.norm.gain": Parameter((h,), "R", mean=1),
            f"{half.name}.norm.bias": Parameter((h,), "R"),
            f"{half.name}.up.weight": Parameter((h, half.wide), "R S{tp}", spread=h**-0.5),
            f"{half.name}.up.bias": Parameter((half.wide,), "S{tp}"),
            f"{half.name}.down.weight": Parameter((half.narrow, h), "S{tp} R", spread=last),
            f"{half.name}.down.bias": Parameter((h,), "R"),
        }
    if index == count - 1:
        found |= {FINAL_GAIN: Parameter((h,), "R", mean=1), FINAL_BIAS: Parameter((h,), "R")}
        found[TOKENS if config.tied else HEAD] = table
    return found


def initial(config: Config, name: str) -> Array:
    """All of a parameter before the first step; follows from seed and name, whoever asks."""
    parameter = parameters(config, 0, 1)[name]
    rng = np.random.default_rng([config.seed, zlib.crc32(name.encode())])
    drawn = parameter.mean + parameter.spread * rng.standard_normal(parameter.shape)
    return drawn.astype(config.dtype)


class Stage:
    """One of the stages that a model is cut into.

    Args:
        config: sizes of the model.
        index: which stage.
        count: number of stages.
        values: its parameters, or what this rank has of them.
        all_reduce: sums an array over the tensor parallel ranks, in place or not.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        count: int,
        values: Arrays,
        all_reduce: Callable[[Array], Array] = lambda array: array,
    ) -> None:
        self.values = values
        self._config = config
        self._first, self._last = index == 0, index == count - 1
        self._halves = tuple(halves(config, index, count))
        self._all_reduce = all_reduce
        self._head = TOKENS if config.tied else HEAD

    def forward(
        self, x: Array | None, tokens: Array | None, targets: Array | None
    ) -> tuple[Array | None, Array | None, Saved]:
        """One micro-batch forward.

        Args:
            x: what the stage before gave, (b, s, h); None on the first.
            tokens: (b, s), needed on the first stage.
            targets: (b, s), needed on the last.

        Returns:
            What the next stage needs, None on the last; the sum of the losses of all tokens in
            nats, None but on the last; what the gradients need.
        """
        values = self.values
        if self._first:
            x = values[TOKENS][tokens] + values[POSITIONS]
        kept = []
        for half in self._halves:
            x, saved = self._half(half, x)
            kept.append(saved)
        if not self._last:
            return x, None, Saved(tokens, kept)
        normed, normal = layers.layer_norm(x, values[FINAL_GAIN], values[FINAL_BIAS])
        loss, logits = layers.cross_entropy(normed @ values[self._head].T, targets)
        return None, loss, Saved(tokens, kept, Top(normal, normed, logits))

    def backward_input(
        self, gradient: Array | None, saved: Saved
    ) -> tuple[Array | None, list[Owed]]:
        """Gradients of a micro-batch, but for those of the weights.

        Args:
            gradient: of what ``forward`` gave; None on the last stage.
            saved: from ``forward``.

        Returns:
            The gradient of x, None on the first stage; what ``backward_weight`` takes.
        """
        values = self.values
        owed = []
        if saved.top is not None:
            normal, normed, logits = saved.top
            above = logits @ values[self._head]
            gradient = layers.layer_norm_input(above, values[FINAL_GAIN], normal)
            owed = [
                Owed((self._head,), layers.table_weight, (normed, logits)),
                Owed((FINAL_GAIN, FINAL_BIAS), layers.layer_norm_weight, (normal.x, above)),
            ]
        for half, kept in zip(reversed(self._halves), reversed(saved.halves), strict=True):
            gradient, more = self._half_input(half, gradient, kept)
            owed += more
        if self._first:
            operands = (saved.tokens, gradient, self._config.vocabulary)
            owed.append(Owed((TOKENS, POSITIONS), layers.embedding_weight, operands))
            gradient = None
        return gradient, owed

    def backward_weight(self, owed: list[Owed]) -> Arrays:
        """Gradients of the weights, by name."""
        found: Arrays = {}
        for names, function, operands in owed:
            for name, gradient in zip(names, function(*operands), strict=True):
                # A tied table in a model of one stage is used twice.
                found[name] = found[name] + gradient if name in found else gradient
        return found

    def _half(self, half: Half, x: Array) -> tuple[Array, Kept]:
        gain, bias, up, up_bias, down, down_bias = self._of(half)
        normed, normal = layers.layer_norm(x, gain, bias)
        made, core = half.core(normed @ up + up_bias)
        return x + (self._all_reduce(made @ down) + down_bias), Kept(normal, normed, core, made)

    def _half_input(self, half: Half, gradient: Array, kept: Kept) -> tuple[Array, list[Owed]]:
        gain, _, up, _, down, _ = self._of(half)
        wide = half.core_input(gradient @ down.T, kept.core)
        normed = self._all_reduce(wide @ up.T)
        x = gradient + layers.layer_norm_input(normed, gain, kept.normal)
        owed = [
            (("norm.gain", "norm.bias"), layers.layer_norm_weight, (kept.normal.x, normed)),
            (("up.weight", "up.bias"), layers.linear_weight, (kept.normed, wide)),
            (("down.weight", "down.bias"), layers.linear_weight, (kept.made, gradient)),
        ]
        return x, [
            Owed(tuple(f"{half.name}.{name}" for name in names), function, operands)
            for names, function, operands in owed
        ]

    def _of(self, half: Half) -> tuple[Array, ...]:
        names = ("norm.gain", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
        return tuple(self.values[f"{half.name}.{name}"] for name in names)
