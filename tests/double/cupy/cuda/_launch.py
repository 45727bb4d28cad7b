"""Units: NCCL calls launched at once, and their parts in each stream that they use."""

from __future__ import annotations

import collections
import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

from cupy import _engine
from cupy.cuda._faults import counts
from cupy.cuda._link import Link, Membership

#: Held from the message to the judge to the last stream: all orders of launches are the same.
_launching = threading.Lock()
_numbers = itertools.count(1)


class Failed(RuntimeError):
    """An operation has failed on the device."""


@dataclass(eq=False)
class Call:
    """One NCCL call."""

    membership: Membership
    kind: str
    count: int
    datatype: int
    #: The other rank, the root, or None.
    peer: int | None
    #: The operator of a reduction.
    op: int | None
    stream: int
    #: Pointer and size of what it reads and writes on this rank.
    reads: tuple[int, int] | None
    writes: tuple[int, int] | None
    #: File and line of the caller.
    at: str
    result: bytes | None = None
    done: bool = False

    def message(self) -> dict[str, Any]:
        """What the judge must know."""
        fields = ("kind", "count", "datatype", "peer", "op", "at")
        known = {name: getattr(self, name) for name in fields}
        return {"comm": self.membership.number, "rank": self.membership.rank, **known}


@dataclass(eq=False)
class Unit:
    """Calls that are launched at once: they start together, and end together."""

    calls: list[Call]
    number: int = field(default_factory=lambda: next(_numbers))
    #: Streams that have come to it.
    there: set[int] = field(default_factory=set)
    #: The judge knows of it.
    issued: bool = False
    started: bool = False
    ended: bool = False
    problem: str | None = None

    @property
    def link(self) -> Link:
        return self.calls[0].membership.link

    @property
    def streams(self) -> list[int]:
        return list(dict.fromkeys(call.stream for call in self.calls))

    def launch(self) -> None:
        """Append it to its streams."""
        end_dropped()
        link, streams = self.link, self.streams
        with _launching:
            with link.mutex:
                link.units[self.number] = self
                for call in self.calls:
                    call.membership.outstanding.add(self)
            counts.launches += 1
            # The judge is told last: a violation it finds is met in the streams, not in this call.
            try:
                for stream in streams:
                    _engine.enqueue(stream, _Part(self, stream))
            except BaseException as problem:
                with link.mutex:
                    self.problem = f"it could not be enqueued: {problem}"
                    self._end()
                raise
            link.tell("issue", self.number, streams, [call.message() for call in self.calls])
            with link.mutex:
                self.issued = True
                if self.ended:  # another thread has aborted it meanwhile
                    link.tell("done", self.number)
        _engine.wake()

    def reach(self, stream: int) -> None:
        """A stream has come to it."""
        with self.link.mutex:
            self.there.add(stream)

    def poll(self) -> bool:
        """Take in what has come.

        Returns:
            Whether it has ended.

        Raises:
            Failed: it has failed, on this rank or another.
        """
        with self.link.mutex:
            if not self.ended and self.problem is None and not self.started:
                self._start_if_due()
            if not self.ended and self.problem is None:
                self._take_in()
            if self.problem is not None:
                self._fail()
                raise Failed(self.problem)
            return self.ended

    def _start_if_due(self) -> None:
        if not self.issued or len(self.there) < len(self.streams):
            return
        if all(call.membership.freed for call in self.calls):
            return  # nothing is left to start
        self.started = True
        payloads = []
        for call in self.calls:
            if call.membership.freed:
                payloads.append(b"")  # its memory may be gone
                continue
            try:
                if call.writes:
                    _engine.host_view(*call.writes)
                payloads.append(_engine.host_view(*call.reads).tobytes() if call.reads else b"")
            except Exception as problem:
                self._violate(call, f"{self._about(call)}: its memory is not there: {problem}")
                return
        for other in (*self.link.running, self):
            clash = _overlap(self, other)
            if clash is not None:
                first, second = (self._about(call) for call in clash)
                self._violate(clash[0], f"two operations use one buffer: {first} and {second}")
                return
        self.link.running.add(self)
        self.link.tell("start", self.number, payloads)

    def _take_in(self) -> None:
        for call in self.calls:
            membership = call.membership
            if call.done:
                continue
            if membership.freed:
                call.done = True  # aborted: what it would have written is undefined
            elif call.result is not None and self.started:
                try:
                    if call.writes:
                        _engine.host_view(*call.writes)[:] = memoryview(call.result)
                except Exception as problem:
                    self._violate(call, f"{self._about(call)}: its memory is gone: {problem}")
                    return
                call.done, call.result = True, None
            elif membership.fatal and membership.error is not None:
                self.problem = f"{self._about(call)} has failed: {membership.error[1]}"
                return
        if all(call.done for call in self.calls):
            self._end()

    def _fail(self) -> None:
        """End it, and all on its device: the engine drops what a failed device has to do."""
        device = self.calls[0].membership.device
        for unit in list(self.link.units.values()):
            if unit.calls[0].membership.device == device:
                unit.problem = unit.problem or self.problem
                unit._end()

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.link.running.discard(self)
        self.link.units.pop(self.number, None)
        for call in self.calls:
            call.membership.outstanding.discard(self)
        if self.issued:
            self.link.tell("done", self.number)

    def _violate(self, call: Call, text: str) -> None:
        self.problem = text
        self.link.violation(text, call.membership.number)

    def _about(self, call: Call) -> str:
        return f"{call.kind} on {call.membership.name}, called at {call.at}"


class _Part(_engine.Work):  # type: ignore[misc, unused-ignore]
    """A unit in one of its streams."""

    def __init__(self, unit: Unit, stream: int) -> None:
        self.label = "NCCL " + " + ".join(f"{call.kind} at {call.at}" for call in unit.calls)
        self._unit = unit
        self._stream = stream

    def __del__(self) -> None:
        # Only noted: this may run anywhere, also where locks of the engine are held.
        if not self._unit.ended:
            _dropped.append(self._unit)

    def start(self) -> None:
        self._unit.reach(self._stream)

    def poll(self) -> bool:
        return self._unit.poll()


#: Units that the engine has dropped, as something else has failed on the device.
_dropped: collections.deque[Unit] = collections.deque()


def end_dropped() -> None:
    """End units that no stream has any more."""
    while _dropped:
        unit = _dropped.popleft()
        with unit.link.mutex:
            unit.problem = unit.problem or "its device has failed"
            unit._end()


def _overlap(unit: Unit, other: Unit) -> tuple[Call, Call] | None:
    """Calls of two units at the same time that use the same bytes, one of them writing."""
    for first, second in itertools.product(unit.calls, other.calls):
        if first is second or any(call.done or call.membership.freed for call in (first, second)):
            continue
        for one, two in (
            (first.writes, second.writes),
            (first.writes, second.reads),
            (first.reads, second.writes),
        ):
            if one and two and one[0] < two[0] + two[1] and two[0] < one[0] + one[1]:
                return first, second
    return None
