"""A call of a benchmark that is recorded, apart from those that are timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xmesh.bench.waiting import quiet_barrier
from xmesh.planner import Plan

if TYPE_CHECKING:
    from mpi4py import MPI


def record(comm: MPI.Intracomm, made: Plan, path: str) -> None:
    """Reshard once more and write what happened as a Chrome trace; all ranks call it.

    Args:
        comm: the ranks of the plan, perhaps among others.
        made: the plan; each rank holds one box at the most, as in all layouts on meshes.
        path: the file.

    Raises:
        OptionError: it cannot be written.
    """
    from xmesh.resharder import Resharder
    from xmesh.trace import Trace

    local, out = (
        np.zeros(boxes[0].shape, made.dtype) if (boxes := layout.boxes(comm.rank)) else None
        for layout in (made.src, made.dst)
    )
    trace = Trace(comm)
    with Resharder(made, comm, trace=trace) as resharder:
        # The ranks agree, and connections are made, in a call before.
        for _ in range(2):
            quiet_barrier(comm)  # to begin together
            resharder(local, out)
            quiet_barrier(comm, longest_poll_s=5e-3)
    trace.write(path)


def path_of_case(path: str, number: int | str, count: int) -> str:
    """The file of one case: the one asked for, with the case in its name where there are several.

    Args:
        path: what was asked for.
        number: number or name of the case.
        count: cases that there are.
    """
    if count == 1:
        return path
    file = Path(path)
    return str(file.with_name(f"{file.stem}-case{number}{file.suffix}"))
