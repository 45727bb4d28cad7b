"""The rank's half of the guard in mpi_guard.py: runs in every process that the guard starts.

    python tests/mpi_rank.py program.py ...        python tests/mpi_rank.py -m module ...

Before anything else (MPI_Init may hang as well) a rank leaves its process id in the run directory,
and makes SIGUSR1 write the stacks of all its threads to a file there: faulthandler does that inside
the signal handler, so it works in a process that is stuck in C. Then it runs the program. What
happens is told in one file of events per rank (JSON lines), which the guard follows.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

RUN_DIR = "XMESH_TEST_RUN_DIR"  # set by the guard
QUIET = "XMESH_TEST_QUIET"  # "1": ranks other than 0 write to a log file
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


def start_time(pid: int) -> str:
    """When a process started, so that a reused process id is not taken for ours; "" if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def from_launcher(variables: tuple[str, ...]) -> int | None:
    """What the MPI launcher says in the first of these variables that is set."""
    return next((int(os.environ[name]) for name in variables if name in os.environ), None)


class RankFiles:
    """What one rank writes into the run directory, and what it reads of the others."""

    def __init__(self, run_dir: Path, rank: int, size: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self.size = size
        self.done = 0

    def emit(self, event: str, **fields: Any) -> None:
        with open(self.run_dir / f"rank-{self.rank}.events", "a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    def count_done(self) -> None:
        """One byte for each test that is over, so that a size says how far a rank has come."""
        self.done += 1
        with open(self.run_dir / f"rank-{self.rank}.done", "a") as file:
            file.write(".")

    def all_as_far(self) -> bool:
        for rank in range(self.size):
            path = self.run_dir / f"rank-{rank}.done"
            if not path.exists() or path.stat().st_size < self.done:
                return False
        return True


def rank_files() -> RankFiles | None:
    """The files of this rank; None where no guard started it."""
    run_dir, rank, size = (
        os.environ.get(RUN_DIR),
        from_launcher(RANK_VARIABLES),
        from_launcher(SIZE_VARIABLES),
    )
    if run_dir is None or rank is None or size is None:
        return None
    return RankFiles(Path(run_dir), rank, size)


class GuardedRank:
    """Pytest plugin: tells the guard what is collected, what starts and how it ends."""

    def __init__(self, files: RankFiles) -> None:
        self.files = files
        self.outcome = "passed"
        self.text = ""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        for plugin in session.config.pluginmanager.get_plugins():
            if hasattr(
                plugin, "_is_testing_mpi"
            ):  # pytest-mpi: only turns its page of MPI details off
                plugin._is_testing_mpi = False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.files.emit("collect_error", test=report.nodeid, text=report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.files.emit("collected", tests=[item.nodeid for item in session.items])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        mark = item.get_closest_marker("timeout")
        limit_s = mark.args[0] if mark and mark.args else None
        self.outcome, self.text = "passed", ""
        self.files.emit("start", test=item.nodeid, limit_s=limit_s)
        result = yield
        self.files.emit("finish", test=item.nodeid, outcome=self.outcome, text=self.text)
        self.files.count_done()
        if self.outcome == "failed":
            # This rank may have left the test early, with the others still inside a collective of
            # it. To go on would match the next test's messages with this one's. So it waits until
            # all are out of the test; where that takes too long, the guard prints the stacks and
            # ends the run.
            while not self.files.all_as_far():
                time.sleep(0.02)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcome = "failed"
            self.text += f"[{report.when}] {report.longreprtext}\n"
            for name, content in report.sections:
                self.text += f"--- {name}\n{content}\n"
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.files.emit("end", status=int(exitstatus))


class AbortOnFailure:
    """Pytest plugin for ranks started by hand, `mpiexec -n 4 python -m pytest --with-mpi`.

    The others may wait for the failed rank for ever, so it prints its report and ends them all.
    """

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            from mpi4py import MPI

            rank = MPI.COMM_WORLD.rank
            print(
                f"\nrank {rank}: {report.nodeid}\n{report.longreprtext}",
                file=sys.stderr,
                flush=True,
            )
            MPI.COMM_WORLD.Abort(1)


def plugin_for(config: pytest.Config) -> GuardedRank | AbortOnFailure | None:
    """The plugin that suits the way this process was started."""
    if not config.getoption("--with-mpi", False):
        return None
    files = rank_files()
    if files is not None:
        return GuardedRank(files)
    return AbortOnFailure() if (from_launcher(SIZE_VARIABLES) or 1) > 1 else None


def main() -> None:
    files = rank_files()
    if files is not None:
        stack = open(files.run_dir / f"rank-{files.rank}.stack", "w")  # noqa: SIM115 - lives as long as the process
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        files.emit("begin", pid=os.getpid(), start_time=start_time(os.getpid()))
        temporary = files.run_dir / f"rank-{files.rank}.tmp"
        temporary.mkdir()
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(
            temporary
        )  # pytest's tmp_path: one tree per rank, no races
        if files.rank and os.environ.get(QUIET) == "1":
            log = os.open(files.run_dir / f"rank-{files.rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
    if sys.argv[1] == "-m":
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        del sys.argv[0]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
