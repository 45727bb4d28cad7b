"""Several NICs per host: transfers are divided over those of both ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layout_pairs

from xmesh.bench.cases import CASES
from xmesh.box import Box
from xmesh.planner import STRATEGIES, CostModel, plan
from xmesh.planner.check import check
from xmesh.planner.demand import Demand, split_over_entries
from xmesh.planner.simulate import simulate
from xmesh.topology import Topology

#: Slow NICs, so that what happens inside a host does not count.
SLOW = CostModel(1e6, 0.0, 1e12, 0.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case{case.number}")
@pytest.mark.parametrize("nics", [2, 4])
def test_the_nine_cases_use_all_nics(case, nics):
    src, dst = case.layouts()
    made = plan(src, dst, topology=Topology.uniform(20, 4, nics), cost=SLOW)
    assert made.makespan_s == pytest.approx(made.lower_bound_s)
    check(made)


@pytest.mark.parametrize("number", [1, 4, 7])
def test_two_nics_carry_half_each_message_by_message(number):
    src, dst = CASES[number - 1].layouts()
    made = plan(src, dst, topology=Topology.uniform(20, 4, 2), cost=SLOW)
    result = simulate(made)
    assert result.makespan_s == pytest.approx(made.lower_bound_s, rel=0.02)
    for busy_s in (result.nic_out_busy_s, result.nic_in_busy_s):
        for first, second in zip(busy_s[::2], busy_s[1::2], strict=True):
            assert first == pytest.approx(second)


def test_a_faster_nic_takes_more():
    topology = Topology([0, 1, 1], [0, 0, 1], nic_bandwidth_Bps=[4e6, 3e6, 1e6])
    demand = Demand((0, 0, 1, 0), (Box((0,), (40_000,)),), (0,), (1, 2), True)
    pieces = split_over_entries([demand], 1, topology, SLOW, 1)
    assert [(piece.receivers, piece.volume) for piece in pieces] == [
        ((1, 2), 30_000),
        ((2, 1), 10_000),
    ]


def test_a_piece_enters_and_leaves_a_host_by_one_nic():
    topology = Topology.uniform(12, 4, 2)
    receivers = tuple(range(4, 12))
    demand = Demand((0, 0, 1, 0), (Box((0,), (64,)),), (0,), receivers, True)
    pieces = split_over_entries([demand], 1, topology, SLOW, 1)
    assert [piece.receivers for piece in pieces] == [
        (4, 6, 7, 5, 8, 10, 11, 9),
        (6, 4, 5, 7, 10, 8, 9, 11),
    ]
    assert [piece.key for piece in pieces] == [(0, 0, 1, 0, 0), (0, 0, 1, 0, 1)]


def test_small_demands_stay_whole():
    topology = Topology.uniform(4, 2, 2)
    demand = Demand((0, 0, 1, 0), (Box((0,), (64,)),), (0,), (2, 3), True)
    assert split_over_entries([demand], 1, topology, SLOW, 33) == [demand]


@given(
    layout_pairs(),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(STRATEGIES),
    st.sampled_from(["auto", "greedy"]),
)
def test_plans_over_several_nics_are_sound(pair, ranks_per_host, nics, strategy, scheduler):
    src, dst = pair
    topology = Topology.uniform(64, ranks_per_host, min(nics, ranks_per_host))
    made = plan(src, dst, "int64", topology, strategy, scheduler, cost=SLOW)
    check(made)
    assert made.makespan_s >= made.lower_bound_s * (1 - 1e-9)
    whole = plan(src, dst, "int64", topology, strategy, "load_balance", cost=SLOW)
    # What is divided is never worse than what the paper's heuristic does with whole tasks.
    assert made.makespan_s <= whole.makespan_s * (1 + 1e-9) or scheduler == "greedy"
