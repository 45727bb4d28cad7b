"""Waits that leave the cores to those who are still at work.

MPI's own waits spin: where there are more ranks than cores, those that wait take the time of those
that move bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xmesh.clocks import wait_quietly

if TYPE_CHECKING:
    from mpi4py import MPI

#: Between two looks.
POLL_S = 50e-6


def quiet_barrier(comm: MPI.Intracomm, longest_poll_s: float = POLL_S) -> None:
    """A barrier; looks less and less often, up to every ``longest_poll_s`` seconds."""
    wait_quietly(comm.Ibarrier(), longest_sleep_s=longest_poll_s)


def quiet_wait(requests: Sequence[MPI.Request]) -> None:
    """Wait for requests, all of them."""
    from mpi4py import MPI

    pending = list(requests)
    while not MPI.Request.Testall(pending):
        time.sleep(POLL_S)
