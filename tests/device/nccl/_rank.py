"""One rank of a test of NCCL's double: runs the program on its standard input, with these helpers.

Ranks meet by files in a folder, so nothing here depends on what is tested.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy import _double_nccl as _double_nccl  # for the programs
from cupy import _engine
from cupy.cuda import nccl

RANK = int(os.environ["DOUBLE_RANK"])
SIZE = int(os.environ["RANKS"])
FOLDER = Path(os.environ["FOLDER"])
FLOAT = nccl.NCCL_FLOAT32

_kept: list[Any] = []


def say(*values: Any) -> None:
    print(*values, flush=True)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def meet(name: str, ranks: int = SIZE) -> None:
    """Wait until so many ranks have come here."""
    (FOLDER / f"{name}.{RANK}").touch()
    while len(list(FOLDER.glob(f"{name}.*"))) < ranks:
        time.sleep(0.002)


def unique(name: str, first: int = 0) -> Any:
    """An id that one rank gets and all have."""
    path = FOLDER / f"{name}-id"
    if first == RANK:
        path.with_suffix(".part").write_text(repr(nccl.get_unique_id()))
        path.with_suffix(".part").rename(path)
    wait_for(path)
    return eval(path.read_text())


def communicator(name: str = "world", ranks: list[int] | None = None) -> Any:
    """A communicator of some ranks, or all."""
    ranks = list(range(SIZE)) if ranks is None else ranks
    return nccl.NcclCommunicator(len(ranks), unique(name, ranks[0]), ranks.index(RANK))


class Buffer:
    """Some floats on the device."""

    def __init__(self, *values: float) -> None:
        self.memory = cupy.cuda.alloc(4 * len(values))
        self.ptr = self.memory.ptr
        self.size = len(values)
        _kept.append(self)
        self.view()[:] = values

    def view(self) -> Any:
        return _engine.host_view(self.ptr, 4 * self.size).view(np.float32)

    def values(self) -> list[float]:
        return [float(value) for value in self.view()]


class Gate(_engine.Work):  # type: ignore[misc, unused-ignore]
    """Work in a stream that ends when the test says so."""

    label = "gate"
    is_open = False

    def start(self) -> None:
        pass

    def poll(self) -> bool:
        return self.is_open

    def open(self) -> None:
        self.is_open = True
        _engine.wake()


def stream() -> Any:
    made = cupy.cuda.Stream(non_blocking=True)
    _kept.append(made)
    return made


def fate(on: Any, limit_s: float = 5.0) -> str:
    """How the work in a stream ends: "done", "hangs" or the error."""
    end_s = time.monotonic() + limit_s
    try:
        while not on.done:
            if time.monotonic() > end_s:
                return "hangs"
            time.sleep(0.002)
    except Exception as error:
        return f"fails: {error}"
    return "done"


def attempt(function: Callable[..., Any], *args: Any) -> str:
    """What comes of a call."""
    try:
        return f"returns {function(*args)}"
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'status', '')}: {error}"


def until_broken(comm: Any) -> str:
    """Ask for an asynchronous error until there is one."""
    end_s = time.monotonic() + 5
    while time.monotonic() < end_s:
        result = attempt(comm.check_async_error)
        if result != "returns None":
            return result
        time.sleep(0.002)
    return "no error"


if __name__ == "__main__":
    program = sys.stdin.read()
    exec(compile(program, "scenario", "exec"), globals())
