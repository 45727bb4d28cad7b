"""The one test command: lint, types, unit tests, then MPI and device tests on numbers of ranks.

    python tests/run.py                              all of it; stops at the first step that fails
    python tests/run.py --keep-going
    python tests/run.py --only mpi --ranks 2,4 -- -k broadcast

What follows `--` goes to pytest. The last line sums up all pytest runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mpi_guard

ROOT = Path(__file__).resolve().parent.parent
RANKS = "1,2,4,8,16"
#: On each of their ranks a thread stands for a GPU, and looks for work all the time; `--only device
#: --ranks 8` runs them on more.
MOST_DEVICE_RANKS = 4
#: Runs of the MPI tests of devices, see tests/device/mpi/conftest.py: what ranks have in their
#: environment, and on which number of ranks alone, if on one.
DEVICE_RUNS: dict[str, tuple[dict[str, str], int | None]] = {
    "": ({}, None),
    "aware": ({"DOUBLE_CUDA_AWARE": "1", "XMESH_CUDA_AWARE": "1"}, None),
    "cupy13": ({"DOUBLE_CUPY_VERSION": "13.6.0", "DOUBLE_NCCL_VERSION": "22005"}, 4),
}
UNIT_TEST_TIMEOUT_S = 120
# Where pytest is to look. Device tests have a process of their own: there `cupy` is the double.
UNIT = ("--ignore=tests/mpi", "--ignore=tests/device")
DEVICE = ("--ignore=tests/device/mpi", "tests/device")
NO_TESTS = 5  # pytest's exit status


@dataclass
class Totals:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, passed: int, failed: int, skipped: int) -> None:
        self.passed += passed
        self.failed += failed
        self.skipped += skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def tool(*argv: str) -> bool:
    """Run a module of this environment."""
    return (
        subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, stdin=subprocess.DEVNULL).returncode
        == 0
    )


def unit_tests(totals: Totals, extra: Sequence[str], *places: str) -> bool:
    """Everything that needs one process."""
    with tempfile.TemporaryDirectory(prefix="xmesh-unit-") as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not mpi", *places]
        command += [f"--timeout={UNIT_TEST_TIMEOUT_S}", f"--junitxml={junit}", *extra]
        status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
        if junit.exists():
            for suite in ElementTree.parse(junit).getroot().iter("testsuite"):
                tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
                failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
                totals.add(max(0, tests - failed - skipped), failed, skipped)
        elif status:
            totals.add(0, 1, 0)
    return status == 0 or (status == NO_TESTS and bool(extra))


def mpi_tests(n: int, timeout_s: float, totals: Totals, extra: Sequence[str]) -> bool:
    """The tests under tests/mpi/ on n ranks; the guard prints failures and keeps the limits."""
    return _on_ranks(n, timeout_s, totals, extra, "tests/mpi", {})


def device_tests(n: int, timeout_s: float, totals: Totals, extra: Sequence[str], run: str) -> bool:
    """Those under tests/device/mpi/, of one of DEVICE_RUNS."""
    environment = {**DEVICE_RUNS[run][0], "XMESH_DEVICE_RUN": run}
    return _on_ranks(n, timeout_s, totals, extra, "tests/device/mpi", environment)


def _on_ranks(
    n: int,
    timeout_s: float,
    totals: Totals,
    extra: Sequence[str],
    place: str,
    environment: dict[str, str],
) -> bool:
    command = ["-m", "pytest", "-q", "--with-mpi", "-m", "mpi", "--no-summary"]
    command += ["-p", "no:cacheprovider", "-p", "no:timeout", place, *extra]
    result = mpi_guard.run_mpi(n, command, timeout_s, environment)
    totals.add(result.passed, result.failed, result.skipped)
    return result.ok or (result.empty and bool(extra))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run xmesh's checks and tests.", epilog="-- ARGS: to pytest"
    )
    parser.add_argument("--only", choices=["lint", "unit", "mpi", "device"], help="this part alone")
    parser.add_argument(
        "--ranks", default=RANKS, help=f"numbers of ranks for the MPI tests ({RANKS})"
    )
    parser.add_argument(
        "--timeout", type=float, default=600, help="limit of one MPI run in seconds (600)"
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a step that failed")
    own, _, extra = split_at(sys.argv[1:], "--")
    options = parser.parse_args(own)
    mpi_guard.interrupt_on_sigterm()

    totals = Totals()
    steps: list[tuple[str, str, Callable[[], bool]]] = [
        ("lint", "ruff check", lambda: tool("ruff", "check", "--quiet")),
        ("lint", "ruff format", lambda: tool("ruff", "format", "--check", "--quiet")),
        ("lint", "mypy", lambda: tool("mypy")),
        ("unit", "unit tests", lambda: unit_tests(totals, extra, *UNIT)),
    ]
    numbers = [int(word) for word in options.ranks.split(",")]
    for n in numbers:
        over_mpi = partial(mpi_tests, n, options.timeout, totals, extra)
        steps.append(("mpi", f"MPI tests, {_ranks(n)}", over_mpi))
    steps.append(("device", "device tests", lambda: unit_tests(totals, extra, *DEVICE)))
    # A number that was asked for alone is meant.
    few = [n for n in numbers if n <= MOST_DEVICE_RANKS] or numbers
    for run, (_, only) in DEVICE_RUNS.items():
        for n in few:
            if only in (None, n):
                on_ranks = partial(device_tests, n, options.timeout, totals, extra, run)
                name = f"MPI tests of devices{f' ({run})' if run else ''}, {_ranks(n)}"
                steps.append(("device", name, on_ranks))

    failed = []
    began = time.monotonic()
    for part, name, step in steps:
        if options.only not in (None, part):
            continue
        print(f"== {name}", flush=True)
        step_began = time.monotonic()
        ok = step()
        print(
            f"== {name}: {'ok' if ok else 'FAILED'}, {time.monotonic() - step_began:.1f} s\n",
            flush=True,
        )
        if not ok:
            failed.append(name)
            if not options.keep_going:
                break
    print(
        "FAILED: " + ", ".join(failed) if failed else "all ok",
        f"in {time.monotonic() - began:.0f} s",
    )
    print(totals, flush=True)
    return 1 if failed else 0


def _ranks(n: int) -> str:
    return f"{n} rank{'s' if n > 1 else ''}"


def split_at(words: list[str], mark: str) -> tuple[list[str], str, list[str]]:
    """Like str.partition, for a list."""
    at = words.index(mark) if mark in words else len(words)
    return words[:at], mark, words[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
