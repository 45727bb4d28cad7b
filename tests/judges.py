"""Judges of the double of NCCL, as processes; and waiting for what happens to them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def judges(socket: Path) -> list[int]:
    """Processes of judges at a socket."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(socket) in words:
            found.append(int(folder.name))
    return found


def wait_until(condition: Callable[[], bool], limit_s: float = 3.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)
