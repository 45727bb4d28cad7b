"""The last rank's process ends in the middle of a test."""

from __future__ import annotations

import os
import time


def test_process_ends(comm):
    comm.Barrier()
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
        os._exit(3)
    comm.Barrier()
