"""A thread that gives work to NCCL: a launch may block, and then nobody else must stand with it.

NCCL connects ranks when they first meet, in the call that launches, and waits there for the other
one; nothing bounds that. One thread of a process launches for all its resharders, in the order in
which it was asked, so calls keep their order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from xmesh.device.gpu import Gpu
from xmesh.wait_policy import sleep


class Job:
    """Something that a thread does; to look at, or to wait for by ``Progress.wait``.

    Args:
        gpu: which is the thread's current one meanwhile.
        call: what to do.
    """

    def __init__(self, gpu: Gpu, call: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self.over = False
        self._gpu = gpu
        self._call: Callable[[], object] | None = call

    def step(self) -> bool:
        """It moves by itself."""
        return False

    def skip(self) -> None:
        """Have nothing done when its turn comes."""
        self._call = None

    def run(self) -> None:
        """Do it, in whatever thread this is."""
        call, self._call = self._call, None  # a job that is over keeps no arrays alive
        try:
            if call is not None:
                self._gpu.use()
                call()
        except Exception as error:
            self.error = error
        del call
        self.over = True


def in_thread(gpu: Gpu, call: Callable[[], object]) -> Job:
    """Begin what may block for ever, in a thread of its own that can be left behind."""
    job = Job(gpu, call)
    threading.Thread(target=job.run, name="xmesh-nccl", daemon=True).start()
    return job


def wait_a_while(jobs: Iterable[Job], limit_s: float) -> None:
    """Wait for some, and not for ever: what they do is over, or it will be."""
    deadline_s, idle = time.monotonic() + limit_s, 0
    for job in jobs:
        while not job.over and time.monotonic() < deadline_s:
            idle += 1
            sleep(idle)


class Launcher:
    """The thread of one process; it is started when it is first asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[int, tuple[Any, ...]] = {}
        #: What the thread takes its jobs from, and the one that it stands in.
        self._jobs: queue.SimpleQueue[Job] | None = None
        self._running: Job | None = None

    def lanes(self, gpu: Gpu) -> tuple[Any, ...]:
        """Two streams for NCCL on a GPU: for what goes out, and for what comes in.

        All calls of a process share them, as its kernels must run in the order of their launch:
        those of more streams could be more than fit on the GPU at one time, and then it chooses.
        """
        with self._lock, gpu.here():
            if gpu.device not in self._lanes:
                stream = gpu.cupy.cuda.Stream
                self._lanes[gpu.device] = stream(non_blocking=True), stream(non_blocking=True)
            return self._lanes[gpu.device]

    def submit(self, gpu: Gpu, call: Callable[[], object]) -> Job:
        """Have something done after all that was asked before."""
        job = Job(gpu, call)
        with self._lock:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                self._start(self._jobs)
            self._jobs.put(job)
        return job

    def leave_behind(self, job: Job) -> None:
        """Give a job up; where the thread stands in it, another one goes on with the rest."""
        with self._lock:
            if job.over or self._jobs is None:
                return
            if self._running is not job:
                # It waits for its turn: those behind it must not overtake the one that runs.
                job.skip()
                return
            left, self._jobs, self._running = self._jobs, queue.SimpleQueue(), None
            while not left.empty():
                self._jobs.put(left.get())
            self._start(self._jobs)

    def _start(self, jobs: queue.SimpleQueue[Job]) -> None:
        threading.Thread(target=self._work, args=(jobs,), name="xmesh-launch", daemon=True).start()

    def _work(self, jobs: queue.SimpleQueue[Job]) -> None:
        while True:
            job = jobs.get()
            with self._lock:
                self._running = job
            job.run()
            del job  # which knows a GPU, and the next one may be long in coming
            with self._lock:
                if self._jobs is not jobs:
                    return  # left behind
                self._running = None
