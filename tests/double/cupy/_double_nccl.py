"""What tests ask of the double of NCCL, and how they make it fail. Nothing of this is in CuPy."""

from __future__ import annotations

from cupy.cuda import nccl
from cupy.cuda._faults import Faults, counts, faults
from cupy.cuda._link import any_link


def violations() -> list[str]:
    """All violations of the run so far, on all ranks."""
    link = any_link()
    return list(nccl._violations_alone) + (link.ask("report") if link else [])


def created() -> int:
    """Communicators that this process has made."""
    return counts.created


def live() -> int:
    """Communicators of this process that are neither destroyed nor aborted."""
    nccl._destroy_deserted()
    return counts.created - counts.freed


def launches() -> int:
    """Operations that this process has launched; a group is one."""
    return counts.launches


def fail_unique_id(times: int = 1) -> None:
    """Make the next calls of get_unique_id fail."""
    faults.unique_ids = times


def fail_creation(rank: int, silent: bool = False) -> None:
    """Make a communicator's rank fail when it is created here.

    The other ranks get an error; with `silent` they wait for ever.
    """
    faults.creation, faults.silent = rank, silent


def delay_creation(rank: int, seconds: float) -> None:
    """Make a communicator's rank come late to its creation here."""
    faults.late, faults.late_s = rank, seconds


def fail_checks_after(calls: int, status: int = 3) -> None:
    """Make check_async_error fail after some more calls."""
    faults.checks, faults.status = calls, status


def no_faults() -> None:
    """Take back all failures, those of the environment, too."""
    vars(faults).update(vars(Faults()))
