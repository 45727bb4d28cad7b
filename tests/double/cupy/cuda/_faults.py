"""Failures that tests ask for, and counts of what a process has done.

Each failure can also be asked for by an environment variable, for ranks whose program is not the
test's own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass
class Faults:
    """What is to go wrong in this process."""

    #: How many more calls of get_unique_id fail.
    unique_ids: int = 0
    #: Rank whose creation fails, and whether the judge is not told: then the others wait for ever.
    creation: int | None = None
    silent: bool = False
    #: Rank whose creation begins late, and how late.
    late: int | None = None
    late_s: float = 0.0
    #: How many more calls of check_async_error succeed, and the status of those after.
    checks: int | None = None
    status: int = 3

    @classmethod
    def of_environment(cls) -> Faults:
        """What the launcher of the run asks for.

        DOUBLE_NCCL_FAIL_ID=TIMES, DOUBLE_NCCL_FAIL_CREATE=RANK or RANK:silent,
        DOUBLE_NCCL_LATE_CREATE=RANK:SECONDS, DOUBLE_NCCL_FAIL_CHECK=CALLS.
        """
        faults = cls(unique_ids=int(os.environ.get("DOUBLE_NCCL_FAIL_ID", "0")))
        if creation := os.environ.get("DOUBLE_NCCL_FAIL_CREATE"):
            rank, _, how = creation.partition(":")
            faults.creation, faults.silent = int(rank), how == "silent"
        if late := os.environ.get("DOUBLE_NCCL_LATE_CREATE"):
            rank, _, seconds = late.partition(":")
            faults.late, faults.late_s = int(rank), float(seconds)
        if checks := os.environ.get("DOUBLE_NCCL_FAIL_CHECK"):
            faults.checks = int(checks)
        return faults


@dataclass
class Counts:
    """What this process has done so far."""

    created: int = 0
    freed: int = 0
    launches: int = 0


faults = Faults.of_environment()
counts = Counts()
