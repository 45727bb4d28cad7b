"""A real Slurm on this machine; without it tests are skipped, but never in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from xmesh.cluster import LocalSlurm
from xmesh.mpiexec import Launcher

ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm: starts a local Slurm (needs slurm-wlm, munge)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slurm")


def need(missing: str) -> None:
    """Skip the test where something is missing; in CI that is a failure."""
    if missing and os.environ.get("CI") == "true":
        pytest.fail(missing, pytrace=False)
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For ranks: they find this xmesh, installed or not, and share the cores."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def able() -> None:
    """This machine can run a Slurm."""
    need(LocalSlurm.missing())


@pytest.fixture(scope="session")
def slurm(able: None) -> Iterator[LocalSlurm]:
    with LocalSlurm(num_nodes=4, cpus_per_node=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def mpi_type(slurm: LocalSlurm) -> str:
    """What srun calls the protocol that this environment's MPI speaks."""
    if not Launcher.find().open_mpi:
        return "pmi2"
    if slurm.run(["srun", "--mpi=pmix", "true"], timeout_s=60).status:
        need("Open MPI under srun needs Slurm's PMIx plugin; apt-get install libpmix-dev")
    return "pmix"
