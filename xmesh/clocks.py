"""Clocks of several ranks on one axis: how far each is from that of rank 0, and how sure that is.

Rank 0 asks each rank for its time, many times over. The answer was given at some moment between
question and answer, so of one round trip the middle is off by half the trip at the most; the
shortest counts. Clocks drift: readings before and after a run are interpolated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

#: Round trips of one reading.
ROUNDS = 32

#: Seconds since some moment of this rank's own.
now_s = time.perf_counter


class RoundTrip(NamedTuple):
    """Rank 0 asked and got an answer, by its clock, and what the answer said, by the other's."""

    asked_s: float
    remote_s: float
    answered_s: float


class Reading(NamedTuple):
    """How far a clock is from that of rank 0.

    Attributes:
        at_s: when, by the clock itself.
        ahead_s: its time less that of rank 0 at the same moment.
        error_s: ``ahead_s`` is off by this at the most.
    """

    at_s: float
    ahead_s: float
    error_s: float


def reading_of(trips: Iterable[RoundTrip]) -> Reading:
    """The reading that the shortest of some round trips gives."""
    best = min(trips, key=lambda trip: trip.answered_s - trip.asked_s)
    middle_s = (best.asked_s + best.answered_s) / 2
    error_s = (best.answered_s - best.asked_s) / 2
    return Reading(best.remote_s, best.remote_s - middle_s, error_s)


def to_axis(readings: Sequence[Reading]) -> Callable[[float], float]:
    """From a clock's own time to that of rank 0.

    Args:
        readings: of the clock, one or more, by time. Between two the distance is taken to change
            at a steady pace; before the first and after the last it stays.
    """
    times_s = [reading.at_s for reading in readings]
    ahead_s = [reading.ahead_s for reading in readings]
    return lambda local_s: local_s - float(np.interp(local_s, times_s, ahead_s))


def read_clock(
    comm: MPI.Intracomm, rounds: int = ROUNDS, clock: Callable[[], float] = now_s
) -> Reading:
    """Compare this rank's clock with that of rank 0; all ranks of the communicator call it.

    One rank after the other: about ``rounds`` round trips each. Those whose turn it is not sleep,
    and so leave the cores to the two at work.

    Args:
        comm: nobody else may use it meanwhile.
        rounds: round trips with each rank, of which the shortest counts.
        clock: in place of the process's own, for tests.

    Returns:
        This rank's reading; that of rank 0 is exact.
    """
    if comm.rank:
        return _answer(comm, clock)
    answer = np.empty(1)
    for rank in range(1, comm.size):
        trips = []
        for _ in range(rounds):
            asked_s = clock()
            comm.Send(np.array([asked_s]), rank)
            comm.Recv(answer, rank)
            trips.append(RoundTrip(asked_s, float(answer[0]), clock()))
        comm.Send(np.array(reading_of(trips)), rank)
    at_s = clock()
    return Reading(at_s, 0.0, 0.0)


def _answer(comm: MPI.Intracomm, clock: Callable[[], float]) -> Reading:
    """Say the time whenever rank 0 asks, until it sends the three numbers of a reading."""
    from mpi4py import MPI

    message = np.empty(3)
    status = MPI.Status()
    wait_quietly(comm.Irecv(message, 0), status)
    while status.Get_count(MPI.DOUBLE) == 1:
        comm.Send(np.array([clock()]), 0)
        comm.Recv(message, 0, status=status)
    return Reading(*message.tolist())


def wait_quietly(
    request: MPI.Request, status: MPI.Status | None = None, longest_sleep_s: float = 2e-3
) -> None:
    """Wait without keeping a core from those who are at work.

    Args:
        request: what to wait for.
        status: filled in once it is complete.
        longest_sleep_s: the wait ends late by this at the most.
    """
    sleep_s = 50e-6
    while not request.Test(status):
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, longest_sleep_s)
