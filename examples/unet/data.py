"""Training images: shapes drawn by a rule, with noise; each follows from (seed, step, number)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Standard deviation of the noise; shapes have brightness 1 on a ground of 0.
NOISE = 0.5


class Images(NamedTuple):
    """Some images of a step.

    Attributes:
        noisy: what the network sees, (images, side, side, 1).
        noise: what was added to the clean image, in units of ``NOISE``; same shape.
    """

    noisy: Array
    noise: Array


def draw(seed: int, step: int, numbers: Iterable[int], side: int, dtype: str) -> Images:
    """Draw some of the images of a training step.

    Every image has a generator of its own, so that a rank draws those that it needs, whoever
    draws the others.

    Args:
        seed: of the training run.
        step: which one.
        numbers: which images of the step.
        side: rows, and columns, of an image.
        dtype: of both arrays; values are drawn in float64, and rounded.
    """
    pairs = [_one(np.random.default_rng((seed, step, number)), side) for number in numbers]
    shape = (len(pairs), 2, side, side, 1)
    both = np.array(pairs, dtype).reshape(shape)
    return Images(np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1]))


def _one(random: np.random.Generator, side: int) -> tuple[Array, Array]:
    """One noisy image and its noise, (side, side) each."""
    clean = np.zeros((side, side))
    y, x = np.ogrid[0:side, 0:side]
    for _ in range(random.integers(1, 4)):
        centre_y, centre_x = random.uniform(0.2, 0.8, 2) * side
        angle = random.uniform(0, 2 * np.pi)
        across, along = random.uniform(0.1, 0.3, 2) * side
        u = (x - centre_x) * np.cos(angle) + (y - centre_y) * np.sin(angle)
        v = (y - centre_y) * np.cos(angle) - (x - centre_x) * np.sin(angle)
        u, v = np.abs(u / along), np.abs(v / across)
        # An ellipse, a rectangle, a rhombus: where the distance is below 1.
        distance = (np.hypot(u, v), np.maximum(u, v), u + v)[random.integers(3)]
        edge = np.clip((1 - distance) * min(across, along) + 0.5, 0, 1)  # a pixel wide
        clean = np.maximum(clean, edge)
    noise = random.standard_normal((side, side))
    return clean + NOISE * noise, noise
