"""What both ends of the judge's socket share. The judge's process imports it without CuPy's double.

Messages are pickled tuples of plain values: the two ends know the modules under different names,
so no class of ours may be in a message.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

#: NCCL's status numbers.
CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = range(
    1, 7
)

#: Bytes of one element, by NCCL's data type.
ITEM_SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}


@contextlib.contextmanager
def door(path: str, wait: bool = True) -> Iterator[bool]:
    """Hold the lock beside a socket; only who holds it may connect, start a judge or end one.

    Gives False where `wait` is false and someone else holds it.
    """
    while True:
        lock = os.open(path + ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            if _is(lock, path + ".lock"):
                yield True
                return
            # A judge has ended and removed the file while we waited: that lock guards nothing.
        finally:
            os.close(lock)


def _is(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def record(violation: str) -> None:
    """Write a violation to where the launcher of the run looks, if it does."""
    name = os.environ.get("DOUBLE_NCCL_REPORT")
    if name:
        with open(name, "a") as report:
            report.write(violation + "\n")
