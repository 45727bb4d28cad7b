"""Schedulers: who sends each job, and in which order (paper section 3.2).

All are deterministic: the random ones draw from a seeded generator, and the exhaustive one has a
budget of nodes in place of one of seconds, so every rank finds the same schedule alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from xmesh.planner.schedule import SLACK, Decision, Job, Schedule, floor_s, loads, run

SCHEDULERS = ("naive", "load_balance", "dfs", "greedy")

#: Search tree nodes that dfs may visit; about a second in the worst case.
NODE_BUDGET = 40_000
#: Jobs up to which auto tries dfs: beyond about 20 it finds nothing in its budget (paper 3.2).
DFS_JOBS = 20
#: Random sets drawn for each round, and restarts, of greedy.
_DRAWS = 8
_RESTARTS = 24


def naive(jobs: Sequence[Job], seed: int = 0) -> Schedule:
    """The lowest-indexed sender for each job, in index order (the paper's baseline)."""
    return run(jobs, [Decision(i, 0) for i in range(len(jobs))])


def load_balance(jobs: Sequence[Job], seed: int = 0) -> Schedule:
    """Sorted greedy choice of senders, in index order.

    Longest job first, each to the sender that would finish it first (paper eq. 4). A heuristic:
    with unequal jobs or restricted senders it need not be optimal.
    """
    return run(jobs, [Decision(i, c) for i, c in enumerate(balanced_senders(jobs))])


def balanced_senders(jobs: Sequence[Job]) -> list[int]:
    """Candidate of each job by sorted greedy load balance."""
    work: dict[int, float] = {}
    chosen = [0] * len(jobs)
    for i in sorted(range(len(jobs)), key=lambda i: -max(jobs[i].durations_s)):
        job = jobs[i]
        ends = [
            work.get(port, 0.0) + duration
            for port, duration in zip(job.senders, job.durations_s, strict=True)
        ]
        chosen[i] = ends.index(min(ends))
        work[job.senders[chosen[i]]] = ends[chosen[i]]
    return chosen


def greedy(jobs: Sequence[Job], seed: int = 0) -> Schedule:
    """Randomised greedy: round after round a large set of jobs that share no port (paper 3.2).

    Senders come from sorted greedy load balance. Deterministic orders (rotation, busiest port
    first) are tried before random ones; the search ends at the load of the busiest port, which no
    order beats.
    """
    chosen = balanced_senders(jobs)
    bound = loads(jobs, chosen)[1]
    restarts = max(1, min(_RESTARTS, 40_000 // max(1, len(jobs))))
    best: Schedule | None = None
    for order in _orders(jobs, chosen, Random(seed), restarts):
        found = run(jobs, [Decision(i, chosen[i]) for i in order])
        if best is None or found.makespan_s < best.makespan_s * (1 - SLACK):
            best = found
        if best.makespan_s <= bound * (1 + SLACK):
            break
    if best is None:
        return run(jobs, [], optimal=True)
    optimal = best.makespan_s <= floor_s(jobs) * (1 + SLACK)
    return Schedule(best.decisions, best.starts_s, best.makespan_s, optimal)


def _orders(
    jobs: Sequence[Job], chosen: Sequence[int], random: Random, restarts: int
) -> Iterator[list[int]]:
    """Orders worth trying, the cheap ones first."""
    if not jobs:
        return
    rotated = sorted(range(len(jobs)), key=lambda i: (jobs[i].rotation, i))
    yield rotated
    # Jobs that take the same ports for the same time are interchangeable: the search is over kinds.
    kinds: dict[tuple[int, tuple[int, ...], float], list[int]] = {}
    for i in rotated:
        job, c = jobs[i], chosen[i]
        kinds.setdefault((job.senders[c], job.receivers, job.durations_s[c]), []).append(i)
    if len(kinds) <= 256:
        yield _busiest_first(kinds)
    for _ in range(restarts):
        yield _random_rounds(kinds, random)


def _busiest_first(kinds: dict[tuple[int, tuple[int, ...], float], list[int]]) -> list[int]:
    """Whatever can start first; among those, the one whose port has most work left."""
    left = {kind: len(members) for kind, members in kinds.items()}
    work: dict[tuple[bool, int], float] = {}
    for (sender, receivers, duration), count in left.items():
        for port in [(True, sender), *((False, r) for r in receivers)]:
            work[port] = work.get(port, 0.0) + duration * count
    free = dict.fromkeys(work, 0.0)
    order = []
    while left:
        best, best_key, best_ports = None, None, None
        for kind in left:
            sender, receivers, duration = kind
            ports = [(True, sender), *((False, r) for r in receivers)]
            start = max(free[p] for p in ports)
            key = (start, -max(work[p] for p in ports), -sum(work[p] for p in ports))
            if best_key is None or key < best_key:
                best, best_key, best_ports = kind, key, ports
        if best is None or best_key is None or best_ports is None:
            break
        for port in best_ports:
            free[port] = best_key[0] + best[2]
            work[port] -= best[2]
        order.append(kinds[best][len(kinds[best]) - left[best]])
        left[best] -= 1
        if not left[best]:
            del left[best]
    return order


def _random_rounds(
    kinds: dict[tuple[int, tuple[int, ...], float], list[int]], random: Random
) -> list[int]:
    """Rounds of jobs that share no port; each round the largest of a few random sets."""
    waiting = {kind: list(reversed(members)) for kind, members in kinds.items()}
    order = []
    while waiting:
        names = list(waiting)
        ports = {(True, k[0]) for k in names} | {(False, r) for k in names for r in k[1]}
        best: list[tuple[int, tuple[int, ...], float]] = []
        best_size = 0
        for _ in range(_DRAWS):
            random.shuffle(names)
            taken: set[tuple[bool, int]] = set()
            picked = []
            for kind in names:
                wants = {(True, kind[0]), *((False, r) for r in kind[1])}
                if taken.isdisjoint(wants):
                    taken |= wants
                    picked.append(kind)
            if len(taken) > best_size:
                best, best_size = picked, len(taken)
            if best_size == len(ports):
                break
        for kind in best:
            order.append(waiting[kind].pop())
            if not waiting[kind]:
                del waiting[kind]
    return order


def dfs(jobs: Sequence[Job], seed: int = 0, node_budget: int = NODE_BUDGET) -> Schedule:
    """Depth-first search over senders and order, with pruning (paper 3.2).

    Starts from the greedy schedule and visits schedules in order of start times, so each set of
    start times is met once. ``optimal`` tells whether the tree was exhausted within the budget.
    """
    best = greedy(jobs, seed)
    if best.optimal:
        return best
    search = _Search(jobs, best, node_budget)
    search.descend(0.0)
    found = search.best
    optimal = not search.exhausted_budget
    return Schedule(found.decisions, found.starts_s, found.makespan_s, optimal)


class _Search:
    """State of one depth-first search; ports are written and restored on the way."""

    def __init__(self, jobs: Sequence[Job], best: Schedule, node_budget: int) -> None:
        self.jobs = jobs
        self.best = best
        self.floor_s = floor_s(jobs)
        self.nodes_left = node_budget
        self.exhausted_budget = False
        self.order: list[Decision] = []
        self.sending: dict[int, float] = {p: 0.0 for job in jobs for p in job.senders}
        self.receiving: dict[int, float] = {p: 0.0 for job in jobs for p in job.receivers}
        kinds: dict[Job, list[int]] = {}
        for i, job in enumerate(jobs):
            kinds.setdefault(Job(job.senders, job.receivers, job.durations_s), []).append(i)
        self.kinds = list(kinds)
        self.members = list(kinds.values())
        self.left = [len(members) for members in self.members]
        self.makespan_s = 0.0

    def bound_s(self, now: float) -> float:
        """No completion of the current branch ends before this."""
        receiving = {p: max(t, now) for p, t in self.receiving.items()}
        sending = {p: max(t, now) for p, t in self.sending.items()}
        shared = 0.0
        ports: set[int] = set()
        for job, count in zip(self.kinds, self.left, strict=True):
            if count:
                least = min(job.durations_s) * count
                for p in job.receivers:
                    receiving[p] += least
                if len(job.senders) == 1:
                    sending[job.senders[0]] += least
                else:
                    shared += least
                ports.update(job.senders)
        even = (sum(sending[p] for p in ports) + shared) / len(ports) if ports else 0.0
        return max(self.makespan_s, even, *receiving.values(), *sending.values())

    def descend(self, now: float) -> None:
        """Try every next job; ``now`` is the start of the last one."""
        if self.nodes_left <= 0:
            self.exhausted_budget = True
            return
        self.nodes_left -= 1
        if not any(self.left):
            if self.makespan_s < self.best.makespan_s * (1 - SLACK):
                self.best = run(self.jobs, list(self.order))
            return
        for start, _, kind, candidate in self.branches(now):
            if self.best.makespan_s <= self.floor_s * (1 + SLACK):
                return
            self.enter(start, kind, candidate)

    def branches(self, now: float) -> list[tuple[float, float, int, int]]:
        """Next decisions as (start, -duration, kind, candidate), the most promising first."""
        found = []
        for kind, job in enumerate(self.kinds):
            if not self.left[kind]:
                continue
            ready = max((self.receiving[p] for p in job.receivers), default=0.0)
            for candidate, port in enumerate(job.senders):
                start = max(ready, self.sending[port])
                if start >= now - SLACK * self.best.makespan_s:
                    found.append((start, -job.durations_s[candidate], kind, candidate))
        # Dominance: where one job fits in whole before another could start, starting with the other
        # leaves that time idle for nothing.
        first_end = min((start + -minus_d for start, minus_d, _, _ in found), default=0.0)
        return sorted(branch for branch in found if branch[0] < first_end)

    def enter(self, start: float, kind: int, candidate: int) -> None:
        """Take one decision, search below it, and undo it."""
        job = self.kinds[kind]
        port, end = job.senders[candidate], start + job.durations_s[candidate]
        before = (self.sending[port], [self.receiving[p] for p in job.receivers], self.makespan_s)
        self.sending[port] = end
        for p in job.receivers:
            self.receiving[p] = end
        self.makespan_s = max(self.makespan_s, end)
        self.left[kind] -= 1
        self.order.append(Decision(self.members[kind][self.left[kind]], candidate))
        if self.bound_s(start) < self.best.makespan_s * (1 - SLACK):
            self.descend(start)
        self.order.pop()
        self.left[kind] += 1
        self.sending[port], old_receiving, self.makespan_s = before
        for p, value in zip(job.receivers, old_receiving, strict=True):
            self.receiving[p] = value


def auto(jobs: Sequence[Job], seed: int = 0) -> Schedule:
    """The best of all schedulers; stops as soon as one is known to be optimal."""
    tried = [naive, load_balance, greedy, *([dfs] if len(jobs) <= DFS_JOBS else [])]
    floor = floor_s(jobs) * (1 + SLACK)
    best: Schedule | None = None
    for scheduler in tried:
        found = scheduler(jobs, seed)
        optimal = found.optimal or found.makespan_s <= floor
        if best is None or found.makespan_s < best.makespan_s * (1 - SLACK) or optimal:
            best = Schedule(found.decisions, found.starts_s, found.makespan_s, optimal)
        if optimal:
            break
    return best if best is not None else run(jobs, [], optimal=True)


BY_NAME: dict[str, Callable[[Sequence[Job], int], Schedule]] = {
    "naive": naive,
    "load_balance": load_balance,
    "dfs": dfs,
    "greedy": greedy,
    "auto": auto,
}
