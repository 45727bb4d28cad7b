"""Commands, and the processes that they leave: started, followed and ended, by id."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from xmesh.errors import XmeshError, explain

_MARK = "XMESH_CLUSTER_RUN"
_END_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: exit status of the launcher, 0 if all went well.
        output: what the ranks printed, on stdout and stderr.
    """

    status: int
    output: str


def find_tool(name: str) -> str | None:
    """Where a program is; users' PATHs often lack administrators' folders."""
    return shutil.which(name, path=full_path())


def full_path() -> str:
    """PATH with the folders of administrators' programs."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line's own words, and those after ``--``."""
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def call(command: Sequence[str], text: str = "", timeout_s: float = 60) -> str:
    """Run a short command.

    Args:
        command: its words.
        text: its standard input.
        timeout_s: limit in seconds.

    Returns:
        Its standard output.

    Raises:
        subprocess.CalledProcessError: it failed; ``stderr`` says why.
        subprocess.TimeoutExpired: it took too long.
    """
    program, *rest = command
    return subprocess.run(
        [find_tool(program) or program, *rest],
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
    ).stdout


def follow(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
) -> Outcome:
    """Run a launcher to its end, and end what it leaves.

    Args:
        command: its words.
        environment: its whole environment, which the ranks must inherit.
        timeout_s: seconds after which all of it is ended.
        on_line: called with each line as it comes.

    Raises:
        XmeshError: out of time.
    """
    mark = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    process = subprocess.Popen(
        command,
        env={**environment, _MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for this process, which ends the others in order
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    pump = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    pump.start()
    seen: list[str] = []
    try:
        while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            seen.append(line + "\n")
            if on_line is not None:
                on_line(line)
        status = process.wait(timeout=max(_END_S, deadline - time.monotonic()))
        return Outcome(status, "".join(seen))
    except (queue.Empty, subprocess.TimeoutExpired):
        raise XmeshError(
            explain(
                f"the ranks must end within {timeout_s:g} s",
                values="they were still running, and have been ended; the last they said:\n"
                + "".join(seen[-20:]),
                context=" ".join(command),
                remedy="give them more time, or less to do; more ranks than cores are slow",
            )
        ) from None
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        # Hydra makes every rank a session of its own; they are known by their environment.
        end(lambda: marked(_MARK, mark))
        process.wait()
        pump.join(_END_S)


def _read(stream: IO[str] | None, lines: queue.SimpleQueue[str | None]) -> None:
    if stream is not None:
        with stream:
            for line in stream:
                lines.put(line.rstrip("\n"))
    lines.put(None)


def marked(name: str, value: str) -> list[int]:
    """Ids of the processes that were born with a variable of this value in their environment."""
    needle = f"{name}={value}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if needle in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def end(find: Callable[[], Iterable[int]], grace_s: float = 0.0, ask: bool = True) -> None:
    """End processes: those that ``find`` returns, and those that it returns after that.

    Args:
        find: ids of the processes that are there now.
        grace_s: seconds before SIGKILL.
        ask: whether they get a SIGTERM before; False: they know already.
    """
    began = time.monotonic()
    asked: set[int] = set()
    while pids := [pid for pid in find() if pid != os.getpid() and not _is_zombie(pid)]:
        elapsed = time.monotonic() - began
        if elapsed > grace_s + _END_S:
            return  # in the kernel's hands (a file system that hangs, for example)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if elapsed >= grace_s:
                    os.kill(pid, signal.SIGKILL)
                elif ask and pid not in asked:
                    os.kill(pid, signal.SIGTERM)
        asked.update(pids)
        time.sleep(_POLL_S)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
