from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmesh.box import Box
from xmesh.planner.cost import CostModel
from xmesh.planner.strategy import (
    best_form,
    chain_chunks,
    estimate_s,
    hops_of,
    hosts_of,
    occupancy,
    ops_of,
    shape_of,
)
from xmesh.planner.transfer import Transfer
from xmesh.topology import Topology

FORMS = ("send_recv", "local_allgather", "global_allgather", "chain", "tree")


def transfer_of(form: str, receivers, sender: int = 0, chunks: int = 4) -> Transfer:
    return Transfer((0,), (Box((0,), (chunks,)),), sender, tuple(receivers), form, 1)


def grid(hosts: int, ranks_per_host: int) -> Topology:
    """Rank 0 on a host of its own, then ``hosts`` hosts with the receivers."""
    ranks = range(hosts * ranks_per_host)
    return Topology([0, *(1 + rank // ranks_per_host for rank in ranks)])


@st.composite
def placed_transfers(draw: st.DrawFn, forms=FORMS) -> tuple[Transfer, Topology]:
    """A transfer between hosts, or inside one, in any relay order."""
    hosts = draw(st.lists(st.integers(0, 4), min_size=2, max_size=14))
    topology = Topology(hosts)
    sender = draw(st.sampled_from(range(len(hosts))))
    inside = [r for r in range(len(hosts)) if r != sender and hosts[r] == hosts[sender]]
    outside = [r for r in range(len(hosts)) if hosts[r] != hosts[sender]]
    pool = draw(st.sampled_from([group for group in (inside, outside) if group]))
    some = draw(st.lists(st.sampled_from(pool), min_size=1, unique=True))
    receivers = [rank for group in hosts_of(some, topology) for rank in group]
    form, chunks = draw(st.sampled_from(forms)), draw(st.integers(1, 9))
    return transfer_of(form, receivers, sender, chunks), topology


def messages(transfer: Transfer, topology: Topology) -> list[tuple[int, int, int]]:
    """(from, to, chunk) of everything that is sent."""
    return [
        (rank, hop.peer, chunk)
        for rank in transfer.ranks
        for hop in hops_of(transfer, topology, rank)
        if hop.kind == "send"
        for chunk in range(hop.first, hop.last)
    ]


# --- hops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_hops_of_a_small_transfer(form, golden):
    lines = []
    for title, topology in (
        ("1 host of 4 receivers", grid(1, 4)),
        ("2 hosts of 2 receivers", grid(2, 2)),
        ("5 hosts of 1 receiver", grid(5, 1)),
        ("sender and 3 receivers on 1 host", Topology([0] * 4)),
    ):
        transfer = transfer_of(form, range(1, topology.num_ranks))
        lines.append(f"{form}, {len(transfer.chunks)} chunks, {title}\n")
        for rank in transfer.ranks:
            hops = hops_of(transfer, topology, rank)
            shown = ", ".join(f"{h.kind} {h.peer} [{h.first}:{h.last}]" for h in hops)
            lines.append(f"  {rank}: {shown or 'nothing'}\n")
    golden(f"hops_{form}.txt", "".join(lines))


@given(placed_transfers())
def test_each_receiver_gets_each_chunk_once_and_the_sender_none(drawn):
    transfer, topology = drawn
    got = sorted((to, chunk) for _, to, chunk in messages(transfer, topology))
    chunks = range(len(transfer.chunks))
    assert got == [(rank, chunk) for rank in sorted(transfer.receivers) for chunk in chunks]


@given(placed_transfers(forms=("chain", "tree")))
def test_a_broadcast_enters_each_host_once(drawn):
    transfer, topology = drawn
    host = topology.host
    entries = [
        (host(to), chunk)
        for source, to, chunk in messages(transfer, topology)
        if host(source) != host(to)
    ]
    hosts = {host(rank) for rank in transfer.receivers} - {host(transfer.sender)}
    assert sorted(entries) == [(h, c) for h in sorted(hosts) for c in range(len(transfer.chunks))]


@given(placed_transfers())
def test_ops_are_the_hops_with_their_regions(drawn):
    transfer, topology = drawn
    for rank in transfer.ranks:
        hops = hops_of(transfer, topology, rank)
        ops = ops_of(transfer, topology, rank)
        assert [(op.kind, op.peer, op.first, op.last) for op in ops] == hops
        for op in ops:
            assert op.volume == op.last - op.first
            assert op.boxes[0].start == (op.first,)


@given(st.integers(2, 40))
def test_a_tree_takes_as_few_steps_as_doubling_does(hosts):
    transfer, topology = transfer_of("tree", range(1, hosts), chunks=1), grid(hosts - 1, 1)
    # Each rank has the chunk after the steps of its parent, and one for each send before its own.
    step = {0: 0}
    waiting = [0]
    while waiting:
        rank = waiting.pop()
        sends = [hop for hop in hops_of(transfer, topology, rank) if hop.kind == "send"]
        for i, hop in enumerate(sends):
            step[hop.peer] = step[rank] + 1 + i
            waiting.append(hop.peer)
    assert len(step) == hosts
    assert 2 ** max(step.values()) < 2 * hosts


# --- cost --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 1), (1, 4), (2, 2), (4, 2)])
def test_occupancy_is_that_of_the_paper(hosts, per_host):
    receivers = hosts * per_host
    assert occupancy("send_recv", hosts, receivers) == hosts * per_host
    assert occupancy("local_allgather", hosts, receivers) == hosts
    assert occupancy("global_allgather", hosts, receivers) == (2 if hosts > 1 else 1)
    assert {occupancy(form, hosts, receivers) for form in ("broadcast", "chain", "tree")} == {1}


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 1), (1, 4), (2, 2), (4, 2)])
def test_estimates_without_latency_are_the_formulas_of_the_paper(hosts, per_host):
    cost = CostModel(1e9, 0, 1e15, 0)
    receivers = range(1, hosts * per_host + 1)
    shape = shape_of(10**9, 0, receivers, grid(hosts, per_host), cost)
    n = hosts * per_host
    assert (shape.hosts, shape.ranks_per_host, shape.receivers) == (hosts, per_host, n)
    assert estimate_s("send_recv", shape) == pytest.approx(n, rel=1e-4)
    assert estimate_s("local_allgather", shape) == pytest.approx(hosts, rel=1e-4)
    ring = (n - 1) / n if hosts > 1 else 0
    assert estimate_s("global_allgather", shape) == pytest.approx(1 + ring, rel=1e-4)
    assert estimate_s("chain", shape, 50) == pytest.approx(1 + (hosts - 1) / 50, rel=1e-4)


@given(st.integers(0, 9), st.integers(1, 6), st.integers(1, 6))
def test_the_form_of_a_broadcast_is_the_faster_one(exponent, hosts, per_host):
    receivers = range(1, hosts * per_host + 1)
    shape = shape_of(10**exponent, 0, receivers, grid(hosts, per_host), CostModel())
    form, seconds, chunks = best_form("broadcast", shape)
    chain = estimate_s("chain", shape, chain_chunks(shape))
    assert seconds == min(chain, estimate_s("tree", shape))
    assert seconds == estimate_s(form, shape, chunks)


def test_small_boxes_take_a_tree_and_large_ones_a_chain():
    topology, receivers = grid(8, 1), range(1, 9)
    forms = [
        best_form("broadcast", shape_of(nbytes, 0, receivers, topology, CostModel()))[0]
        for nbytes in (1, 10**9)
    ]
    assert forms == ["tree", "chain"]


def test_the_chunk_count_of_a_chain_is_where_the_time_is_least():
    shape = shape_of(10**7, 0, range(1, 9), grid(8, 1), CostModel())
    best = min(range(1, 200), key=lambda chunks: estimate_s("chain", shape, chunks))
    assert chain_chunks(shape) == best
