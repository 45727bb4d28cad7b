"""Cells: the distinct boxes of a layout, made disjoint, and found by what they overlap."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

from xmesh.box import Box
from xmesh.box_index import BoxIndex


def disjoint_cells(holders: Mapping[Box, tuple[int, ...]]) -> dict[Box, tuple[int, ...]]:
    """Cut boxes that overlap without being equal at each other's borders.

    Args:
        holders: box -> ranks that hold it, as ``Layout.holders``.

    Returns:
        Cell -> ranks that hold it, ascending, ordered by box. The cells are disjoint, and each box
        is a union of cells.
    """
    boxes = list(holders)
    index = BoxIndex(boxes)
    neighbours = [index.overlapping(box) for box in boxes]
    cells: dict[Box, set[int]] = {}
    done: set[int] = set()
    for first in range(len(boxes)):
        if first in done:
            continue
        # All boxes that hang together are cut at the borders of all of them: cutting at those of
        # the direct neighbours alone leaves pieces that still overlap.
        group, frontier = {first}, [first]
        while frontier:
            new = set(neighbours[frontier.pop()]) - group
            group |= new
            frontier += new
        done |= group
        members = [boxes[i] for i in sorted(group)]
        borders = [
            sorted({box.start[d] for box in members} | {box.stop[d] for box in members})
            for d in range(members[0].ndim)
        ]
        for box in members:
            for cell in _cut_at(box, borders):
                cells.setdefault(cell, set()).update(holders[box])
    return {cell: tuple(sorted(cells[cell])) for cell in sorted(cells)}


def _cut_at(box: Box, borders: Sequence[Sequence[int]]) -> list[Box]:
    """Pieces of a box between the borders, which include its own."""
    spans = [
        list(pairwise(cuts[bisect_left(cuts, a) : bisect_right(cuts, b)]))
        for cuts, a, b in zip(borders, box.start, box.stop, strict=True)
    ]
    return [
        Box(tuple(a for a, _ in piece), tuple(b for _, b in piece)) for piece in product(*spans)
    ]


def uncovered(box: Box, parts: Sequence[Box]) -> Box | None:
    """Some region of ``box`` that no part covers, or None."""
    rest = [box]
    for part in parts:
        rest = [piece for region in rest for piece in _subtract(region, part)]
    return rest[0] if rest else None


def _subtract(box: Box, hole: Box) -> list[Box]:
    """What is left of ``box`` without ``hole``, as disjoint boxes."""
    common = box.intersect(hole)
    if common is None:
        return [box]
    pieces = []
    start, stop = list(box.start), list(box.stop)
    for d in range(box.ndim):
        if start[d] < common.start[d]:
            pieces.append(Box(tuple(start), (*stop[:d], common.start[d], *stop[d + 1 :])))
        if common.stop[d] < stop[d]:
            pieces.append(Box((*start[:d], common.stop[d], *start[d + 1 :]), tuple(stop)))
        start[d], stop[d] = common.start[d], common.stop[d]
    return pieces
