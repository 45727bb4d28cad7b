"""Fair sharing of ports: rates against their definition, and what comes of them."""

from __future__ import annotations

import dataclasses

import pytest
from hand_made import GRIDS, NICS_ONLY, broadcast_plan, listed, span
from hypothesis import given
from hypothesis import strategies as st
from strategies import layout_pairs

from xmesh.bench.cases import CASES
from xmesh.box import Box
from xmesh.errors import OptionError
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import STRATEGIES, CostModel, Plan, Transfer, plan
from xmesh.planner.fair import max_min_rates
from xmesh.planner.messages import Link
from xmesh.planner.plans import ListedTransfers
from xmesh.planner.simulate import simulate
from xmesh.topology import Topology


def fair_s(made: Plan) -> float:
    return simulate(made, sharing="fair").makespan_s


@given(
    st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=20),
    st.lists(st.integers(1, 9), min_size=12, max_size=12),
)
def test_each_flow_is_as_fast_as_any_in_some_full_port(pairs, speeds):
    """The definition of max-min fairness: nobody can gain but at the cost of somebody slower."""
    flows = {pair: Link(2 * pair[0], 2 * pair[1] + 1, True, 0.0, 1.0) for pair in pairs}
    rates = max_min_rates(flows, dict(enumerate(map(float, speeds))))
    used: dict[int, list[float]] = {}
    for pair, rate in rates.items():
        for port in (flows[pair].out, flows[pair].into):
            used.setdefault(port, []).append(rate)
    for port, through in used.items():
        assert sum(through) <= speeds[port] * (1 + 1e-9)
    for pair, rate in rates.items():
        assert any(
            sum(used[port]) >= speeds[port] * (1 - 1e-9) and rate >= max(used[port]) * (1 - 1e-9)
            for port in (flows[pair].out, flows[pair].into)
        )


@pytest.mark.parametrize(("hosts", "per_host"), GRIDS)
@pytest.mark.parametrize("strategy", ["send_recv", "local_allgather"])
def test_a_sender_alone_takes_what_the_paper_says(hosts, per_host, strategy):
    made = broadcast_plan(hosts, per_host, strategy, 1200)
    copies = hosts * per_host if strategy == "send_recv" else hosts
    assert fair_s(made) == pytest.approx(copies * 1200)


@pytest.mark.parametrize(("hosts", "per_host"), GRIDS)
def test_a_chain_takes_the_same_in_both_models(hosts, per_host):
    made = broadcast_plan(hosts, per_host, "broadcast", 1000, chunk_nbytes=10)
    assert fair_s(made) == pytest.approx(simulate(made).makespan_s)


def test_two_senders_into_one_host_get_half_each():
    src = Layout(DeviceMesh([0, 1]), "S0", (8,))
    dst = Layout(DeviceMesh([2]), "R", (8,))
    rows = [Transfer((i,), span(4 * i, 4 * i + 4), i, (2,), "send_recv", 8) for i in range(2)]
    made = listed(src, dst, Topology.one_rank_per_host(3), rows)
    run = simulate(made, sharing="fair")
    assert [(m.source, m.start_s, m.end_s) for m in run.messages] == [(0, 0, 8), (1, 0, 8)]
    assert run.nic_in_busy_s == (0, 0, 8)


@pytest.mark.parametrize("number", [3, 9])
def test_an_order_that_collides_costs_more_than_where_ports_are_exclusive(number):
    """Both senders begin with the same receiver: at half the rate each, not one after the other."""
    src, dst = CASES[number - 1].layouts()
    made = plan(src, dst, topology=Topology.uniform(16, 4), scheduler="naive", cost=NICS_ONLY)
    assert simulate(made).makespan_s == pytest.approx(made.lower_bound_s, rel=0.01)
    assert fair_s(made) > 1.5 * made.lower_bound_s


@given(
    layout_pairs(),
    st.integers(1, 4),
    st.sampled_from(STRATEGIES),
    st.sampled_from(["naive", "auto"]),
)
def test_both_models_move_the_same_and_keep_the_bound(pair, ranks_per_host, strategy, scheduler):
    topology = Topology.uniform(64, ranks_per_host)
    made = plan(pair[0], pair[1], "int64", topology, strategy, scheduler)
    exclusive, fair = simulate(made), simulate(made, sharing="fair")
    assert sorted(m[2:] for m in fair.messages) == sorted(m[2:] for m in exclusive.messages)
    assert fair.host_in_nbytes == exclusive.host_in_nbytes
    assert fair.makespan_s >= made.lower_bound_s * (1 - 1e-9)


def test_a_model_that_is_none_is_refused():
    with pytest.raises(OptionError, match="sharing must be one of exclusive, fair"):
        simulate(broadcast_plan(1, 1, "send_recv", 8), sharing="unfair")


def test_what_the_library_takes_over_does_not_hold_its_sender():
    """Rank 0 has five messages for one host, then one for another, which need not wait."""
    src = Layout(DeviceMesh([0]), "R", (48,))
    boxes = {1: [Box((0,), (40,))], 2: [Box((40,), (48,))]}
    rows = [
        *(Transfer((i,), span(8 * i, 8 * i + 8), 0, (1,), "send_recv", 8) for i in range(5)),
        Transfer((5,), span(40, 48), 0, (2,), "send_recv", 8),
    ]
    starts = {}
    for eager_nbytes in (0.0, 8.0):
        cost = CostModel(1.0, 0.0, 1e15, 0.0, eager_nbytes)
        made = plan(src, Layout.from_boxes(boxes, (48,)), "int8", cost=cost)
        made = dataclasses.replace(made, table=ListedTransfers(tuple(rows)))
        run = simulate(made, sharing="fair")
        assert run.makespan_s == 48
        starts[eager_nbytes] = next(m.start_s for m in run.messages if m.destination == 2)
    # Four sends are under way at a time, so the sixth waits for two to end.
    assert starts == {0.0: 16, 8.0: 0}
