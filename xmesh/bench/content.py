"""Content: elements that tell where they belong, for checks that nothing wrong can pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xmesh.box import Box

Elements = NDArray[np.uint32]


def codes(box: Box, shape: Sequence[int]) -> Elements:
    """A number for each element of a box, which depends on its place in the whole array alone.

    Different for any two elements of an array below 2**32 elements, and without a pattern.
    """
    index = np.zeros((1,) * len(shape), np.uint32)
    for dim, extent in enumerate(shape):
        along = np.arange(box.start[dim], box.stop[dim], dtype=np.uint32)
        index = index * np.uint32(extent) + along.reshape(
            [-1 if d == dim else 1 for d in range(len(shape))]
        )
    # A bijection of 32-bit numbers: multiplications by odd numbers, and shifts that can be undone.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        index ^= index >> np.uint32(shift)
        index *= np.uint32(factor)
    index ^= index >> np.uint32(16)
    return index


def key(number: int, repeat: int) -> np.uint32:
    """What tells the content of one call from that of all others."""
    place = number * 2**16 + repeat
    return np.uint32(codes(Box((place,), (place + 1,)), (2**32 - 1,))[0])


def difference(wanted: Elements, out: Elements, box: Box, rank: int, repeat: int) -> str:
    """The first element that is not as it should be, or ""."""
    if np.array_equal(wanted, out):
        return ""
    wrong = wanted != out
    place = np.unravel_index(int(np.argmax(wrong)), out.shape)
    element = tuple(int(i) + start for i, start in zip(place, box.start, strict=True))
    return (
        f"rank {rank}, repeat {repeat}: {np.count_nonzero(wrong):,} of {out.size:,} elements are "
        f"wrong; the first is {element}: {out[place]:#010x}, not {wanted[place]:#010x}"
    )
