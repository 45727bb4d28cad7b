"""Emulated clusters need Linux, root and iproute2; without, tests are skipped, but never in CI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xmesh.cluster import EmulatedCluster
from xmesh.errors import XmeshError

ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: starts an emulated cluster (needs root, iproute2)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.name != "test_pure.py":
            item.add_marker("cluster")


@pytest.fixture(scope="session")
def lack() -> str:
    """What this machine lacks, be it a tool or something in its kernel; "" if nothing."""
    try:
        with EmulatedCluster(1, 1e9, nics_per_host=2):
            return ""
    except XmeshError as error:
        return str(error)


@pytest.fixture(autouse=True)
def _able(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cluster"):
        need(request.getfixturevalue("lack"))


def need(missing: str) -> None:
    """Skip the test where something is missing; in CI that is a failure."""
    if missing and os.environ.get("CI") == "true":
        pytest.fail(missing, pytrace=False)
    if missing:
        pytest.skip(missing)


@pytest.fixture
def environment() -> dict[str, str]:
    """For ranks and commands: they find this xmesh, installed or not."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}
