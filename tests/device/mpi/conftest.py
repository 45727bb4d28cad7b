"""MPI ranks with the double of CuPy, each with a GPU of its own, in one of several runs.

What the double and the MPI library are taken for holds for a whole process, so tests say by a
marker in which runs they are: ``aware``, where MPI takes device pointers; ``cupy13``, with CuPy 13
and an NCCL of its time; without a marker the other one. tests/run.py makes all of them.
"""

from __future__ import annotations

import os

import mpi_rank
import pytest

#: Which run this is.
RUN = os.environ.get("XMESH_DEVICE_RUN", "")
RUNS = ("aware", "cupy13")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "aware: in the run where MPI takes device pointers")
    config.addinivalue_line("markers", "cupy13: in the run with CuPy 13, and without a marker")
    size = mpi_rank.from_launcher(mpi_rank.SIZE_VARIABLES) or 1
    if size > 1 and mpi_rank.rank_files() is None:
        raise pytest.UsageError("ranks of these tests meet in the guard's folder: tests/run.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left: list[pytest.Item] = []
    chosen: list[pytest.Item] = []
    for item in items:
        aware, both = (item.get_closest_marker(run) is not None for run in RUNS)
        mine = aware if RUN == "aware" else both if RUN == "cupy13" else not aware
        (chosen if mine else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = chosen


@pytest.fixture(autouse=True)
def _keeps_the_rules():
    """NCCL's double has nothing to object to, and no device has met an error."""
    yield
    from cupy import _double_nccl, _engine

    _double_nccl.no_faults()
    problem = "; ".join(_double_nccl.violations())
    try:
        _engine.check(0)
    except Exception as error:
        problem += f" device: {error}"
    _engine.forget_error(0)
    assert not problem
