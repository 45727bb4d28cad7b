"""Progress while callbacks compute: a thread that moves transfers on, or nobody.

MPI moves messages only while somebody calls it, and a relay of a broadcast passes chunks on only
when this package runs. A thread does both while a callback computes; it sleeps between looks, so
callbacks that leave the core free, or NumPy's that leave the interpreter free, share it well.
"""

from __future__ import annotations

import threading
from types import TracebackType

from xmesh.device.gpu import use_device
from xmesh.errors import OptionError, explain
from xmesh.progress import Progress
from xmesh.wait_policy import sleep

PROGRESS = ("auto", "thread", "poll")


class Background:
    """Lets transfers go on while the body of a ``with`` runs.

    Args:
        progress: what is in flight.
        thread: start a thread; without, nothing happens.
        device: ordinal of the GPU that it works for, if one.
    """

    def __init__(self, progress: Progress, thread: bool, device: int | None = None) -> None:
        self._progress, self._device = progress, device
        self._computing = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        if thread:
            self._thread = threading.Thread(target=self._run, name="xmesh-progress", daemon=True)
            self._thread.start()

    def __enter__(self) -> None:
        self._computing.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._computing.clear()

    def _run(self) -> None:
        if self._device is not None:
            use_device(self._device)
        idle = 0
        while True:
            self._computing.wait()
            if self._closed:
                return
            # The same pace as in waits of ranks that share cores: here they share with callbacks.
            idle = 1 if self._progress.step() else idle + 1
            sleep(idle)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed = True
        self._computing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def wants_thread(progress: str, threads_allowed: bool) -> bool:
    """Whether an option means a thread.

    Args:
        progress: one of PROGRESS; "auto" takes a thread where MPI allows it.
        threads_allowed: MPI was initialised for several threads that call it (THREAD_MULTIPLE).

    Raises:
        OptionError: no such option, or a thread where MPI does not allow it.
    """
    if progress not in PROGRESS:
        raise OptionError(
            explain(
                f"progress must be one of {', '.join(PROGRESS)}",
                values=f"{progress!r}",
                remedy="leave it at 'auto'",
            )
        )
    if progress == "thread" and not threads_allowed:
        raise OptionError(
            explain(
                "a progress thread needs MPI_THREAD_MULTIPLE",
                values="MPI was initialised for less",
                remedy="leave mpi4py.rc.thread_level at 'multiple', or pass progress='poll'",
            )
        )
    return progress == "thread" or (progress == "auto" and threads_allowed)
