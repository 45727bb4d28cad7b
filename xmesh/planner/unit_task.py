"""Which box goes from whom to whom: unit tasks, and the streams they fuse into.

A *unit task* is the intersection of one distinct source box and one distinct destination box, with
the ranks that hold the one and the ranks that need the other (paper section 3.1, cut finer: the
paper's slice is the whole source box). Unit tasks with the same senders and the same receivers are
one *stream* of bytes, so many small boxes cost few messages. Both are found through an index per
dimension; nothing here loops over pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from xmesh.box import Box
from xmesh.box_index import BoxIndex
from xmesh.errors import PlanError, explain
from xmesh.layout import Layout
from xmesh.planner.cells import disjoint_cells, uncovered


@dataclass(frozen=True)
class UnitTask:
    """One box, the ranks that hold it and the ranks that need it.

    Attributes:
        index: position among the unit tasks: by source box, then by destination box.
        box: the region, in indices of the whole array.
        senders: ranks that hold it in the source layout, ascending.
        receivers: ranks that need it in the destination layout, ascending; a rank that also
            sends keeps its own bytes by a local copy.
    """

    index: int
    box: Box
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Stream:
    """All unit tasks between one set of holders and one set of receivers.

    Attributes:
        source: index of the holders' group in the source layout.
        destination: index of the receivers' group in the destination layout.
        boxes: the regions, disjoint, ordered by source box and then destination box.
        senders: as in UnitTask.
        receivers: as in UnitTask.
    """

    source: int
    destination: int
    boxes: tuple[Box, ...]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return sum(box.volume for box in self.boxes)


class _Side:
    """One layout as the planner sees it: distinct boxes, grouped by the set that holds them."""

    def __init__(self, layout: Layout) -> None:
        # Boxes of a spec are equal or disjoint; explicit ones may overlap, as with halos.
        holders = layout.holders if layout.mesh is not None else disjoint_cells(layout.holders)
        self.cells: tuple[Box, ...] = tuple(holders)
        self.cell_ranks: tuple[tuple[int, ...], ...] = tuple(holders.values())
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for cell, ranks in enumerate(self.cell_ranks):
            by_ranks.setdefault(ranks, []).append(cell)
        self.group_ranks: tuple[tuple[int, ...], ...] = tuple(by_ranks)
        self.group_cells: tuple[list[int], ...] = tuple(by_ranks.values())
        self.group_of_cell = [0] * len(self.cells)
        for group, cells in enumerate(self.group_cells):
            for cell in cells:
                self.group_of_cell[cell] = group
        self.index = BoxIndex(self.cells)

    @cached_property
    def groups_of_rank(self) -> dict[int, list[int]]:
        """Rank -> groups that it is in, ascending."""
        table: dict[int, list[int]] = {}
        for group, ranks in enumerate(self.group_ranks):
            for rank in ranks:
                table.setdefault(rank, []).append(group)
        return table


class Streams:
    """All that must move from one layout to another.

    Args:
        src: layout that holds the array.
        dst: layout that needs it; same shape.

    Raises:
        PlanError: the shapes differ, or an element that a destination needs is held by no source
            rank (the gap and the ranks are named).
    """

    def __init__(self, src: Layout, dst: Layout) -> None:
        if src.shape != dst.shape:
            raise PlanError(
                explain(
                    "source and destination must lay out the same array",
                    values=f"source shape {src.shape}, destination shape {dst.shape}",
                    remedy="build both layouts with one shape",
                )
            )
        self.src = _Side(src)
        self.dst = _Side(dst)
        # A spec covers its array by construction; only explicit boxes can leave gaps.
        if src.mesh is None:
            self._require_whole_source()

    def _require_whole_source(self) -> None:
        for j, box in enumerate(self.dst.cells):
            parts = [p for i in self.src.index.overlapping(box) if (p := self._part(i, j))]
            missing = uncovered(box, parts)
            if missing is not None:
                raise PlanError(
                    explain(
                        "every element that a destination needs must be held by a source rank",
                        values=f"no source rank holds {missing}",
                        context=f"needed by ranks {self.dst.cell_ranks[j]} as part of {box}",
                        remedy="extend the source boxes over the gap",
                    )
                )

    def _part(self, i: int, j: int) -> Box | None:
        return self.src.cells[i].intersect(self.dst.cells[j])

    def unit_tasks(self) -> Iterator[UnitTask]:
        """Every unit task, by source box and then by destination box."""
        index = 0
        for i, (box, senders) in enumerate(zip(self.src.cells, self.src.cell_ranks, strict=True)):
            for j in self.dst.index.overlapping(box):
                part = self._part(i, j)
                if part is not None:
                    yield UnitTask(index, part, senders, self.dst.cell_ranks[j])
                    index += 1

    def count(self, at_most: int) -> int:
        """Number of unit tasks; counting stops once it is past ``at_most``."""
        total = 0
        for box in self.src.cells:
            total += len(self.dst.index.overlapping(box))
            if total > at_most:
                break
        return total

    def of_source(self, source: int) -> list[Stream]:
        """Streams that leave one group of holders, by destination group."""
        boxes: dict[int, list[Box]] = {}
        for i in self.src.group_cells[source]:
            for j in self.dst.index.overlapping(self.src.cells[i]):
                part = self._part(i, j)
                if part is not None:
                    boxes.setdefault(self.dst.group_of_cell[j], []).append(part)
        return [self._stream(source, d, boxes[d]) for d in sorted(boxes)]

    def of_destination(self, destination: int) -> list[Stream]:
        """Streams that reach one group of receivers, by source group."""
        boxes: dict[int, list[tuple[int, int, Box]]] = {}
        for j in self.dst.group_cells[destination]:
            for i in self.src.index.overlapping(self.dst.cells[j]):
                part = self._part(i, j)
                if part is not None:
                    boxes.setdefault(self.src.group_of_cell[i], []).append((i, j, part))
        # Sorted as of_source meets them: both ends must see the bytes of a stream in one order.
        return [
            self._stream(s, destination, [part for _, _, part in sorted(boxes[s])])
            for s in sorted(boxes)
        ]

    def of_rank(self, rank: int) -> list[Stream]:
        """Streams that a rank sends, receives or relays, by source group and destination group."""
        found = {}
        for source in self.src.groups_of_rank.get(rank, ()):
            for stream in self.of_source(source):
                found[stream.source, stream.destination] = stream
        for destination in self.dst.groups_of_rank.get(rank, ()):
            for stream in self.of_destination(destination):
                found[stream.source, stream.destination] = stream
        return [found[key] for key in sorted(found)]

    def __iter__(self) -> Iterator[Stream]:
        for source in range(len(self.src.group_ranks)):
            yield from self.of_source(source)

    def _stream(self, source: int, destination: int, boxes: list[Box]) -> Stream:
        senders, receivers = self.src.group_ranks[source], self.dst.group_ranks[destination]
        return Stream(source, destination, tuple(boxes), senders, receivers)
