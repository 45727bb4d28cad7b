"""The judge of a run: a process in which all ranks' NCCL operations meet.

Started as ``python _judge.py SOCKET PID``, with the lock of `_wire.door` held by process PID. It
returns when the socket listens; a child of it goes on. That child ends with its last client, or
with process PID where no client ever came, and removes the socket.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

from _court import MESSAGES, Court
from _waits import Unit
from _wire import door, record


class Client:
    """One rank's process."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.name = "a process without a name"
        self.in_flight: dict[int, Unit] = {}
        # A thread of its own: a stopped rank that does not read must not stop the judge.
        self._outbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send without waiting."""
        self._outbox.put(message)

    def _write(self) -> None:
        try:
            while True:
                self.connection.send(self._outbox.get())
        except OSError:
            pass  # the process has ended; the loop below sees it, too


class Judge:
    """The loop over all clients."""

    def __init__(self, path: str, listener: socket.socket, starter: int) -> None:
        self._path = path
        self._listener = listener
        self._starter = starter
        self._clients: dict[Connection, Client] = {}
        self._anyone_came = False
        self._court = Court(record)

    def run(self) -> None:
        """Serve until the last client has left."""
        try:
            while self._clients or not self._may_end():
                ready = wait([self._listener, *self._clients], 0.1 if not self._clients else None)
                for source in ready:
                    if isinstance(source, Connection):
                        self._read(self._clients[source])
                    else:
                        self._welcome()
        except BaseException:
            for client in self._clients.values():
                client.send("lost", f"the judge has failed: {traceback.format_exc()}")
            threading.Event().wait(0.5)  # for the threads that write
            for name in (self._path, self._path + ".lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
            raise

    def _welcome(self) -> None:
        accepted, _ = self._listener.accept()
        connection = Connection(accepted.detach())
        self._clients[connection] = Client(connection)
        self._anyone_came = True

    def _read(self, client: Client) -> None:
        try:
            kind, *values = client.connection.recv()
        except (EOFError, OSError):
            kind, values = "bye", []
        if kind == "hello":
            client.name = values[0]
        elif kind == "bye":
            del self._clients[client.connection]
            self._court.gone(client)
            # Whoever says good-bye waits for this: as the last one, until no judge is left.
            if self._clients or not self._may_end():
                _shut(client.connection)
        elif kind in MESSAGES:
            getattr(self._court, kind)(client, *values)
        else:
            raise ValueError(f"no such message: {kind}")

    def _may_end(self) -> bool:
        """Whether there is nobody to serve; if so, the socket is gone and the process must end."""
        if not self._anyone_came and _lives(self._starter):
            return False
        with door(self._path, wait=False) as ours:
            if not ours or select.select([self._listener], [], [], 0)[0]:
                return False  # someone is coming
            os.unlink(self._path)
            os.unlink(self._path + ".lock")
            os._exit(0)


def _shut(connection: Connection) -> None:
    """End a connection that a thread may be writing to: closing would free its number."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    path, starter = sys.argv[1], int(sys.argv[2])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)
    if os.fork():
        os._exit(0)
    os.setsid()  # signals to the ranks' process group are not meant for the judge
    os.chdir("/")
    Judge(path, listener, starter).run()


if __name__ == "__main__":
    main()
