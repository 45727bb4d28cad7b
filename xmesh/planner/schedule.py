"""Jobs on ports: the scheduling problem of the paper's eq. 1-4, and its rules.

A *port* is one direction-less NIC (or, inside a host, one rank); it is full duplex, so its sending
and its receiving side are taken independently. A job takes one sending port, chosen among
candidates, and all its receiving ports, all for the same time; jobs that share a port on the same
side do not overlap (eq. 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Relative slack under which two times count as equal: sums of floats in different orders differ.
SLACK = 1e-9


@dataclass(frozen=True)
class Job:
    """A transfer as the scheduler sees it.

    Attributes:
        senders: candidate ports, the one of the lowest-indexed rank first.
        receivers: ports taken on the receiving side.
        durations_s: seconds it takes, one for each candidate.
        rotation: sorts jobs so that neighbours in the order touch different ports.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    durations_s: tuple[float, ...]
    rotation: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """A job and the index of the candidate that sends it."""

    job: int
    candidate: int


@dataclass(frozen=True)
class Schedule:
    """An order of decisions and what comes of it.

    Attributes:
        decisions: every job once, in the order in which ports take them.
        starts_s: start of each decision.
        makespan_s: end of the last.
        optimal: True when no schedule of these jobs ends earlier, by bound or by exhaustion.
    """

    decisions: tuple[Decision, ...]
    starts_s: tuple[float, ...]
    makespan_s: float
    optimal: bool = False


def run(jobs: Sequence[Job], decisions: Iterable[Decision], optimal: bool = False) -> Schedule:
    """Start each job, in order, as soon as its ports have finished what came before."""
    order = tuple(decisions)
    sending: dict[int, float] = {}
    receiving: dict[int, float] = {}
    starts = []
    for decision in order:
        job = jobs[decision.job]
        port = job.senders[decision.candidate]
        start = max(
            sending.get(port, 0.0), max((receiving.get(p, 0.0) for p in job.receivers), default=0.0)
        )
        end = start + job.durations_s[decision.candidate]
        sending[port] = end
        for p in job.receivers:
            receiving[p] = end
        starts.append(start)
    ends = [*sending.values(), *receiving.values()]
    return Schedule(order, tuple(starts), max(ends, default=0.0), optimal)


def loads(jobs: Sequence[Job], candidates: Sequence[int]) -> tuple[dict[int, float], float]:
    """Seconds of work of each sending port, and of the busiest port on either side."""
    sending: dict[int, float] = {}
    receiving: dict[int, float] = {}
    for job, candidate in zip(jobs, candidates, strict=True):
        port, duration = job.senders[candidate], job.durations_s[candidate]
        sending[port] = sending.get(port, 0.0) + duration
        for p in job.receivers:
            receiving[p] = receiving.get(p, 0.0) + duration
    return sending, max([*sending.values(), *receiving.values()], default=0.0)


def floor_s(jobs: Sequence[Job]) -> float:
    """No schedule of unsplit jobs ends before this: busiest receiving port, even sending."""
    receiving: dict[int, float] = {}
    forced: dict[int, float] = {}
    for job in jobs:
        least = min(job.durations_s)
        for p in job.receivers:
            receiving[p] = receiving.get(p, 0.0) + least
        if len(job.senders) == 1:
            forced[job.senders[0]] = forced.get(job.senders[0], 0.0) + least
    ports = {port for job in jobs for port in job.senders}
    even = sum(min(job.durations_s) for job in jobs) / max(1, len(ports))
    longest = max((min(job.durations_s) for job in jobs), default=0.0)
    return max([*receiving.values(), *forced.values(), even, longest], default=0.0)
