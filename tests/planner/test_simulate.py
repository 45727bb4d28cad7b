from __future__ import annotations

import dataclasses

import pytest
from hand_made import GRIDS, NICS_ONLY, broadcast_plan, listed, span
from hypothesis import given
from hypothesis import strategies as st
from strategies import layout_pairs

from benchmarks.planning_time import CASES
from xmesh.box import Box
from xmesh.errors import PlanError
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import STRATEGIES, CostModel, Plan, Transfer, plan
from xmesh.planner.plans import ListedTransfers
from xmesh.planner.simulate import Message, Simulation, simulate
from xmesh.planner.strategy import Hop
from xmesh.topology import Topology

# --- the closed forms of the paper, section 3.1 ------------------------------------------------


@pytest.mark.parametrize(("hosts", "per_host"), GRIDS)
def test_send_recv_takes_a_copy_for_each_receiver(hosts, per_host):
    made = broadcast_plan(hosts, per_host, "send_recv", 1000)
    assert simulate(made).makespan_s == pytest.approx(hosts * per_host * 1000)


@pytest.mark.parametrize(("hosts", "per_host"), GRIDS)
def test_local_allgather_takes_a_copy_for_each_host(hosts, per_host):
    made = broadcast_plan(hosts, per_host, "local_allgather", 1200)
    assert simulate(made).makespan_s == pytest.approx(hosts * 1200)


@pytest.mark.parametrize(("hosts", "per_host"), GRIDS)
def test_global_allgather_takes_about_two_copies(hosts, per_host):
    """2t - t/n for n = A*B parts on two or more hosts, which the paper counts as 2t.

    The sender is busy for n steps of t/n. Its last part then goes round n - 1 hops of the ring,
    which has long passed all others on. On one host the ring crosses no NIC, and is free here.
    """
    n = hosts * per_host
    steps = n if hosts == 1 else 2 * n - 1
    made = broadcast_plan(hosts, per_host, "global_allgather", 60 * n)
    assert simulate(made).makespan_s == pytest.approx(steps * 60)


@pytest.mark.parametrize(("hosts", "per_host"), GRIDS)
@pytest.mark.parametrize("chunks", [1, 10, 100])
def test_broadcast_takes_one_copy_and_a_chunk_for_each_host_after_the_first(
    hosts, per_host, chunks
):
    """t + (A - 1) * t / K, the paper's t + A * t / K less the hop from the sender.

    The first chunk reaches the last of A hosts after A steps of t/K, the other K - 1 follow it
    step by step. The paper counts one step more.
    """
    made = broadcast_plan(hosts, per_host, "broadcast", 1000, chunk_nbytes=1000 // chunks)
    (transfer,) = made.transfers()
    whole = dataclasses.replace(transfer, strategy="chain", chunk_volume=1000 // chunks)
    made = dataclasses.replace(made, table=ListedTransfers((whole,)))
    expected = 1000 + (hosts - 1) * 1000 / chunks
    assert simulate(made).makespan_s == pytest.approx(expected)


def test_latency_is_paid_on_the_way_and_does_not_hold_the_port():
    cost = CostModel(1.0, 5.0, 1e15, 0.0)
    made = broadcast_plan(1, 1, "send_recv", 30, cost=cost, chunk_nbytes=10)
    assert [(m.start_s, m.end_s) for m in simulate(made).messages] == [(0, 15), (10, 25), (20, 35)]


# --- ports -------------------------------------------------------------------------------------


def test_of_the_messages_that_could_start_the_first_in_order_does():
    # Two senders, two receivers, each on a host of its own.
    src = Layout(DeviceMesh([0, 1]), "S0", (8,))
    dst = Layout(DeviceMesh([2, 3]), "S0", (8,))
    parts = [(0, 2, span(0, 2)), (0, 2, span(2, 4)), (1, 3, span(4, 8))]
    rows = [
        Transfer((i,), box, sender, (receiver,), "send_recv", 8)
        for i, (sender, receiver, box) in enumerate(parts)
    ]
    found = simulate(listed(src, dst, Topology.one_rank_per_host(4), rows)).messages
    assert [(m.order, m.start_s) for m in found] == [((0,), 0), ((2,), 0), ((1,), 2)]


def test_messages_between_two_ranks_keep_their_order():
    # Rank 1 has its own half for rank 2 at once, but the half that it relays was posted first.
    src = Layout(DeviceMesh([0, 1]), "S0", (8,))
    needs = {1: [Box((0,), (8,))], 2: [Box((0,), (8,))]}
    rows = [
        Transfer((0,), span(0, 4), 0, (1, 2), "chain", 4),
        Transfer((1,), span(4, 8), 1, (2,), "chain", 4),
    ]
    dst = Layout.from_boxes(needs, (8,))
    found = simulate(listed(src, dst, Topology.one_rank_per_host(3), rows)).messages
    assert [(m.source, m.order, m.start_s) for m in found] == [
        (0, (0,), 0),
        (1, (0,), 4),
        (1, (1,), 8),
    ]


def test_nics_are_full_duplex_and_shared_by_the_ranks_of_a_host():
    src = Layout(DeviceMesh([0, 1, 2, 3]), "S0", (8,))
    swapped = Layout(DeviceMesh([2, 3, 0, 1]), "S0", (8,))
    made = plan(src, swapped, "int8", Topology.uniform(4, 2), strategy="send_recv", cost=NICS_ONLY)
    run = simulate(made)
    assert run.makespan_s == 4
    assert [run.nic_out_busy_s, run.nic_in_busy_s] == [(4, 4)] * 2
    two_nics = Topology.uniform(4, 2, nics_per_host=2)
    made = plan(src, swapped, "int8", two_nics, strategy="send_recv", cost=NICS_ONLY)
    assert simulate(made).makespan_s == 2


def test_the_slower_nic_sets_the_pace_and_the_topology_overrides_the_cost():
    topology = Topology([0, 1], nic_bandwidth_Bps=[4.0, 2.0])
    made = broadcast_plan(1, 1, "send_recv", 8, topology=topology)
    assert simulate(made).makespan_s == 4
    assert simulate(made, CostModel(100.0, 0.0)).makespan_s == 4


def test_inside_a_host_ranks_take_turns_at_the_bandwidth_of_the_memory():
    made = broadcast_plan(
        1, 3, "send_recv", 8, topology=Topology([0] * 4), cost=CostModel(1.0, 0, 2.0, 0.5)
    )
    run = simulate(made)
    assert [(m.start_s, m.end_s) for m in run.messages] == [(0, 4.5), (4, 8.5), (8, 12.5)]
    assert run.host_out_nbytes == run.host_in_nbytes == (0,)
    assert run.nic_out_busy_s == (0,)


def test_another_cost_model_can_be_asked_for():
    made = broadcast_plan(1, 1, "send_recv", 100)
    assert simulate(made, CostModel(10.0, 1.0)).makespan_s == 11


@pytest.mark.parametrize("number", CASES)
def test_the_nine_cases_come_within_a_hundredth_of_the_bound(number):
    made = CASES[number].plan()
    assert made.lower_bound_s < simulate(made).makespan_s < made.lower_bound_s * 1.01


# --- any plan ----------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ranks_per_host = draw(st.integers(1, 16))
    bandwidths = st.floats(1e3, 1e9)
    latencies = st.floats(0, 1e-3)
    return plan(
        *draw(layout_pairs(max_ndim=3, explicit=True)),
        "int16",
        Topology.uniform(16, ranks_per_host, draw(st.integers(1, ranks_per_host))),
        strategy=draw(st.sampled_from((*STRATEGIES, "auto"))),
        scheduler=draw(st.sampled_from(("naive", "greedy"))),
        cost=CostModel(*(draw(s) for s in (bandwidths, latencies) * 2)),
        chunk_nbytes=draw(st.sampled_from((1, 16, 4096))),
    )


@given(plans())
def test_no_plan_beats_its_lower_bound(made):
    assert simulate(made).makespan_s >= made.lower_bound_s * (1 - 1e-9)


@given(plans())
def test_the_timeline_is_what_the_rules_allow(made):
    run = simulate(made)
    topology = made.topology
    free_s: dict[tuple[str, bool, int], float] = {}
    there_s: dict[tuple[tuple[int, ...], int, int], float] = {
        (t.order, chunk, t.sender): 0.0 for t in made.transfers() for chunk in range(len(t.chunks))
    }
    assert list(run.messages) == sorted(run.messages, key=lambda m: m.start_s)
    for m in run.messages:
        crosses = topology.host(m.source) != topology.host(m.destination)
        latency, bandwidth = made.cost.link(topology, m.source, m.destination)
        assert m.start_s >= there_s[m.order, m.chunk, m.source] * (1 - 1e-9)
        for side, rank in (("out", m.source), ("in", m.destination)):
            port = (side, crosses, topology.nic(rank) if crosses else rank)
            assert m.start_s >= free_s.get(port, 0.0) * (1 - 1e-9)
            free_s[port] = m.start_s + m.nbytes / bandwidth
        assert m.end_s == pytest.approx(m.start_s + m.nbytes / bandwidth + latency)
        there_s[m.order, m.chunk, m.destination] = m.end_s
    assert run.makespan_s == max((m.end_s for m in run.messages), default=0.0)


@given(plans())
def test_bytes_are_conserved(made):
    run = simulate(made)
    received: dict[int, int] = {}
    for m in run.messages:
        received[m.destination] = received.get(m.destination, 0) + m.nbytes
    wanted: dict[int, int] = {}
    for transfer in made.transfers():
        for rank in transfer.receivers:
            wanted[rank] = wanted.get(rank, 0) + transfer.volume * made.itemsize
    assert received == wanted
    crossing = [
        m for m in run.messages if made.topology.host(m.source) != made.topology.host(m.destination)
    ]
    assert sum(run.host_out_nbytes) == sum(run.host_in_nbytes) == sum(m.nbytes for m in crossing)
    for nbytes, side in ((run.host_out_nbytes, "source"), (run.host_in_nbytes, "destination")):
        for host, total in enumerate(nbytes):
            assert total == sum(
                m.nbytes for m in crossing if made.topology.host(getattr(m, side)) == host
            )


@pytest.mark.parametrize("shape", [(0,), (8,)])
def test_where_nothing_moves_it_takes_no_time(shape):
    layout = Layout(DeviceMesh([0, 1]), "S0", shape)
    assert simulate(plan(layout, layout)) == Simulation(0.0, (), (0, 0), (0, 0), (0, 0), (0, 0))


def test_a_plan_that_hangs_is_refused(monkeypatch):
    made = broadcast_plan(2, 1, "broadcast", 8)

    def relay_alone(transfer, topology, rank):
        return [Hop("send", 2, 0, 1)] if rank == 1 else []

    monkeypatch.setattr("xmesh.planner.messages.hops_of", relay_alone)
    with pytest.raises(PlanError, match="1 messages wait for ever, first chunk 0 from rank 1"):
        simulate(made)


def test_the_timeline_names_its_parts():
    made = broadcast_plan(1, 1, "send_recv", 8)
    assert simulate(made).messages == (Message(0.0, 8.0, 0, 1, (0,), 0, 8),)
