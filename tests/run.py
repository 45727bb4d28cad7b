"""The one test command: lint, types, unit tests, then the MPI tests on several numbers of ranks.

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
UNIT_TEST_TIMEOUT_S = 120
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


def unit_tests(totals: Totals, extra: Sequence[str]) -> bool:
    """Everything that needs one process."""
    with tempfile.TemporaryDirectory(prefix="xmesh-unit-") as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not mpi", "--ignore=tests/mpi"]
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
    command = ["-m", "pytest", "-q", "--with-mpi", "-m", "mpi", "--no-summary"]
    command += ["-p", "no:cacheprovider", "-p", "no:timeout", "tests/mpi", *extra]
    result = mpi_guard.run_mpi(n, command, timeout_s)
    totals.add(result.passed, result.failed, result.skipped)
    return result.ok or (result.empty and bool(extra))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run xmesh's checks and tests.", epilog="-- ARGS: to pytest"
    )
    parser.add_argument("--only", choices=["lint", "unit", "mpi"], help="this part alone")
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
        ("unit", "unit tests", lambda: unit_tests(totals, extra)),
    ]
    for n in (int(word) for word in options.ranks.split(",")):
        name = f"MPI tests, {n} rank{'s' if n > 1 else ''}"
        steps.append(("mpi", name, partial(mpi_tests, n, options.timeout, totals, extra)))

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


def split_at(words: list[str], mark: str) -> tuple[list[str], str, list[str]]:
    """Like str.partition, for a list."""
    at = words.index(mark) if mark in words else len(words)
    return words[:at], mark, words[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
