"""The launcher's thread: jobs one after the other, also when some are given up."""

from __future__ import annotations

import threading

import pytest

from xmesh.nccl.launcher import Job, Launcher, in_thread, wait_a_while

LIMIT_S = 20


class NoGpu:
    def use(self) -> None:
        pass


class Jobs:
    """Jobs that tell when they begin and end, and last until they are let go."""

    def __init__(self) -> None:
        self.launcher = Launcher()
        self.log: list[str] = []
        self.begun: dict[str, threading.Event] = {}
        self.go: dict[str, threading.Event] = {}

    def submit(self, name: str, stands: bool = False) -> Job:
        self.begun[name], self.go[name] = threading.Event(), threading.Event()
        if not stands:
            self.go[name].set()

        def call() -> None:
            self.log.append(f"{name} begins")
            self.begun[name].set()
            assert self.go[name].wait(LIMIT_S)
            self.log.append(f"{name} ends")

        return self.launcher.submit(NoGpu(), call)  # type: ignore[arg-type]


def test_jobs_are_done_in_order_and_tell_their_errors():
    jobs = Jobs()
    first, second = jobs.submit("a"), jobs.submit("b")

    def fails() -> None:
        raise ValueError("as a test")

    third = jobs.launcher.submit(NoGpu(), fails)  # type: ignore[arg-type]
    wait_a_while([first, second, third], LIMIT_S)
    assert jobs.log == ["a begins", "a ends", "b begins", "b ends"]
    assert (first.error, second.error, str(third.error)) == (None, None, "as a test")


def test_one_that_waits_for_its_turn_is_given_up_alone():
    """Those behind it went before the one that ran, in a thread of their own."""
    jobs = Jobs()
    first, second, third = jobs.submit("a", stands=True), jobs.submit("b"), jobs.submit("c")
    assert jobs.begun["a"].wait(LIMIT_S)
    jobs.launcher.leave_behind(second)
    assert not jobs.begun["c"].wait(0.1)
    jobs.go["a"].set()
    wait_a_while([first, second, third], LIMIT_S)
    assert jobs.log == ["a begins", "a ends", "c begins", "c ends"]


@pytest.mark.parametrize("again", [False, True])
def test_one_that_stands_is_left_behind(again):
    jobs = Jobs()
    first, second, third = jobs.submit("a", stands=True), jobs.submit("b"), jobs.submit("c")
    assert jobs.begun["a"].wait(LIMIT_S)
    jobs.launcher.leave_behind(first)
    if again:  # which changes nothing
        jobs.launcher.leave_behind(first)
    wait_a_while([second, third], LIMIT_S)
    assert jobs.log == ["a begins", "b begins", "b ends", "c begins", "c ends"]
    jobs.go["a"].set()
    wait_a_while([first], LIMIT_S)
    fourth = jobs.submit("d")
    wait_a_while([fourth], LIMIT_S)
    assert jobs.log[-3:] == ["a ends", "d begins", "d ends"]


def test_a_thread_of_its_own():
    done: list[int] = []
    job = in_thread(NoGpu(), lambda: done.append(1))  # type: ignore[arg-type]
    wait_a_while([job], LIMIT_S)
    assert (done, job.over, job.error) == ([1], True, None)
