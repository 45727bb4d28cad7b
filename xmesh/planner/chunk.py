"""Cutting boxes into chunks: the pieces of a transfer that travel and are packed one at a time.

A chunk is itself a few boxes, so packing it is a strided copy and nothing more, and both ends of a
message derive the same chunks from the boxes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise, product

from xmesh.box import Box

Chunk = tuple[Box, ...]


def chunks_of(boxes: Iterable[Box], volume: int) -> tuple[Chunk, ...]:
    """Cut boxes into chunks of at most ``volume`` elements.

    Boxes larger than that are cut along their outermost dimension that allows it; smaller ones
    share a chunk, in order.

    Args:
        boxes: disjoint regions, none empty.
        volume: elements in a chunk at the most, >= 1.

    Returns:
        The chunks, in the order of the boxes; together they hold each element once.
    """
    chunks: list[Chunk] = []
    pending: list[Box] = []
    room = volume
    for box in boxes:
        for piece in _cut(box, volume):
            size = piece.volume
            if size > room:
                chunks.append(tuple(pending))
                pending, room = [], volume
            pending.append(piece)
            room -= size
            if len(pending) == 1 and size * 2 > volume:
                # A piece that fills most of a chunk travels alone: it can go without packing.
                chunks.append(tuple(pending))
                pending, room = [], volume
    if pending:
        chunks.append(tuple(pending))
    return tuple(chunks)


def _cut(box: Box, volume: int) -> Iterator[Box]:
    """Pieces of a box of at most ``volume`` elements, as even as whole rows allow."""
    if box.volume <= volume:
        yield box
        return
    shape = box.shape
    axis = next(d for d in range(box.ndim) if math.prod(shape[d + 1 :]) <= volume)
    rows = max(1, volume // math.prod(shape[axis + 1 :]))
    count = -(-shape[axis] // rows)
    cuts = [box.start[axis] + shape[axis] * i // count for i in range(count + 1)]
    outer = [range(a, b) for a, b in zip(box.start[:axis], box.stop[:axis], strict=True)]
    for index in product(*outer):
        above = tuple(i + 1 for i in index)
        for a, b in pairwise(cuts):
            yield Box(
                (*index, a, *box.start[axis + 1 :]),
                (*above, b, *box.stop[axis + 1 :]),
            )


def take(boxes: Iterable[Box], volume: int) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """Divide boxes in two: the first ``volume`` elements in order, and the rest.

    Args:
        boxes: disjoint regions.
        volume: elements wanted in the first part.

    Returns:
        The two parts; a box that is cut leaves at most two pieces per dimension in each.
    """
    head: list[Box] = []
    tail: list[Box] = []
    for box in boxes:
        first, rest = _take_from(box, min(volume, box.volume))
        head += first
        tail += rest
        volume -= sum(piece.volume for piece in first)
    return tuple(head), tuple(tail)


def _take_from(box: Box, volume: int) -> tuple[list[Box], list[Box]]:
    if volume <= 0:
        return [], [box]
    if volume >= box.volume:
        return [box], []
    axis = next(d for d in range(box.ndim) if box.stop[d] - box.start[d] > 1)
    inner = box.volume // (box.stop[axis] - box.start[axis])
    rows, rest = divmod(volume, inner)
    cut = box.start[axis] + rows

    def slab(a: int, b: int) -> list[Box]:
        if a >= b:
            return []
        start = (*box.start[:axis], a, *box.start[axis + 1 :])
        return [Box(start, (*box.stop[:axis], b, *box.stop[axis + 1 :]))]

    if not rest:
        return slab(box.start[axis], cut), slab(cut, box.stop[axis])
    first, second = _take_from(slab(cut, cut + 1)[0], rest)
    return slab(box.start[axis], cut) + first, second + slab(cut + 1, box.stop[axis])
