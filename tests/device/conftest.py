"""Tests of device memory: on the double of CuPy, or with XMESH_TEST_GPU=1 on a real GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import mpi_rank
import pytest

DOUBLE = Path(__file__).resolve().parent.parent / "double"
ON_GPU = os.environ.get("XMESH_TEST_GPU") == "1"

# Before any test module is imported, so that `import cupy` at its top finds the double, which reads
# its environment then.
if not ON_GPU:
    sys.path.insert(0, str(DOUBLE))
    # Who waits by looking again and again must let the thread run that stands for the GPU.
    sys.setswitchinterval(1e-4)
    run_dir = os.environ.get(mpi_rank.RUN_DIR)
    if run_dir is not None:  # a rank: with a GPU of its own, and what all ranks of the run share
        rank = mpi_rank.from_launcher(mpi_rank.RANK_VARIABLES) or 0
        os.environ["DOUBLE_PCI_DOMAIN"] = str(rank)
        os.environ["DOUBLE_NCCL_SOCKET"] = f"{run_dir}/nccl"
        os.environ["DOUBLE_CACHE"] = f"{run_dir}/kernels"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "double_only: needs the double of CuPy, not a real GPU")


@pytest.fixture(autouse=True)
def _the_cupy_that_is_meant(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("double_only") is None:
        return
    if ON_GPU:
        pytest.skip("XMESH_TEST_GPU=1 asks for the real GPU, and this is about the double")
    import cupy

    assert DOUBLE in Path(cupy.__file__).parents, f"{cupy.__file__} is not the double"
