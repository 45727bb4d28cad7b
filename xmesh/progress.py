"""Progress: everything in flight on one communicator moves on whenever anyone waits.

A rank that waits for one transfer may be the relay of another, so a wait steps them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from xmesh.errors import OptionError, XmeshError, explain

#: Idle looks after which a wait sleeps in place of only yielding the core.
_YIELDS = 100
_SLEEP_S = 50e-6


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

    def step(self) -> bool:
        """Move on without waiting; True when anything happened."""


class Progress:
    """What is in flight, and the loop that waits for it.

    Args:
        all_here: every rank lives in this process, so when nothing moves nothing ever will.
    """

    def __init__(self, all_here: bool = False) -> None:
        self.active: list[Steppable] = []
        self._all_here = all_here

    def step(self) -> bool:
        """Move everything on once; True when anything happened."""
        moved = False
        for item in list(self.active):
            moved |= item.step()
        return moved

    def wait(
        self, done: Callable[[], bool], timeout_s: float, give_up: Callable[[], XmeshError]
    ) -> None:
        """Step until ``done()``.

        Args:
            done: what is waited for.
            timeout_s: seconds from now after which to give up.
            give_up: cleans up and returns the error to raise.
        """
        deadline = time.monotonic() + timeout_s
        idle = 0
        while not done():
            idle = 0 if self.step() else idle + 1
            if done():
                break
            # Also while something moves: that may be another transfer, without end.
            if time.monotonic() > deadline or (self._all_here and idle > 10_000):
                raise give_up()
            if idle == 0:
                continue
            # More ranks than cores is common: whoever waits must not keep a core from who works.
            if not self._all_here:
                time.sleep(0 if idle < _YIELDS else _SLEEP_S)
