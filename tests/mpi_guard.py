"""Runs MPI programs under limits, and shows what every rank was doing when a limit is hit.

    python tests/mpi_guard.py -n 4 --timeout 60 program.py arguments
    python tests/mpi_guard.py -n 4 --timeout 60 -- -m pytest --with-mpi tests/mpi

These end a run early: the wall-clock limit of the run; the limit of one test (its `timeout` marker,
else XMESH_TEST_TIMEOUT_S, else 60 s); a rank that failed a test while others stay in it for
XMESH_TEST_GRACE_S (10 s); ranks that collected different tests. Each time the guard asks every rank
for its Python stack, prints them, and ends exactly the processes of this run. The ranks' half is
mpi_rank.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mpi_rank

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.05
STACK_WAIT_S = 5.0
FULL_REPORTS = 2  # of one test: how many different failures are printed in full
OUTSIDE = re.compile(r'/_pytest/|/pluggy/|/pytest/__main__|mpi_rank\.py"|"<frozen runpy>"')


@dataclass(frozen=True)
class Launcher:
    """An mpiexec, and what its kind needs to start more ranks than there are cores, or as root."""

    path: str
    vendor: str  # "MPICH", "Open MPI" or "unknown"

    @classmethod
    def find(cls) -> Launcher:
        """Take the mpiexec beside this Python (one environment, one MPI), else the one in PATH."""
        beside = Path(sys.executable).parent / "mpiexec"  # not resolved: the venv's, not its base's
        path = str(beside) if beside.exists() else shutil.which("mpiexec")
        if path is None:
            raise FileNotFoundError(
                "no mpiexec beside this Python nor in PATH: pip install 'xmesh[mpich]'"
            )
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        text = answer.stdout + answer.stderr
        if re.search(r"Open MPI|OpenRTE|PRRTE", text):
            return cls(path, "Open MPI")
        if re.search(r"HYDRA|Intel\(R\) MPI", text):
            return cls(path, "MPICH")
        return cls(path, "unknown")

    def command(self, n: int, argv: Sequence[str]) -> list[str]:
        options = ["-n", str(n)]
        if self.vendor == "Open MPI":
            options += ["--oversubscribe", "--bind-to", "none"]
            if os.geteuid() == 0:
                options.append("--allow-run-as-root")
        rank_half = str(ROOT / "tests" / "mpi_rank.py")
        return [self.path, *options, sys.executable, rank_half, *argv]

    def environment(
        self, run_dir: Path, quiet: bool, more: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        environment = {**os.environ, **(more or {})}
        environment.update(
            {
                mpi_rank.RUN_DIR: str(run_dir),
                mpi_rank.QUIET: "1" if quiet else "0",
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
                ),
            }
        )
        # Many ranks on few cores: one thread each, and a rank that waits gives its core up.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment.setdefault(name, "1")
        environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        # Rank 0 sees a pipe under MPICH, a terminal under Open MPI, whatever the guard writes to.
        environment.setdefault("PY_COLORS", "1" if sys.stdout.isatty() else "0")
        return environment


@dataclass
class Rank:
    """What the guard knows of one rank, from its file of events."""

    number: int
    pid: int | None = None
    started: str = ""
    collected: list[str] | None = None
    test: str | None = None
    test_since: float = 0.0
    limit_s: float | None = None
    outcomes: dict[str, str] = field(default_factory=dict)
    failed_at: float | None = None
    status: int | None = None
    position: int = 0

    def alive(self) -> bool:
        return (
            self.pid is not None
            and mpi_rank.start_time(self.pid) == self.started
            and is_running(self.pid)
        )


@dataclass
class Result:
    """How a run ended. A test failed if it failed on any rank; it was skipped if all skipped it."""

    ok: bool
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    empty: bool = False
    problems: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def processes_of(run_dir: Path) -> list[int]:
    """Every process of a run: those born with its run directory in their environment (Linux).

    Under MPICH's Hydra the launcher, its proxies and each rank are sessions of their own, so no
    process group or session holds them all. This also finds what the ranks started.
    """
    needle = f"{mpi_rank.RUN_DIR}={run_dir}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if any(item.startswith(needle) for item in path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Run:
    """One mpiexec, from its start to the end of its last process."""

    def __init__(self, n: int, timeout_s: float, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.timeout_s = timeout_s
        self.ranks = [Rank(number) for number in range(n)]
        self.reports: dict[str, list[str]] = {}
        self.shared_memory: set[Path] = set()
        self.problems: list[str] = []
        self.muted = False
        self.test_timeout_s = float(os.environ.get("XMESH_TEST_TIMEOUT_S", "60"))
        self.grace_s = float(os.environ.get("XMESH_TEST_GRACE_S", "10"))

    def follow(
        self,
        launcher: Launcher,
        argv: Sequence[str],
        quiet: bool,
        more: Mapping[str, str] | None = None,
    ) -> int | None:
        """Start the ranks and watch them; the launcher's exit status, None if the run was cut."""
        began = time.monotonic()
        process = subprocess.Popen(
            launcher.command(len(self.ranks), argv),
            env=launcher.environment(self.run_dir, quiet, more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        pump = threading.Thread(target=self.pass_on, args=(process,), daemon=True)
        pump.start()
        try:
            while True:
                status = process.poll()
                self.read_events()
                if status is not None:
                    return status
                if not self.shared_memory:
                    self.note_shared_memory(self.ranks[0])
                reason = self.reason_to_cut(time.monotonic() - began)
                if reason:
                    self.problems.append(reason)
                    say(f"\n*** {reason}")
                    self.print_stacks()
                    return None
                time.sleep(POLL_S)
        finally:  # also when the guard itself is interrupted
            self.end_processes(process)
            pump.join(timeout=5)
            if process.returncode:
                self.remove_shared_memory()

    def pass_on(self, process: subprocess.Popen[bytes]) -> None:
        """Copy what the program prints, as it comes, to our own output."""
        assert process.stdout is not None
        while chunk := process.stdout.read1():  # type: ignore[attr-defined]
            if not self.muted:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
        process.stdout.close()

    def read_events(self) -> None:
        for rank in self.ranks:
            path = self.run_dir / f"rank-{rank.number}.events"
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(rank.position)
                for line in file.readlines():
                    if not line.endswith(b"\n"):  # still being written
                        break
                    rank.position += len(line)
                    self.take(rank, json.loads(line))

    def take(self, rank: Rank, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "begin":
            rank.pid, rank.started = event["pid"], event["start_time"]
        elif kind == "collected":
            rank.collected = event["tests"]
        elif kind == "collect_error":
            self.print_failure(rank, event["test"], event["text"])
        elif kind == "start":
            rank.test, rank.test_since = event["test"], time.monotonic()
            rank.limit_s = event["limit_s"]
        elif kind == "finish":
            rank.outcomes[event["test"]] = event["outcome"]
            rank.test = None
            rank.failed_at = time.monotonic() if event["outcome"] == "failed" else None
            if event["outcome"] == "failed":
                self.print_failure(rank, event["test"], event["text"])
        elif kind == "end":
            rank.status = event["status"]

    def print_failure(self, rank: Rank, test: str, text: str) -> None:
        printed = self.reports.setdefault(test, [])
        plain = re.sub(r"0x[0-9a-f]+", "0x", text)
        if plain in printed:
            say(f"*** rank {rank.number} failed {test} in the same way")
        elif len(printed) == FULL_REPORTS:
            say(f"*** rank {rank.number} failed {test} in another way again")
        else:
            printed.append(plain)
            say(f"\n*** rank {rank.number} failed {test}\n{text.rstrip()}")

    def reason_to_cut(self, elapsed_s: float) -> str | None:
        if elapsed_s > self.timeout_s:
            return f"the run did not end within {self.timeout_s:g} s"
        collected = [rank.collected for rank in self.ranks]
        if None not in collected and any(tests != collected[0] for tests in collected):
            return self.difference()
        now = time.monotonic()
        for rank in self.ranks:
            limit_s = self.test_timeout_s if rank.limit_s is None else rank.limit_s
            if rank.test is not None and now - rank.test_since > limit_s:
                return f"rank {rank.number} did not end {rank.test} within {limit_s:g} s"
            if rank.failed_at is not None and now - rank.failed_at > self.grace_s:
                behind = [r for r in self.ranks if len(r.outcomes) < len(rank.outcomes)]
                if behind:
                    test = list(rank.outcomes)[-1]
                    return (
                        f"rank {rank.number} failed {test}; "
                        f"after {self.grace_s:g} s {names(behind)} had not ended it"
                    )
        return None

    def difference(self) -> str:
        """How the ranks' lists of tests differ."""
        first = self.ranks[0].collected or []
        for rank in self.ranks[1:]:
            mine = rank.collected or []
            if mine != first:
                differing = sorted(set(first) ^ set(mine)) or ["the order"]
                return (
                    f"ranks collected different tests: rank 0 has {len(first)}, "
                    f"rank {rank.number} has {len(mine)}; they differ in {', '.join(differing[:5])}"
                )
        return ""

    def print_stacks(self) -> None:
        """Ask every rank for the stacks of its threads; print them, equal ones once."""
        for rank in self.ranks:
            if rank.pid is not None and rank.alive():
                send(rank.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_WAIT_S
        sizes: list[int] = []
        while time.monotonic() < deadline:  # until all have answered and nothing is added any more
            time.sleep(0.3)
            before, sizes = sizes, [len(self.stack(rank)) for rank in self.ranks]
            if sizes == before and all(
                size or not rank.alive() for size, rank in zip(sizes, self.ranks, strict=True)
            ):
                break
        groups: dict[str, list[Rank]] = {}
        for rank in self.ranks:
            groups.setdefault(self.describe(rank), []).append(rank)
        for text, ranks in groups.items():
            say(f"\n--- {', '.join(f'rank {rank.number}' for rank in ranks)}\n{text}")

    def stack(self, rank: Rank) -> str:
        path = self.run_dir / f"rank-{rank.number}.stack"
        return path.read_text(errors="replace") if path.exists() else ""

    def describe(self, rank: Rank) -> str:
        if rank.pid is None:
            return "  did not get as far as starting Python"
        stack = self.stack(rank)
        if not stack:
            return "  gave no stack" if rank.alive() else "  has ended"
        if rank.failed_at is not None and rank.test is None:
            return f"  waits for the others, having failed {list(rank.outcomes)[-1]}"
        lines = [f"  in {rank.test}"] if rank.test else []
        outside = False
        for line in re.sub(r"hread 0x[0-9a-f]+", "hread", stack).splitlines():
            if not line.startswith("  "):
                outside = False
            elif not outside and OUTSIDE.search(line):
                outside = True
                lines.append("  (the rest is the test runner's)")
            if not outside:
                lines.append(line)
        return "\n".join(lines)

    def note_shared_memory(self, rank: Rank) -> None:
        """Note what the MPI has in /dev/shm: it leaves that behind when its processes are ended."""
        if rank.pid is not None and rank.alive():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{rank.pid}/maps").read_text()
                self.shared_memory.update(
                    Path(name) for name in re.findall(r" (/dev/shm/\S+)$", maps, re.M)
                )

    def remove_shared_memory(self) -> None:
        for path in self.shared_memory:
            with contextlib.suppress(OSError):
                path.unlink()

    def end_processes(self, process: subprocess.Popen[bytes]) -> None:
        """End what this run started, and only that. Where all went well nothing is left to do."""
        if process.poll() is None:
            self.muted = True  # from here on launchers print pages of advice
            self.read_events()
            alive = [rank.pid for rank in self.ranks if rank.pid is not None and rank.alive()]
            for pid in alive:
                send(pid, signal.SIGSTOP)  # so that it makes no segment after the look at it
            for rank in self.ranks:
                self.note_shared_memory(rank)
            for pid in alive:
                send(pid, signal.SIGKILL)
            process.terminate()  # not SIGKILL: so launcher and proxies remove their files
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.wait_for_processes(1)
        for pid in processes_of(self.run_dir):
            send(pid, signal.SIGKILL)
        self.wait_for_processes(5)

    def wait_for_processes(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while processes_of(self.run_dir) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def result(self, status: int | None, with_pytest: bool) -> Result:
        problems = list(self.problems)
        empty = with_pytest and all(rank.status == 5 for rank in self.ranks)
        if with_pytest and status is not None:
            problems += self.faults_of_ranks()
        if empty:
            problems.append("no tests were selected")
        elif status:
            problems.append(f"mpiexec ended with status {status}")
        outcomes: dict[str, set[str]] = {}
        for rank in self.ranks:
            for test, outcome in rank.outcomes.items():
                outcomes.setdefault(test, set()).add(outcome)
            if rank.test is not None:  # ended in the middle of it
                outcomes.setdefault(rank.test, set()).add("failed")
        failed = sum("failed" in seen for seen in outcomes.values())
        skipped = sum(seen == {"skipped"} for seen in outcomes.values())
        ok = not problems and not failed
        return Result(
            ok=ok,
            passed=len(outcomes) - failed - skipped,
            failed=failed
            or int(not ok and not empty),  # a run that broke outside its tests is one failure
            skipped=skipped,
            empty=empty,
            problems=problems,
        )

    def faults_of_ranks(self) -> list[str]:
        """Ranks that ended otherwise than rank 0, or before their time."""
        faults = []
        if any(rank.collected != self.ranks[0].collected for rank in self.ranks):
            faults.append(self.difference())
        early: dict[str, list[Rank]] = {}
        for rank in self.ranks:
            if rank.status is None:
                early.setdefault(f"in {rank.test}" if rank.test else "outside any test", []).append(
                    rank
                )
                self.print_log(rank)
            elif rank.status not in (0, 1, 5) or (rank.status == 5) != (self.ranks[0].status == 5):
                faults.append(f"pytest on rank {rank.number} ended with status {rank.status}")
                self.print_log(rank)
        faults += [f"{names(ranks)} ended early, {where}" for where, ranks in early.items()]
        return faults

    def print_log(self, rank: Rank) -> None:
        path = self.run_dir / f"rank-{rank.number}.log"
        tail = path.read_text(errors="replace").splitlines()[-30:] if path.exists() else []
        if tail:
            say(
                f"\n--- last words of rank {rank.number}\n"
                + "\n".join(f"  {line}" for line in tail)
            )


def names(ranks: Sequence[Rank]) -> str:
    numbers = ", ".join(str(rank.number) for rank in ranks)
    return f"ranks {numbers}" if len(ranks) > 1 else f"rank {numbers}"


def say(text: str) -> None:
    print(text, flush=True)


def run_mpi(
    n: int, argv: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> Result:
    """Run `python ARGV` on n ranks.

    Args:
        n: number of ranks.
        argv: `program.py arguments`, or `-m module arguments`. For `-m pytest` only rank 0 writes
            to the terminal; failures of any rank are printed as they happen, and all ranks must
            collect the same tests.
        timeout_s: wall-clock limit.
        environment: more variables for the ranks.

    Returns:
        How it ended; what went wrong has been printed.
    """
    launcher = Launcher.find()
    with_pytest = list(argv[:2]) == ["-m", "pytest"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="xmesh-run-") as folder:
        run = Run(n, timeout_s, Path(folder))
        status = run.follow(launcher, argv, with_pytest, environment)
        result = run.result(status, with_pytest)
    result.elapsed_s = time.monotonic() - began
    for problem in result.problems:
        say(f"*** {problem}")
    return result


def interrupt_on_sigterm() -> None:
    """Let SIGTERM unwind like Ctrl-C, so that a guard that is ended ends its ranks."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run an MPI program; print all ranks' stacks when it hangs."
    )
    parser.add_argument("-n", type=int, required=True, help="number of ranks")
    parser.add_argument("--timeout", type=float, default=600, help="wall-clock limit in seconds")
    parser.add_argument(
        "argv", nargs="+", help="[--] program.py arguments | -- -m module arguments"
    )
    options = parser.parse_args()
    interrupt_on_sigterm()
    result = run_mpi(options.n, options.argv, options.timeout)
    say(f"{'ok' if result.ok else 'FAILED'} on {options.n} ranks in {result.elapsed_s:.1f} s")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
