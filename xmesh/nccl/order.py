"""One order of all NCCL calls over all ranks, with nobody in charge of it.

Kernels of NCCL hold a part of the GPU until their peers have come, so ranks that launch two calls
in different orders may wait for each other for ever, be it on different communicators. Each call
therefore gets a *stamp*, once all its ranks are there: every rank proposes a number higher than any
it has seen, the highest is the call's, and each rank launches by ascending stamps. A call that has
been proposed for, but has no stamp yet, holds back those with higher stamps: its own may be lower.
(This is total order multicast as Skeen gave it, with all ranks of the group as its members.)

As a stamp is only asked for when all ranks of a call are there, calls whose peers come late hold
back nothing. The wait for a stamp is short where ranks that have called make progress: wait, test,
or have a thread for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

#: A number that all ranks have agreed on, and one that tells apart those who got the same.
Stamp = tuple[int, int]


@dataclass(eq=False)
class Ticket:
    """One call in the order of one process.

    Attributes:
        proposed: the lowest number that its stamp can have.
        stamp: its place in the order, once all ranks have agreed.
        step: moves the call on without waiting; for others, which it holds back.
    """

    proposed: int
    step: Callable[[], object]
    name: str
    stamp: Stamp | None = None


class LaunchOrder:
    """The calls of one process that wait to be launched.

    Args:
        process: number of this process, of all that may ever share a call with it.
    """

    def __init__(self, process: int) -> None:
        self._unique = process << 40
        self._clock = 0
        self._waiting: list[Ticket] = []
        # Threads step calls on different communicators at the same time.
        self._lock = threading.Lock()

    def unique(self) -> int:
        """A number > 0 that no process has given before."""
        with self._lock:
            self._unique += 1
            return self._unique

    def propose(self, step: Callable[[], object], name: str = "") -> Ticket:
        """Take part in a call all of whose ranks are there."""
        with self._lock:
            self._clock += 1
            ticket = Ticket(self._clock, step, name)
            self._waiting.append(ticket)
            return ticket

    def settle(self, ticket: Ticket, stamp: Stamp) -> None:
        """All ranks have agreed on a stamp."""
        with self._lock:
            self._clock = max(self._clock, stamp[0])
            ticket.stamp = stamp

    def is_next(self, ticket: Ticket) -> bool:
        """It may be launched now; else what holds it back is moved on."""
        before = self.holds_back(ticket)
        if before is not None and before is not ticket:
            # It may be on a communicator on which nobody waits now.
            before.step()
        return before is None

    def holds_back(self, ticket: Ticket) -> Ticket | None:
        """What must be launched first; itself where it has no stamp; None where it is its turn."""
        mine = ticket.stamp
        if mine is None:
            return ticket
        with self._lock:
            for other in self._waiting:
                if other is not ticket and (other.stamp or (other.proposed, 0)) < mine:
                    return other
        return None

    def leave(self, ticket: Ticket) -> None:
        """It has been launched, or given up. Idempotent."""
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
