"""Waits that leave the cores to those who are still at work.

MPI's own waits spin: where there are more ranks than cores, those that wait take the time of those
that move bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

#: Between two looks, as long as the package's own waits sleep.
POLL_S = 50e-6


def quiet_barrier(comm: MPI.Intracomm, longest_poll_s: float = POLL_S) -> None:
    """A barrier; looks less and less often, up to every ``longest_poll_s`` seconds."""
    _poll(comm.Ibarrier().Test, longest_poll_s)


def quiet_wait(requests: Sequence[MPI.Request]) -> None:
    """Wait for requests, all of them."""
    from mpi4py import MPI

    pending = list(requests)
    _poll(lambda: MPI.Request.Testall(pending), POLL_S)


def _poll(done: Callable[[], bool], longest_poll_s: float) -> None:
    poll_s = POLL_S
    while not done():
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, longest_poll_s)
