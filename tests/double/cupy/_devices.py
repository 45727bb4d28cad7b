"""How many devices there are, and which one each thread uses."""

from __future__ import annotations

import threading

from cupy import _settings
from cupy._errors import CUDARuntimeError

_of_thread = threading.local()
#: Devices on which this process has what CUDA keeps for it: from 12 on, those ever made current.
contexts: set[int] = set()


def count() -> int:
    if _settings.DEVICES == 0:
        raise CUDARuntimeError(100)
    return _settings.DEVICES


def check(device: int) -> int:
    if not 0 <= device < count():
        raise CUDARuntimeError(101)
    return device


def current() -> int:
    count()
    return getattr(_of_thread, "device", 0)


def make_current(device: int) -> None:
    _of_thread.device = check(device)
    contexts.add(device)


def push(device: int) -> None:
    """Make a device current until ``pop``."""
    before = current()
    make_current(device)
    _of_thread.__dict__.setdefault("before", []).append(before)


def pop() -> None:
    make_current(_of_thread.before.pop())
