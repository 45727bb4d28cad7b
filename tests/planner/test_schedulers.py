from __future__ import annotations

import os
import subprocess
import sys
from itertools import permutations, product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmesh.planner.schedule import Decision, Job, floor_s, run
from xmesh.planner.schedulers import (
    BY_NAME,
    SCHEDULERS,
    auto,
    balanced_senders,
    dfs,
    greedy,
    load_balance,
    naive,
)

PORTS = range(4)


@st.composite
def jobs_lists(draw: st.DrawFn, max_jobs: int = 8, max_senders: int = 3) -> list[Job]:
    """Jobs of whole seconds, so that sums are exact; some alike."""
    jobs = []
    for _ in range(draw(st.integers(0, max_jobs))):
        senders = draw(st.lists(st.sampled_from(PORTS), min_size=1, max_size=3, unique=True))
        senders = senders[:max_senders]
        receivers = draw(st.lists(st.sampled_from(PORTS), min_size=1, max_size=3, unique=True))
        durations = tuple(float(draw(st.integers(1, 9))) for _ in senders)
        jobs.append(Job(tuple(senders), tuple(receivers), durations))
    return jobs


def sides(job: Job, candidate: int) -> set[tuple[str, int]]:
    """The ports that a job takes, each with its side."""
    return {("out", job.senders[candidate]), *(("in", port) for port in job.receivers)}


def all_choices(jobs):
    return product(*(range(len(job.senders)) for job in jobs))


# --- running a schedule ------------------------------------------------------------------------


@given(jobs_lists(), st.randoms(use_true_random=False))
def test_jobs_that_share_a_side_of_a_port_do_not_overlap_and_none_waits_for_nothing(jobs, random):
    order = [Decision(i, random.randrange(len(job.senders))) for i, job in enumerate(jobs)]
    random.shuffle(order)
    schedule = run(jobs, order)
    assert schedule.decisions == tuple(order)
    done: list[tuple[set[tuple[str, int]], float]] = []
    for decision, start in zip(schedule.decisions, schedule.starts_s, strict=True):
        taken = sides(jobs[decision.job], decision.candidate)
        # In order, so it starts when the last of those before it with a common side has ended.
        assert start == max((end for other, end in done if other & taken), default=0.0)
        done.append((taken, start + jobs[decision.job].durations_s[decision.candidate]))
    assert schedule.makespan_s == max((end for _, end in done), default=0.0)


def test_the_two_sides_of_a_port_are_independent():
    jobs = [Job((0,), (1,), (3.0,)), Job((1,), (0,), (3.0,))]
    assert run(jobs, [Decision(0, 0), Decision(1, 0)]).makespan_s == 3.0


# --- what each scheduler is --------------------------------------------------------------------


@given(jobs_lists())
def test_every_scheduler_gives_each_job_once(jobs):
    for name, scheduler in BY_NAME.items():
        found = scheduler(jobs, 0)
        assert sorted(d.job for d in found.decisions) == list(range(len(jobs))), name
        assert found.makespan_s == run(jobs, found.decisions).makespan_s
        assert found.makespan_s >= floor_s(jobs) * (1 - 1e-9)


@given(jobs_lists())
def test_naive_takes_the_first_sender_in_index_order(jobs):
    assert naive(jobs).decisions == tuple(Decision(i, 0) for i in range(len(jobs)))


@given(jobs_lists())
def test_load_balance_gives_the_longest_job_first_to_whoever_ends_it_first(jobs):
    chosen = {d.job: d.candidate for d in load_balance(jobs).decisions}
    assert list(chosen) == list(range(len(jobs)))
    work = dict.fromkeys(PORTS, 0.0)
    longest_first = sorted(chosen, key=lambda i: (-max(jobs[i].durations_s), i))
    for i in longest_first:
        ends = [work[p] + s for p, s in zip(jobs[i].senders, jobs[i].durations_s, strict=True)]
        assert ends[chosen[i]] == min(ends)
        assert min(ends) not in ends[: chosen[i]]
        work[jobs[i].senders[chosen[i]]] = ends[chosen[i]]


@given(jobs_lists())
def test_greedy_keeps_the_balanced_senders_and_auto_is_never_beaten(jobs):
    found = greedy(jobs)
    assert {d.job: d.candidate for d in found.decisions} == dict(enumerate(balanced_senders(jobs)))
    best = auto(jobs).makespan_s
    assert best <= min(BY_NAME[name](jobs, 0).makespan_s for name in SCHEDULERS) * (1 + 1e-9)


# --- how good they are -------------------------------------------------------------------------


def exhausted_s(jobs: list[Job]) -> float:
    """The best makespan over all choices of senders and all orders."""
    return min(
        run(jobs, map(Decision, order, [choice[i] for i in order])).makespan_s
        for choice in all_choices(jobs)
        for order in permutations(range(len(jobs)))
    )


@settings(max_examples=60)
@given(jobs_lists(max_jobs=5, max_senders=2))
def test_dfs_finds_what_exhaustion_finds_and_says_that_it_is_the_best(jobs):
    best = exhausted_s(jobs)
    found = dfs(jobs)
    assert found.optimal
    assert found.makespan_s == pytest.approx(best)
    assert floor_s(jobs) <= best * (1 + 1e-9)


def test_dfs_finds_what_exhaustion_finds_for_six_jobs():
    random = Random(6)
    for _ in range(8):
        jobs = [random_job(random, max_senders=1 + (i < 2)) for i in range(6)]
        assert dfs(jobs).makespan_s == pytest.approx(exhausted_s(jobs))


@given(jobs_lists())
def test_nothing_said_to_be_optimal_is_beaten_by_another(jobs):
    found = {name: scheduler(jobs, 0) for name, scheduler in BY_NAME.items()}
    best = min(schedule.makespan_s for schedule in found.values())
    for name, schedule in found.items():
        assert not schedule.optimal or schedule.makespan_s <= best * (1 + 1e-9), name


def hard_jobs() -> list[Job]:
    """Jobs whose best schedule ends after the load of every port, so that search is needed."""
    random = Random(16)
    return [random_job(random, max_senders=2) for _ in range(8)]


def test_dfs_claims_nothing_when_its_budget_ends():
    assert not dfs(hard_jobs(), node_budget=3).optimal
    assert dfs(hard_jobs()).optimal


def random_job(random: Random, max_senders: int) -> Job:
    senders = tuple(random.sample(PORTS, random.randint(1, max_senders)))
    receivers = tuple(sorted(random.sample(PORTS, random.randint(1, 3))))
    return Job(senders, receivers, (float(random.randint(1, 20)),) * len(senders))


def beatable(jobs: list[Job], limit_s: float) -> bool:
    """Whether some schedule ends before ``limit_s``: exact, by dynamic programming over sets.

    For each set of jobs done it keeps the port times that no others beat in every port. Every
    schedule without needless waits starts its jobs in some order, so each is among those built.
    """
    size = len(jobs)

    def left_s(done: int) -> list[float]:
        """Work that waits for each receiving port."""
        return [
            sum(
                min(j.durations_s)
                for i, j in enumerate(jobs)
                if not done >> i & 1 and p in j.receivers
            )
            for p in PORTS
        ]

    fronts: dict[int, set[tuple[float, ...]]] = {0: {(0.0,) * (2 * len(PORTS))}}
    for done in sorted(range(2**size), key=lambda d: (d.bit_count(), d)):
        times = sorted(fronts.pop(done, ()))
        kept: list[tuple[float, ...]] = []
        for time in times:
            if not any(all(a <= b for a, b in zip(k, time, strict=True)) for k in kept):
                kept.append(time)
        if done == 2**size - 1:
            return bool(kept)
        for i, job in enumerate(jobs):
            if done >> i & 1:
                continue
            after = done | 1 << i
            left = left_s(after)
            for time in kept:
                for port, duration in zip(job.senders, job.durations_s, strict=True):
                    into = [len(PORTS) + p for p in job.receivers]
                    end = max(time[port], *(time[p] for p in into)) + duration
                    new = list(time)
                    for p in (port, *into):
                        new[p] = end
                    ends = [t + w for t, w in zip(new[len(PORTS) :], left, strict=True)]
                    if max(*new, *ends) < limit_s:
                        fronts.setdefault(after, set()).add(tuple(new))
    return False


def test_auto_is_within_five_percent_of_the_best_on_200_instances():
    random = Random(200)
    for instance in range(200):
        jobs = [random_job(random, max_senders=3) for _ in range(random.randint(2, 8))]
        found = auto(jobs)
        assert not beatable(jobs, found.makespan_s / 1.05), f"instance {instance}: {jobs}"


def test_the_exact_method_agrees_with_exhaustion():
    random = Random(3)
    for _ in range(20):
        jobs = [random_job(random, max_senders=2) for _ in range(4)]
        best = exhausted_s(jobs)
        assert beatable(jobs, best + 0.5)
        assert not beatable(jobs, best)


# --- determinism -------------------------------------------------------------------------------

PROGRAM = """
from random import Random
from xmesh.planner.schedule import Job
from xmesh.planner.schedulers import BY_NAME
random = Random(5)
jobs = [
    Job(tuple(random.sample(range(9), 3)), tuple(random.sample(range(9), 2)), (i % 7 + 1.0,) * 3)
    for i in range(40)
]
for name, scheduler in BY_NAME.items():
    print(name, [(d.job, d.candidate) for d in scheduler(jobs, 3).decisions])
"""


def test_schedules_do_not_depend_on_the_seed_of_hashes():
    root = Path(__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1


def test_the_seed_draws_other_orders():
    assert len({greedy(hard_jobs(), seed).decisions for seed in range(8)}) > 1
