"""Strided copies as a GPU makes them: words in place of elements, and as few dimensions as can be.

A copy of any region is a loop over words: its contiguous inner runs are cut into the widest words
that sizes, strides and addresses allow, and dimensions that follow each other in memory on both
sides are merged. What is left fits a few registers of a thread.
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
#: Words of one copy: indices are 32 bits wide, as 64-bit division is slow on a GPU.
MAX_WORDS = 2**31 - 1


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

    def part(self, first: int, count: int) -> Copy:
        """That of ``count`` rows of the first dimension."""
        return self._replace(
            source=self.source + first * self.source_strides[0],
            destination=self.destination + first * self.destination_strides[0],
            shape=(count, *self.shape[1:]),
        )


class _Form(NamedTuple):
    """A copy without its addresses."""

    word_nbytes: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]


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


def copies_of(pairs: Iterable[Pair]) -> dict[int, list[Copy]]:
    """Copies that take some regions to their places, by word size in bytes."""
    found: dict[int, list[Copy]] = {}
    for pair in pairs:
        if 0 in pair.shape:
            continue
        form = _form(
            pair.shape,
            pair.source_strides,
            pair.destination_strides,
            pair.itemsize,
            (pair.source | pair.destination) & (MAX_WORD_NBYTES - 1),
        )
        whole = Copy(pair.source, pair.destination, *form[1:])
        found.setdefault(form.word_nbytes, []).extend(_cut(whole))
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
) -> _Form:
    """Merge dimensions, then choose the word."""
    # The bytes of an element are one more dimension: then the last is contiguous on both sides.
    dims: list[tuple[int, int, int]] = []
    for extent, source, destination in (
        *zip(shape, source_strides, destination_strides, strict=True),
        (itemsize, 1, 1),
    ):
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
    return _Form(
        word,
        tuple(extent for extent, _, _ in dims),
        tuple(source for _, source, _ in dims),
        tuple(destination for _, _, destination in dims),
    )


def _cut(copy: Copy) -> Iterator[Copy]:
    """The same in copies that are within the limits."""
    extent = copy.shape[0]
    too_many = copy.words > MAX_WORDS
    if len(copy.shape) > MAX_DIMS or (too_many and extent == 1):
        for i in range(extent):
            row = copy.part(i, 1)
            yield from _cut(
                Copy(
                    row.source,
                    row.destination,
                    row.shape[1:],
                    row.source_strides[1:],
                    row.destination_strides[1:],
                )
            )
    elif too_many:
        yield from _cut(copy.part(0, extent // 2))
        yield from _cut(copy.part(extent // 2, extent - extent // 2))
    else:
        yield copy
