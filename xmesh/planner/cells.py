"""Cells: the distinct boxes of a layout, made disjoint, and found by what they overlap."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

from xmesh.box import Box


class BoxIndex:
    """Distinct boxes, found by what they overlap.

    Each dimension keeps its distinct intervals in order; a query bisects them and combines what it
    found, so it costs what it returns when the boxes form a grid. Where they do not (explicit
    layouts), it costs at most one pass over the boxes.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = tuple(boxes)
        ndim = self._boxes[0].ndim if self._boxes else 0
        self._intervals: list[list[tuple[int, int]]] = []
        keys: list[list[int]] = []
        for d in range(ndim):
            spans = [(box.start[d], box.stop[d]) for box in self._boxes]
            distinct = sorted(set(spans))
            position = {span: i for i, span in enumerate(distinct)}
            self._intervals.append(distinct)
            keys.append([position[span] for span in spans])
        self._starts = [[a for a, _ in spans] for spans in self._intervals]
        self._stops = [[b for _, b in spans] for spans in self._intervals]
        self._sorted_stops = [stops == sorted(stops) for stops in self._stops]
        all_keys = zip(*keys, strict=True) if ndim else [()] * len(self._boxes)
        self._by_key = {key: i for i, key in enumerate(all_keys)}

    def overlapping(self, box: Box) -> list[int]:
        """Indices of the boxes that share an element with ``box``, ascending."""
        if not self._boxes:
            return []
        found: list[Sequence[int]] = []
        for d, (starts, stops) in enumerate(zip(self._starts, self._stops, strict=True)):
            end = bisect_left(starts, box.stop[d])
            if self._sorted_stops[d]:
                found.append(range(bisect_right(stops, box.start[d]), end))
            else:
                found.append([i for i in range(end) if stops[i] > box.start[d]])
        if math.prod(map(len, found)) > len(self._boxes):
            return [i for i, other in enumerate(self._boxes) if other.intersect(box)]
        by_key = self._by_key
        return sorted(by_key[key] for key in product(*found) if key in by_key)


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
