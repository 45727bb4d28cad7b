"""Layers of a GPT and their gradients: pure functions of NumPy arrays, or of CuPy's.

Letters in shapes: b rows, s tokens of a row, h features, v characters. ``..._input`` gives the
gradient of a layer's input, for which other stages wait; ``..._weight`` that of its weights, for
which nobody does. Only functions that NumPy and CuPy share are used.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

#: An array of NumPy or CuPy; there is no common type.
Array = Any


def array_module(array: Array) -> Any:
    """``cupy`` for its arrays, else ``numpy``."""
    if type(array).__module__.partition(".")[0] == "cupy":
        import cupy

        return cupy
    return np


def on_host(array: Array) -> Any:
    """The same as an array of NumPy."""
    xp = array_module(array)
    return array if xp is np else xp.asnumpy(array)


def one_hot(tokens: Array, count: int, dtype: Any) -> Array:
    """Shape ``(*tokens.shape, count)``: 1 where the token is, else 0."""
    xp = array_module(tokens)
    return (tokens[..., None] == xp.arange(count)).astype(dtype)


def rows_of(array: Array) -> Array:
    """All but the last dimension made one: (..., h) -> (n, h)."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


# Linear layers -------------------------------------------------------------------------------


def linear_weight(x: Array, gradient: Array) -> tuple[Array, Array]:
    """Of ``y = x @ weight + bias``.

    Args:
        x: (..., i).
        gradient: of y, (..., o).

    Returns:
        Gradients of weight (i, o) and bias (o,).
    """
    flat = rows_of(gradient)
    return rows_of(x).T @ flat, flat.sum(axis=0)


def embedding_weight(tokens: Array, gradient: Array, count: int) -> tuple[Array, Array]:
    """Of ``x = table[tokens] + positions``.

    A product with ones and zeros adds up in one order, where scattered additions on a GPU do not.

    Args:
        tokens: (b, s).
        gradient: of x, (b, s, h).
        count: v, rows of the table.

    Returns:
        Gradients of the table (v, h) and the positions (s, h).
    """
    chosen = rows_of(one_hot(tokens, count, gradient.dtype))
    return chosen.T @ rows_of(gradient), gradient.sum(axis=0)


def table_weight(x: Array, gradient: Array) -> tuple[Array]:
    """Of ``logits = x @ table.T``: x (b, s, h), gradient (b, s, v); the table's is (v, h)."""
    return (rows_of(gradient).T @ rows_of(x),)


# Layer norm ----------------------------------------------------------------------------------


class Normal(NamedTuple):
    """What the gradients of a layer norm need.

    Attributes:
        x: of mean 0 and variance 1 over the last dimension.
        scale: what made it so, (..., 1).
    """

    x: Array
    scale: Array


def layer_norm(x: Array, gain: Array, bias: Array, epsilon: float = 1e-5) -> tuple[Array, Normal]:
    """Mean 0 and variance 1 over the last dimension, then gain and bias (h,)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = ((centred * centred).mean(axis=-1, keepdims=True) + epsilon) ** -0.5
    normal = centred * scale
    return normal * gain + bias, Normal(normal, scale)


def layer_norm_input(gradient: Array, gain: Array, saved: Normal) -> Array:
    """Gradient of x, of its shape."""
    inner = gradient * gain
    mean = inner.mean(axis=-1, keepdims=True)
    along = (inner * saved.x).mean(axis=-1, keepdims=True)
    return saved.scale * (inner - mean - saved.x * along)


def layer_norm_weight(normal: Array, gradient: Array) -> tuple[Array, Array]:
    """Gradients of gain and bias, (h,)."""
    flat = rows_of(gradient)
    return (rows_of(normal) * flat).sum(axis=0), flat.sum(axis=0)


# Between two linear layers -------------------------------------------------------------------


class Heads(NamedTuple):
    """Queries, keys, values (b, heads, s, d), and what each token takes of the earlier ones."""

    q: Array
    k: Array
    v: Array
    share: Array  # (b, heads, s, s)


def attention(qkv: Array, size: int) -> tuple[Array, Heads]:
    """Causal self-attention.

    Args:
        qkv: (b, s, heads * 3 * size): query, key and value of each head stand side by side, so a
            cut between heads cuts them all.
        size: d, features of a head.

    Returns:
        (b, s, heads * size), and what the gradient needs.
    """
    xp = array_module(qkv)
    b, s, wide = qkv.shape
    q, k, v = qkv.reshape(b, s, wide // (3 * size), 3, size).transpose(3, 0, 2, 1, 4)
    scores = (q @ k.swapaxes(-1, -2)) * size**-0.5
    scores = xp.where(xp.tril(xp.ones((s, s), bool)), scores, -math.inf)
    share = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    share = share / share.sum(axis=-1, keepdims=True)
    made = (share @ v).swapaxes(1, 2).reshape(b, s, wide // 3)
    return made, Heads(q, k, v, share)


def attention_input(gradient: Array, saved: Heads) -> Array:
    """Gradient of qkv, of its shape."""
    xp = array_module(gradient)
    b, heads, s, size = saved.q.shape
    made = gradient.reshape(b, s, heads, size).swapaxes(1, 2)
    share = made @ saved.v.swapaxes(-1, -2)
    scores = saved.share * (share - (share * saved.share).sum(axis=-1, keepdims=True))
    scores = scores * size**-0.5
    parts = xp.stack(
        [scores @ saved.k, scores.swapaxes(-1, -2) @ saved.q, saved.share.swapaxes(-1, -2) @ made]
    )
    return parts.transpose(1, 3, 2, 0, 4).reshape(b, s, heads * 3 * size)


_GELU = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


class Bend(NamedTuple):
    """What the gradient of a gelu needs."""

    x: Array
    tanh: Array


def gelu(x: Array) -> tuple[Array, Bend]:
    """x times roughly the share of a normal distribution below x (its usual form by tanh)."""
    xp = array_module(x)
    bend = xp.tanh(_GELU * (x + _CUBIC * x * x * x))
    return 0.5 * x * (1 + bend), Bend(x, bend)


def gelu_input(gradient: Array, saved: Bend) -> Array:
    """Gradient of x, of its shape."""
    x, bend = saved
    slope = _GELU * (1 + 3 * _CUBIC * x * x)
    return gradient * 0.5 * (1 + bend + x * (1 - bend * bend) * slope)


# The loss ------------------------------------------------------------------------------------


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Sum over tokens of -log(probability of the target), in nats.

    The sum, not the mean: sums over parts of a batch add up, however unequal the parts.

    Args:
        logits: (b, s, v).
        targets: (b, s).

    Returns:
        The sum, of no dimension, and its gradient by the logits (b, s, v).
    """
    xp = array_module(logits)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    powers = xp.exp(shifted)
    total = powers.sum(axis=-1, keepdims=True)
    wanted = one_hot(targets, logits.shape[-1], logits.dtype)
    loss = (xp.log(total)[..., 0] - (shifted * wanted).sum(axis=-1)).sum()
    return loss, powers / total - wanted
