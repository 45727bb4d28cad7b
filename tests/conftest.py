"""Shared by all tests: MPI ranks under the guard, Hypothesis profiles, a communicator per test."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import mpi_rank
import pytest

if TYPE_CHECKING:
    from mpi4py import MPI

HERE = Path(__file__).parent
MPI_TESTS = (HERE / "mpi", HERE / "device" / "mpi", HERE / "guard_cases")

# Ranks that draw different examples wait for each other for ever, so every profile is
# deterministic and none reads the example database. An MPI property must also agree on its verdict
# (an allreduce before the assert): then all ranks fail, shrink and replay together.
hypothesis.settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow
    ],  # judged by the clock, so not alike on all ranks
)
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("default"), max_examples=2000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


#: Libraries of the extra `dev` without which tests skip: in CI that would hide them.
OPTIONAL = ("matplotlib", "ml_dtypes", "mpi4py")


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control has what it starts in the background ignore Ctrl-C, and so would
    # the commands that tests interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("CI") == "true":
        raise pytest.UsageError(f"in CI nothing may be skipped for want of {', '.join(missing)}")
    # pytest-timeout cannot interrupt a rank that waits in C; under MPI the guard reads its marker
    # instead.
    config.addinivalue_line(
        "markers", "timeout(seconds): limit of this test (under MPI: kept by the guard)"
    )
    plugin = mpi_rank.plugin_for(config)
    if plugin is not None:
        config.pluginmanager.register(plugin, "xmesh-mpi-rank")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """MPI tests are those under MPI_TESTS; the marker follows from the place."""
    for item in items:
        if any(folder in item.path.parents for folder in MPI_TESTS):
            item.add_marker("mpi")
        elif item.get_closest_marker("mpi"):
            raise pytest.UsageError(
                f"{item.nodeid}: MPI tests belong under tests/mpi/ or tests/device/mpi/, where "
                "ranks run them"
            )


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """A duplicate of the world for this test alone: no other test's message can match."""
    from mpi4py import MPI

    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file of ``golden/`` beside the test.

    XMESH_WRITE_GOLDEN=1 writes it instead.
    """

    def compare(name: str, text: str) -> None:
        path = request.path.parent / "golden" / name
        if os.environ.get("XMESH_WRITE_GOLDEN") == "1":
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"differs from {path.name}; is the change meant?"

    return compare
