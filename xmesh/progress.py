"""Progress: everything in flight in this process moves on whenever anyone waits.

A rank that waits for one transfer may be the relay of another, so a wait steps them all; also those
on other communicators, for another rank may wait for those first.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from xmesh.errors import OptionError, XmeshError, explain
from xmesh.wait_policy import Pause


def seconds(timeout_s: object) -> float:
    """A time-out as a number of seconds.

    Raises:
        OptionError: it is not a number >= 0 (infinity is one).
    """
    if isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool) and timeout_s >= 0:
        return float(min(timeout_s, 1e9))  # three decades; some clocks know no infinity
    raise OptionError(
        explain(
            "a time-out must be a number of seconds >= 0",
            values=f"timeout_s={timeout_s!r}",
            remedy="pass for example timeout_s=60",
        )
    )


class Steppable(Protocol):
    """Something in flight."""

    @property
    def over(self) -> bool:
        """Done, or failed."""

    def step(self) -> bool:
        """Move on without waiting; True when anything happened."""


class Siblings:
    """Every ``Progress`` of one process, for as long as it is used; threads may look and join."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[Progress] = weakref.WeakSet()

    def join(self, progress: Progress) -> None:
        """One more."""
        with self._lock:
            self._all.add(progress)

    def all(self) -> tuple[Progress, ...]:
        """Those that there are now."""
        with self._lock:
            return tuple(self._all)


class Progress:
    """What is in flight on one communicator, and the loop that waits for it.

    Args:
        siblings: all of this process, which it joins; None where it is the only one.

    Attributes:
        lock: held while anything in flight is looked at or changed. A thread may move transfers on
            while another one computes, and starts some of its own in between.
    """

    def __init__(self, siblings: Siblings | None = None) -> None:
        self.lock = threading.RLock()
        self._siblings = Siblings() if siblings is None else siblings
        self._siblings.join(self)
        self._active: list[Steppable] = []

    def add(self, item: Steppable) -> None:
        """Move it on, too, from now on."""
        with self.lock:
            self._active.append(item)

    def remove(self, item: Steppable) -> None:
        """Leave it alone from now on."""
        with self.lock:
            self._active.remove(item)

    def step(self) -> bool:
        """Move everything on once; True when anything happened."""
        moved = False
        with self.lock:
            for item in tuple(self._active):
                moved |= item.step()
        return moved

    def wait(
        self,
        item: Steppable,
        timeout_s: float,
        give_up: Callable[[], XmeshError],
        pause: Pause | None,
    ) -> None:
        """Step until something is over.

        Args:
            item: what is waited for.
            timeout_s: seconds from now after which to give up.
            give_up: cleans up and returns the error to raise.
            pause: what to do between two looks, see ``xmesh.wait_policy``; None where every rank
                lives in this process, so that when nothing moves nothing ever will.
        """
        deadline = time.monotonic() + timeout_s
        idle = 0
        while True:
            idle = 0 if self.step() else idle + 1
            if item.over:
                return
            # Also while something moves: that may be another transfer, without end.
            if time.monotonic() > deadline or (pause is None and idle > 10_000):
                with self.lock:
                    raise give_up()
            if idle and pause is not None and not self._step_others():
                pause(idle)

    def _step_others(self) -> bool:
        """Move on what is in flight on other communicators, unless another thread does."""
        moved = False
        for other in self._siblings.all():
            if other is not self and other._active and other.lock.acquire(blocking=False):
                try:
                    moved |= other.step()
                finally:
                    other.lock.release()
        return moved
