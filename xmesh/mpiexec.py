"""Starts MPI ranks from an ordinary process, under a time limit, and ends what it started."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from xmesh.errors import XmeshError, explain

#: What launchers set for every process that they start. A batch script has Slurm's other variables.
_SET_BY_LAUNCHERS = (
    "PMI_RANK",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS",
)
_MARK = "XMESH_LAUNCH"
_END_S = 3.0


@dataclass(frozen=True)
class Launcher:
    """An ``mpiexec``.

    Attributes:
        path: where it is.
        open_mpi: whether it is Open MPI's, which needs more options.
    """

    path: str
    open_mpi: bool

    @classmethod
    def find(cls) -> Launcher:
        """Take the one beside this Python (one environment, one MPI), else the one in PATH.

        Raises:
            XmeshError: there is none, or it does not answer.
        """
        beside = Path(sys.executable).parent / "mpiexec"  # not resolved: links lead out of a venv
        path = str(beside) if beside.exists() else shutil.which("mpiexec")
        if path is None:
            raise XmeshError(
                explain(
                    "an mpiexec must be beside this Python or in PATH",
                    values=f"Python is {sys.executable}",
                    remedy="pip install 'xmesh[mpich]', or load the MPI of your cluster",
                )
            )
        try:
            answer = subprocess.run(
                [path, "--version"],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise XmeshError(
                explain(
                    "mpiexec must be able to run",
                    values=str(error),
                    remedy="try it by hand: mpiexec --version",
                )
            ) from error
        text = answer.stdout + answer.stderr
        return cls(path, re.search(r"Open MPI|OpenRTE|PRRTE", text) is not None)

    def command(self, count: int, argv: Sequence[str]) -> list[str]:
        """The words that start ``count`` ranks of this Python with ``argv``."""
        options = ["-n", str(count)]
        if self.open_mpi:
            options += ["--oversubscribe", "--bind-to", "none"]
            if os.geteuid() == 0:
                options.append("--allow-run-as-root")
        return [self.path, *options, sys.executable, *argv]


def launched() -> bool:
    """Whether an MPI launcher started this process, as far as its environment says."""
    return any(name in os.environ for name in _SET_BY_LAUNCHERS)


def run_ranks(
    count: int,
    argv: Sequence[str],
    *,
    on_line: Callable[[str], None],
    timeout_s: float,
    import_from: Path | None = None,
) -> int:
    """Run this Python on some ranks until all of them have ended.

    Args:
        count: number of ranks.
        argv: what follows ``python``: a program, or ``-m`` and a module, and its arguments.
        on_line: called with each line that a rank prints, on stdout or stderr.
        timeout_s: seconds after which the ranks are ended.
        import_from: a folder that the ranks look for modules in first; default the usual ones.

    Returns:
        Exit status of mpiexec.

    Raises:
        XmeshError: no mpiexec, or out of time.
    """
    command = Launcher.find().command(count, argv)
    environment = dict(os.environ)
    environment[_MARK] = mark = uuid.uuid4().hex
    # Many ranks on few cores: one thread each, and a rank that waits gives its core up.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(name, "1")
    environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if import_from is not None:
        folders = [str(import_from), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    deadline = time.monotonic() + timeout_s
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            on_line(line)
        return process.wait(timeout=max(_END_S, deadline - time.monotonic()))
    except (queue.Empty, subprocess.TimeoutExpired):
        raise XmeshError(
            explain(
                f"the ranks must end within {timeout_s:g} s",
                values=f"{count} ranks were still running, and have been ended",
                context=" ".join(command),
                remedy="give them more time, or less to do; more ranks than cores are slow",
            )
        ) from None
    finally:
        _end(process, mark)
        reader.join(_END_S)


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line.rstrip("\n"))
    lines.put(None)


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """End whatever is left of a run; nothing is, when it ended well."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.returncode == 0:
        return
    # Under Hydra every rank is a session of its own; they are known by their environment (Linux).
    needle = f"{_MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if needle in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
