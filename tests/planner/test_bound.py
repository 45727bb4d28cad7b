from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layout_pairs

from xmesh.box import Box
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import CostModel, Plan, plan
from xmesh.planner.simulate import simulate
from xmesh.topology import Topology


def ranks_of(layout: Layout) -> dict[int, frozenset[int]]:
    """Flat index of each element -> ranks that have it."""
    owners: dict[int, set[int]] = {}
    flat = np.arange(int(np.prod(layout.shape))).reshape(layout.shape)
    for rank in layout.ranks:
        for box in layout.boxes(rank):
            for element in np.atleast_1d(flat[box.slices()]).ravel():
                owners.setdefault(int(element), set()).add(rank)
    return {element: frozenset(ranks) for element, ranks in owners.items()}


def bound_s(made: Plan) -> float:
    """The bound, element by element, and over all groups of sending hosts."""
    topology, cost = made.topology, made.cost
    into_host: dict[int, int] = {}
    into_rank: dict[int, int] = {}
    within: dict[int, int] = {}
    leaving: dict[frozenset[int], int] = {}
    held = ranks_of(made.src)
    for element, needing in ranks_of(made.dst).items():
        holders = held[element]
        homes = frozenset(map(topology.host, holders))
        others = {topology.host(rank) for rank in needing} - homes
        for host in others:
            into_host[host] = into_host.get(host, 0) + made.itemsize
        if others:
            leaving[homes] = leaving.get(homes, 0) + made.itemsize
        for rank in needing - holders:
            into_rank[rank] = into_rank.get(rank, 0) + made.itemsize
            if {topology.host(r) for r in holders | needing} == {topology.host(rank)}:
                within[rank] = within.get(rank, 0) + made.itemsize

    def speed(host: int) -> float:
        nics = {topology.nic(rank) for rank in topology.ranks_of_host(host)}
        return sum(cost.bandwidth_Bps(topology, nic) for nic in nics)

    hosts = sorted({host for homes in leaving for host in homes})
    groups = chain.from_iterable(combinations(hosts, n) for n in range(1, len(hosts) + 1))
    memory = cost.intra_bandwidth_Bps
    candidates = [
        0.0,
        *(nbytes / speed(host) for host, nbytes in into_host.items()),
        *(
            sum(nbytes for homes, nbytes in leaving.items() if homes <= set(group))
            / sum(map(speed, group))
            for group in groups
        ),
        *(
            nbytes / (memory + cost.bandwidth_Bps(topology, topology.nic(rank)))
            for rank, nbytes in into_rank.items()
        ),
        *(nbytes / memory for nbytes in within.values()),
    ]
    return max(candidates)


@given(
    layout_pairs(max_ndim=3, explicit=True),
    st.integers(2, 16),
    st.integers(1, 2),
    st.sampled_from((1.0, 3.0, 50.0)),
)
def test_the_bound_is_what_a_look_at_every_element_gives(pair, ranks_per_host, nics, memory):
    topology = Topology.uniform(16, ranks_per_host, nics)
    src, dst = pair
    made = plan(src, dst, "int16", topology, scheduler="naive", cost=CostModel(2.0, 0, memory, 0))
    assert made.lower_bound_s == pytest.approx(bound_s(made), rel=1e-9)


def test_memory_and_nic_may_serve_a_rank_at_once():
    # Rank 0 gets 4 parts from rank 1 beside it, and at the same time one over its NIC from rank 2.
    src = Layout.from_boxes({1: [Box((0,), (4,))], 2: [Box((4,), (5,))]}, (5,))
    dst = Layout.from_boxes({0: [Box((0,), (5,))]}, (5,))
    made = plan(src, dst, "int8", Topology([0, 0, 1]), cost=CostModel(1.0, 0.0, 4.0, 0.0))
    assert made.lower_bound_s == made.makespan_s == simulate(made).makespan_s == 1.0


def test_nics_of_their_own_speed_count():
    mesh, other = DeviceMesh([0]), DeviceMesh([1, 2])
    topology = Topology([0, 1, 2], nic_bandwidth_Bps=[8.0, 8.0, 1.0])
    made = plan(Layout(mesh, "R", (8,)), Layout(other, "S0", (8,)), "int8", topology)
    assert made.lower_bound_s == 4.0


def test_where_nothing_moves_the_bound_is_zero():
    layout = Layout(DeviceMesh([0, 1]), "S0", (8,))
    made = plan(layout, layout)
    assert (made.lower_bound_s, made.makespan_s, made.transfers()) == (0.0, 0.0, ())
    assert made.optimal
