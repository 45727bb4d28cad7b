"""Strided copies as a GPU makes them: words in place of elements, and as few dimensions as can be.

A copy of any region is a loop over words: its contiguous inner runs are cut into the widest words
that sizes, strides and addresses allow, and dimensions that follow each other in memory on both
sides are merged. The order of the loop is that of the destination's memory, so that neighbouring
threads write neighbouring words. Where words lie in another order in the source, what they read
would be far apart: such a copy is turned, and goes by tiles. Runs of several words are read and
written as they lie, in either order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

#: Widest word in bytes: the widest load of a GPU's thread.
MAX_WORD_NBYTES = 16
#: Dimensions of one copy; a region of more takes several.
MAX_DIMS = 6
#: Words of one copy, and bytes from its first to its last: indices and offsets have 32 bits, as
#: arithmetic with 64 costs a GPU several times as much.
MAX_WORDS = 2**31 - 1
MAX_REACH_NBYTES = 2**31 - 1


class Copy(NamedTuple):
    """One strided copy.

    Attributes:
        source: address of the first word.
        destination: where it goes.
        shape: words along each dimension.
        source_strides: in bytes.
        destination_strides: in bytes.
    """

    source: int
    destination: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]

    @property
    def words(self) -> int:
        """Number of words."""
        return math.prod(self.shape)

    @property
    def within_limits(self) -> bool:
        """One copy of a kernel makes it."""
        reach_nbytes = max(
            sum((extent - 1) * abs(stride) for extent, stride in zip(self.shape, side, strict=True))
            for side in (self.source_strides, self.destination_strides)
        )
        return (
            len(self.shape) <= MAX_DIMS
            and self.words <= MAX_WORDS
            and reach_nbytes <= MAX_REACH_NBYTES
        )

    def part(self, dim: int, first: int, count: int) -> Copy:
        """That of ``count`` words along a dimension, from one on."""

        def with_new(values: tuple[int, ...], new: int) -> tuple[int, ...]:
            return (*values[:dim], new, *values[dim + 1 :])

        source, destination = self.source_strides[dim], self.destination_strides[dim]
        part = self._replace(
            source=self.source + first * source,
            destination=self.destination + first * destination,
            shape=with_new(self.shape, count),
        )
        if count > 1:
            return part
        # No step is made along it, and its strides may be larger than the limits.
        return part._replace(
            source_strides=with_new(self.source_strides, 0),
            destination_strides=with_new(self.destination_strides, 0),
        )

    def rows(self) -> Iterator[Copy]:
        """Those of each index of the first dimension, without it."""
        for i in range(self.shape[0]):
            row = self.part(0, i, 1)
            yield row._replace(
                shape=row.shape[1:],
                source_strides=row.source_strides[1:],
                destination_strides=row.destination_strides[1:],
            )


class Kind(NamedTuple):
    """What copies of one launch share.

    Attributes:
        word_nbytes: bytes of a word.
        turned: the last dimension follows the destination's memory, and the one before it the
            source's.
    """

    word_nbytes: int
    turned: bool


class Pair(NamedTuple):
    """A region and where it goes.

    Attributes:
        source: address of its first element.
        destination: address that this goes to.
        shape: elements along each dimension.
        source_strides: in bytes.
        destination_strides: in bytes.
        itemsize: bytes of an element.
    """

    source: int
    destination: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]
    itemsize: int


def copies_of(pairs: Iterable[Pair], from_host: bool = False) -> dict[Kind, list[Copy]]:
    """Copies that take some regions to their places, by kind.

    Args:
        pairs: the regions.
        from_host: they come from memory of the host.
    """
    found: dict[Kind, list[Copy]] = {}
    for pair in pairs:
        if 0 in pair.shape:
            continue
        kind, form, fits = _form(
            pair.shape,
            pair.source_strides,
            pair.destination_strides,
            pair.itemsize,
            (pair.source | pair.destination) & (MAX_WORD_NBYTES - 1),
            from_host,
        )
        copy = Copy(pair.source, pair.destination, *form[2:])
        found.setdefault(kind, []).extend((copy,) if fits else _cut(copy))
    return found


@lru_cache(maxsize=1024)
def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of an array in C order."""
    strides = [itemsize]
    for extent in shape[:0:-1]:
        strides.append(strides[-1] * extent)
    return tuple(strides[::-1][: len(shape)]) if shape else ()


@lru_cache(maxsize=4096)
def _form(
    shape: tuple[int, ...],
    source_strides: tuple[int, ...],
    destination_strides: tuple[int, ...],
    itemsize: int,
    low_bits: int,
    from_host: bool,
) -> tuple[Kind, Copy, bool]:
    """Order and merge dimensions, choose the word, and see whether the source is turned.

    Returns:
        Its kind, the copy from and to address 0, and whether that is within the limits.
    """
    # The bytes of an element are one more dimension: then the last is contiguous on both sides.
    elements = sorted(
        zip(shape, source_strides, destination_strides, strict=True),
        key=lambda dim: abs(dim[2]),
        reverse=True,
    )
    dims: list[tuple[int, int, int]] = []
    for extent, source, destination in (*elements, (itemsize, 1, 1)):
        if extent == 1:
            continue
        if dims and dims[-1][1:] == (extent * source, extent * destination):
            dims[-1] = (dims[-1][0] * extent, source, destination)
        else:
            dims.append((extent, source, destination))
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))  # elements of one byte, apart from each other
    run = dims[-1][0]
    bits = low_bits | run | MAX_WORD_NBYTES
    for _, source, destination in dims[:-1]:
        bits |= source | destination
    word = bits & -bits
    dims[-1] = (run // word, word, word)
    if dims[-1][0] == 1 and len(dims) > 1:
        dims.pop()
    # Where the last one repeats a word, each is read once, in whatever order.
    nearest = min((abs(source) for _, source, _ in dims if source), default=0)
    turned = bool(dims[-1][1]) and abs(dims[-1][1]) > nearest
    if turned:
        along = max(d for d, dim in enumerate(dims) if abs(dim[1]) == nearest)
        dims.insert(-1, dims.pop(along))
    elif from_host:
        # Short pieces far apart cost more on the link than in the GPU's memory.
        dims[:-1] = sorted(dims[:-1], key=lambda dim: (not dim[1], abs(dim[1])), reverse=True)
    extents, sources, destinations = zip(*dims, strict=True)
    copy = Copy(0, 0, extents, sources, destinations)
    return Kind(word, turned), copy, copy.within_limits


def _cut(copy: Copy) -> Iterator[Copy]:
    """The same in copies that are within the limits."""
    if copy.within_limits:
        yield copy
    elif len(copy.shape) > MAX_DIMS:
        for row in copy.rows():
            yield from _cut(row)
    else:
        strides = zip(copy.shape, copy.source_strides, copy.destination_strides, strict=True)
        reach = [((n - 1) * max(abs(one), abs(other)), n) for n, one, other in strides]
        dim = reach.index(max(reach))
        half = copy.shape[dim] // 2
        yield from _cut(copy.part(dim, 0, half))
        yield from _cut(copy.part(dim, half, copy.shape[dim] - half))
