"""Who waits for whom: cycles among the units that ranks have issued.

A *unit* is what one rank launches at once: an operation, or all operations of a group. An
*operation* joins the units of several ranks. It ends when all of these have started, and a unit
starts when those before it have ended. So unit u depends on unit w when some unit v came before u
on its rank and w takes part in an operation of v. A cycle of such steps is a deadlock

* for certain, where "before" means earlier on the same stream;
* wherever the device runs one kernel at a time, where it means issued earlier and still in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


class Operation:
    """One collective, or one matched pair of send and receive."""

    def __init__(self, comm: Any, name: str, parts: set[tuple[int, str]]) -> None:
        self.comm = comm
        self.name = name
        #: Who takes part: (rank, "send"), (rank, "recv"), or (rank, "") in a collective.
        self.parts = parts
        self.units: dict[tuple[int, str], Unit] = {}
        self.calls: dict[tuple[int, str], dict[str, Any]] = {}
        #: The data of those whose stream has come to it.
        self.arrived: dict[tuple[int, str], bytes] = {}
        self.finished = False


class Unit:
    """What one rank launches at once."""

    def __init__(self, client: Any, number: int, streams: frozenset[int]) -> None:
        self.client = client
        self.number = number
        self.streams = streams
        #: None for a call on a communicator that was broken already.
        self.operations: list[tuple[Operation, tuple[int, str]] | None] = []
        #: The last unit before it that was still in flight: on its rank, and on its streams.
        self.before: list[Unit] = []
        self.before_on_streams: list[Unit] = []
        #: Some unit names it as the one before.
        self.followed = False
        self.done = False
        self.dropped = False

    def joined(self) -> Iterator[Operation]:
        """Its operations on sound communicators."""
        for entry in self.operations:
            if entry is not None and not entry[0].comm.broken:
                yield entry[0]


#: In a cycle: this unit comes after that one, whose operation the next step's unit is also in.
Step = tuple[Unit, Unit, Operation]
#: The same in a search; without an operation, the next step's unit is the one before itself.
_Edge = tuple[Unit, Unit, "Operation | None"]


class Waits:
    """All units that may still be part of a cycle."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self._trim_at = 64

    def add(self, unit: Unit) -> tuple[list[Step], bool]:
        """Take in a unit just issued, and look for a cycle through it.

        Returns:
            The steps of a shortest cycle, or none, and whether it is certain to hang.
        """
        # Of those in flight the last is enough: it was issued while the others were in flight.
        in_flight = unit.client.in_flight
        unit.before = list(in_flight.values())[-1:]
        for stream in unit.streams:
            on_it = [other for other in in_flight.values() if stream in other.streams]
            unit.before_on_streams += on_it[-1:]
        for earlier in (*unit.before, *unit.before_on_streams):
            earlier.followed = True
        in_flight[unit.number] = unit
        self.units.append(unit)
        peers = {other for operation in unit.joined() for other in operation.units.values()}
        if not any(other.followed for other in peers):
            return [], False  # nobody waits for it yet
        steps = self._cycle(unit, streams=True)
        if steps:
            return steps, True
        return self._cycle(unit, streams=False), False

    def done(self, unit: Unit) -> None:
        """A rank's unit has ended there."""
        unit.done = True
        unit.client.in_flight.pop(unit.number, None)
        if len(self.units) >= self._trim_at:
            self._trim()
            self._trim_at = max(64, 2 * len(self.units))

    def _cycle(self, start: Unit, streams: bool) -> list[Step]:
        came_by: dict[Unit, _Edge] = {}
        queue = deque([start])
        while queue:
            unit = queue.popleft()
            for edge, following in self._edges(unit, streams):
                if following is start:
                    edges = [edge]
                    while edges[0][0] is not start:
                        edges.insert(0, came_by[edges[0][0]])
                    return _steps(edges)
                if following not in came_by:
                    came_by[following] = edge
                    queue.append(following)
        return []

    def _edges(self, unit: Unit, streams: bool) -> Iterator[tuple[_Edge, Unit]]:
        for earlier in unit.before_on_streams if streams else unit.before:
            if streams and earlier.done:
                continue
            for operation in earlier.joined():
                if streams and operation.finished:
                    continue
                for other in operation.units.values():
                    if other is not earlier:
                        yield (unit, earlier, operation), other
            yield (unit, earlier, None), earlier

    def _trim(self) -> None:
        """Drop units that no new cycle can pass: all that they depend on is over."""
        found = True
        while found:
            found = False
            for unit in self.units:
                if not unit.dropped and self._over(unit):
                    unit.dropped = found = True
                    unit.before = unit.before_on_streams = []  # or it would keep all before it
        self.units = [unit for unit in self.units if not unit.dropped]

    def _over(self, unit: Unit) -> bool:
        return (
            unit.done
            and all(
                operation.finished and all(other.done for other in operation.units.values())
                for operation in unit.joined()
            )
            and all(
                other.dropped
                for earlier in unit.before
                for operation in earlier.joined()
                for other in operation.units.values()
            )
        )


def _steps(edges: list[_Edge]) -> list[Step]:
    """A cycle's edges, with what goes from unit to unit on one rank made one step."""
    steps = []
    first = None
    for unit, earlier, operation in edges:
        first = first or unit
        if operation is not None:
            steps.append((first, earlier, operation))
            first = None
    return steps
