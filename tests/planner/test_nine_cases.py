"""The n -> m cases of the paper, planned at host level."""

from __future__ import annotations

import math

import pytest

from benchmarks.planning_time import CASES
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import Plan, plan
from xmesh.planner.check import check
from xmesh.topology import Topology

# Gbit/s into the destination on 10 Gbit/s NICs: unit tasks, naive, load balance, best order.
EXPECTED = {
    1: (2, 20.0, 20.0, 20.0),
    2: (2, 10.0, 20.0, 20.0),
    3: (4, 13.3, 13.3, 20.0),
    4: (64, 10.7, 10.7, 20.0),
    5: (4, 10.0, 13.3, 20.0),
    6: (4, 10.0, 10.0, 20.0),
    7: (4, 10.0, 10.0, 10.0),
    8: (4, 10.0, 10.0, 10.0),
    9: (4, 13.3, 13.3, 20.0),
}
COLUMN = {"naive": 1, "load_balance": 2, "greedy": 3, "dfs": 3, "auto": 3}


def gbit_per_s(made: Plan, seconds: float) -> float:
    """Throughput as the paper counts it: every element of the array once."""
    return math.prod(made.dst.shape) * made.itemsize * 8e-9 / seconds


@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("scheduler", COLUMN)
def test_throughput_of_each_scheduler(number, scheduler):
    made = CASES[number].plan(scheduler)
    found = gbit_per_s(made, made.makespan_s)
    assert round(found, 1) == EXPECTED[number][COLUMN[scheduler]]
    check(made)


@pytest.mark.parametrize("number", CASES)
def test_tasks_and_the_bound(number):
    made = CASES[number].plan()
    assert len(made.unit_tasks) == EXPECTED[number][0]
    # In all nine cases some order reaches the bound, so the best order is proven to be the best.
    assert round(gbit_per_s(made, made.lower_bound_s), 1) == EXPECTED[number][3]
    assert made.optimal


@pytest.mark.parametrize(("number", "scheduler"), [(3, "naive"), (4, "greedy"), (9, "dfs")])
def test_order(number, scheduler, golden):
    made = CASES[number].plan(scheduler)
    lines = [f"case {number}: {made.src} -> {made.dst}, {scheduler}\n"]
    for transfer in made.transfers():
        boxes = " ".join(map(str, transfer.boxes))
        receivers = ",".join(map(str, transfer.receivers))
        order = ".".join(map(str, transfer.order))
        lines.append(f"{order}: {transfer.sender} -> {receivers} {transfer.strategy} {boxes}\n")
    golden(f"case{number}_{scheduler}.txt", "".join(lines))


# --- past the paper: unit tasks split over senders ---------------------------------------------


def replicated_to_three_hosts(scheduler: str) -> Plan:
    shape = (3072, 64)
    src = Layout(DeviceMesh.arange((2, 4)), "R R", shape)
    dst = Layout(DeviceMesh.arange((3, 4), start=8), "S0 R", shape)
    return plan(src, dst, topology=Topology.uniform(20, 4), scheduler=scheduler)


def test_splitting_lets_two_senders_send_half_the_array_each():
    made = replicated_to_three_hosts("auto")
    sent = [0, 0]
    for transfer in made.transfers():
        sent[made.topology.host(transfer.sender)] += transfer.volume
    assert sent == [3072 * 64 // 2] * 2
    assert made.makespan_s == pytest.approx(made.lower_bound_s)
    check(made)


def test_without_splitting_one_of_two_senders_sends_two_of_three_parts():
    made = replicated_to_three_hosts("load_balance")
    assert made.makespan_s == pytest.approx(made.lower_bound_s * 4 / 3)
