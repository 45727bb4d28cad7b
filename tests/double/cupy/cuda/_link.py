"""This process's connection to the judge: started where there is none, read by a thread."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cupy import _engine
from cupy.cuda._wire import SYSTEM_ERROR, door

#: Longest path that a Unix socket can have on every system that we know.
_LONGEST = 100
_RANK_VARIABLES = (
    *("DOUBLE_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"),
)


class Refused(Exception):
    """The judge says no; the arguments are a status of NCCL and a text."""


class Membership:
    """What the judge has told about one communicator of this process."""

    def __init__(self, link: Link, number: int, rank: int, size: int, name: str) -> None:
        self.link = link
        self.number = number
        self.rank = rank
        self.size = size
        self.name = name
        self.device = -1
        self.freed = False
        #: Status and text, once something is wrong with it.
        self.error: tuple[int, str] | None = None
        #: Its operations fail; otherwise they hang, as kernels that spin until the abort do.
        self.fatal = False
        #: Units not ended yet that have operations on it.
        self.outstanding: set[Any] = set()


class Link:
    """The connection to one judge."""

    def __init__(self, path: str) -> None:
        self.path = path
        #: Guards everything here but the connection; never held while the engine is called.
        self.mutex = threading.RLock()
        self.units: dict[int, Any] = {}
        #: Units started and not ended, whose buffers are in use.
        self.running: set[Any] = set()
        self.lost: str | None = None
        self._members: dict[int, Membership] = {}
        self._requests = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._printed: set[str] = set()
        self._sending = threading.Lock()
        self._connection = _connect(path)
        self.tell("hello", _own_name())
        self._reader = threading.Thread(target=self._read, daemon=True, name="nccl double")
        self._reader.start()
        atexit.register(self._leave)

    def tell(self, *message: Any) -> None:
        """Send a message that has no answer."""
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as problem:
            self._lose(f"the judge cannot be reached: {problem}")

    def ask(self, kind: str, *values: Any) -> Any:
        """Send a message and wait for its answer, as long as it takes."""
        request = next(self._requests)
        waiting = self._waiting[request] = _Waiting()
        if self.lost is not None:
            raise Refused(SYSTEM_ERROR, self.lost)
        self.tell(kind, request, *values)
        waiting.event.wait()
        if waiting.refusal is not None:
            raise Refused(*waiting.refusal)
        return waiting.answer

    def violation(self, text: str, number: int | None = None) -> None:
        """Report a violation found here; it breaks the communicator with this number for all."""
        self.show(text)
        self.tell("violation", text, number)

    def show(self, text: str) -> None:
        """Print a violation, once."""
        with self.mutex:
            if text in self._printed:
                return
            self._printed.add(text)
        print(f"NCCL double: violation: {text}", file=sys.stderr, flush=True)

    def _read(self) -> None:
        try:
            while True:
                kind, *values = self._connection.recv()
                with self.mutex:
                    getattr(self, "_on_" + kind)(*values)
                _engine.wake()
        except (EOFError, OSError):
            self._lose("the judge has ended")

    def _lose(self, text: str) -> None:
        with self.mutex:
            self.lost = self.lost or text
            for membership in self._members.values():
                membership.error = membership.error or (SYSTEM_ERROR, self.lost)
                membership.fatal = True
            for request in list(self._waiting):
                self._on_refused(request, SYSTEM_ERROR, self.lost)
        _engine.wake()

    def _leave(self) -> None:
        """Say good-bye, and wait for the answer: then no judge outlives its last client."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.send(("bye",))
        self._reader.join(timeout=2)

    # Messages of the judge

    def _on_made(self, request: int, number: int | None, rank: int, size: int, name: str) -> None:
        waiting = self._waiting.pop(request)
        if number is not None:
            # Known before the next message is read, which may already be about it.
            waiting.answer = self._members[number] = Membership(self, number, rank, size, name)
        waiting.event.set()

    def _on_refused(self, request: int, status: int, text: str) -> None:
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            waiting.refusal = (status, text)
            waiting.event.set()

    def _on_answer(self, request: int, answer: Any) -> None:
        waiting = self._waiting.pop(request)
        waiting.answer = answer
        waiting.event.set()

    def _on_result(self, number: int, index: int, data: bytes) -> None:
        unit = self.units.get(number)
        if unit is not None:
            unit.calls[index].result = data

    def _on_broken(self, number: int, status: int, text: str, fatal: bool) -> None:
        membership = self._members[number]
        membership.error = membership.error or (status, text)
        membership.fatal = membership.fatal or fatal

    def _on_violation(self, text: str) -> None:
        self.show(text)

    def _on_lost(self, text: str) -> None:
        self.lost = text
        self._lose(text)


class _Waiting:
    """A request without an answer."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.answer: Any = None
        self.refusal: tuple[int, str] | None = None


_links: dict[str, Link] = {}
_linking = threading.Lock()


def link_to(path: str) -> Link:
    """The connection to the judge at a path, made at the first call."""
    with _linking:
        if path not in _links:
            _links[path] = Link(path)
        return _links[path]


def any_link() -> Link | None:
    """The connection that this process has, if it has one."""
    return next(iter(_links.values()), None)


def meeting_place() -> str:
    """Where a judge is to listen: as the launcher says, where this process already is, or anew."""
    path = os.environ.get("DOUBLE_NCCL_SOCKET")
    if path:
        path = os.path.abspath(path)
    elif link := any_link():
        path = link.path
    else:
        name = f"nccl-double-{os.getpid()}-{os.urandom(4).hex()}"
        path = os.path.join(tempfile.gettempdir(), name)
        if len(path) > _LONGEST:
            path = os.path.join("/tmp", name)
    if len(os.fsencode(path)) > _LONGEST:
        raise OSError(f"too long for a socket's path: {path}")
    return path


def _connect(path: str) -> Connection:
    with door(path):
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a judge that was killed
            _start(path)
            end.connect(path)
        return Connection(end.detach())


def _start(path: str) -> None:
    """Start a judge; returns when it listens."""
    environment = dict(os.environ)
    report = environment.get("DOUBLE_NCCL_REPORT")
    if report:
        environment["DOUBLE_NCCL_REPORT"] = os.path.abspath(report)
    # Nothing inherited: whoever reads this process's output must not wait for the judge's end.
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("_judge.py")), path, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        check=True,
    )


def _own_name() -> str:
    for variable in _RANK_VARIABLES:
        if variable in os.environ:
            return f"rank {os.environ[variable]}"
    return f"process {os.getpid()}"
