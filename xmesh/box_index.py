"""BoxIndex: boxes, found by what they overlap."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import product

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
