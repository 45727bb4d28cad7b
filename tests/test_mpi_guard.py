"""The guard itself, on programs under guard_cases/ that go wrong: what it prints and leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import mpi_guard
import pytest

HERE = Path(__file__).parent
GUARD = [sys.executable, str(HERE / "mpi_guard.py")]
PYTEST = ["-m", "pytest", "-q", "--with-mpi", "-m", "mpi", "--no-summary", "-p", "no:cacheprovider"]
PYTEST += ["-p", "no:timeout"]


def mpi_is_here():
    try:
        import mpi4py  # noqa: F401

        mpi_guard.Launcher.find()
    except (ImportError, FileNotFoundError):
        return False
    return True


pytestmark = [
    pytest.mark.skipif(not mpi_is_here(), reason="needs mpi4py and mpiexec"),
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"
    ),
]


@pytest.fixture
def environment(tmp_path):
    """Lets the guard make its run directory in tmp_path, by which its processes can be told."""
    yield {**os.environ, "TMPDIR": str(tmp_path), "XMESH_TEST_GRACE_S": "1"}
    assert mpi_guard.processes_of(tmp_path) == []
    assert list(tmp_path.glob("xmesh-run-*")) == []


def guarded(environment, n, timeout_s, *argv):
    """What the guard prints about a run that must fail, and how long it took."""
    began = time.monotonic()
    run = subprocess.run(
        [*GUARD, "-n", str(n), "--timeout", str(timeout_s), "--", *argv],
        env=environment,
        cwd=HERE.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 1, run.stdout
    return run.stdout, time.monotonic() - began


def case(name):
    return str(HERE / "guard_cases" / name)


def test_hanging_program_is_cut_and_shows_all_stacks(environment):
    output, elapsed_s = guarded(environment, 2, 6, case("hang.py"))
    assert 6 < elapsed_s < 90  # cut by the limit, not by the end of a longer wait
    assert "the run did not end within 6 s" in output
    first, second = output.split("--- rank ")[1:]
    assert first.startswith("0\n")
    assert "in wait_for_a_message_nobody_sends" in first
    assert second.startswith("1\n")
    assert "in wait_for_rank_zero" in second
    segments = re.findall(r"^segment (\S+)$", output, re.MULTILINE)
    assert segments, "the MPI shares memory between the ranks of a host"
    assert not [name for name in segments if os.path.exists(name)]


def test_hanging_test_is_cut_by_its_own_limit(environment):
    output, elapsed_s = guarded(environment, 2, 60, *PYTEST, case("rank_hangs_in_test.py"))
    assert elapsed_s < 55  # well before the limit of 60 s for the whole run
    assert "test_hangs within 4 s" in output
    assert "--- rank 0, rank 1\n" in output
    assert "in wait_inside_the_test" in output


def test_failure_of_one_rank_is_printed_and_frees_the_others(environment):
    output, elapsed_s = guarded(environment, 3, 60, *PYTEST, case("one_rank_fails.py"))
    assert elapsed_s < 55  # well before the limit of 60 s for the whole run
    assert "*** rank 2 failed" in output
    assert "ValueError: a deliberate failure" in output
    assert "after 1 s ranks 0, 1 had not ended it" in output
    assert "in enter_the_barrier" in output


def test_failure_on_all_ranks_does_not_end_the_run(environment):
    output, _ = guarded(environment, 3, 60, *PYTEST, case("all_ranks_fail.py"))
    assert "1 failed, 1 passed" in output
    assert output.count("AssertionError: a deliberate failure") == 1
    assert output.count("in the same way") == 2


def test_ranks_must_collect_the_same_tests(environment):
    output, _ = guarded(environment, 2, 60, *PYTEST, case("unequal.py"))
    assert "ranks collected different tests: rank 0 has 1, rank 1 has 2" in output
    assert "test_numbered[1]" in output


def test_rank_that_dies_fails_the_run(environment):
    output, elapsed_s = guarded(environment, 2, 60, *PYTEST, case("rank_dies.py"))
    assert elapsed_s < 55  # well before the limit of 60 s for the whole run
    assert "ended early, in " in output
    assert "test_process_ends" in output


def test_ending_the_guard_ends_its_ranks(environment, tmp_path):
    guard = subprocess.Popen(
        [*GUARD, "-n", "2", "--timeout", "60", case("hang.py")],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while len(mpi_guard.processes_of(tmp_path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(mpi_guard.processes_of(tmp_path)) >= 3, "mpiexec and two ranks"
    finally:
        guard.terminate()
        assert guard.wait(timeout=30) == 128 + 15


def test_other_mpi_is_told_by_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for answer, vendor in (
        ("mpiexec (OpenRTE) 4.1.4", "Open MPI"),
        ("HYDRA build details:", "MPICH"),
    ):
        fake = tmp_path / "mpiexec"
        fake.write_text(f"#!/bin/sh\necho '{answer}'\n")
        fake.chmod(0o755)
        assert mpi_guard.Launcher.find().vendor == vendor
    assert "--oversubscribe" in mpi_guard.Launcher("mpiexec", "Open MPI").command(2, ["x.py"])
    assert "--oversubscribe" not in mpi_guard.Launcher("mpiexec", "MPICH").command(2, ["x.py"])
