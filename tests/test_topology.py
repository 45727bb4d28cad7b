from __future__ import annotations

import itertools
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmesh.errors import TopologyError
from xmesh.topology import Topology


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    num_ranks = draw(st.integers(1, 12))
    hosts = draw(st.lists(st.sampled_from("abcd"), min_size=num_ranks, max_size=num_ranks))
    nics = draw(st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks))
    topology = Topology(hosts, nics)
    if draw(st.booleans()):
        return topology
    speeds = st.lists(st.floats(1, 1e12), min_size=topology.num_nics, max_size=topology.num_nics)
    return Topology(hosts, nics, nic_bandwidth_Bps=draw(speeds))


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(TopologyError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_hosts_are_numbered_by_first_appearance():
    topology = Topology(["b", "a", "b", "c"])
    assert topology.host_of_rank == (0, 1, 0, 2)
    assert topology.host_names == ("b", "a", "c")
    assert [topology.host_name(rank) for rank in range(4)] == ["b", "a", "b", "c"]
    assert (topology.num_ranks, topology.num_hosts, topology.num_nics) == (4, 3, 3)
    assert Topology({3: "c", 0: "b", 2: "b", 1: "a"}) == topology
    assert Topology([7, 3]).host_names == ("host7", "host3")
    assert Topology([0, 0, 1], host_names=["x", "y"]).host_name(2) == "y"


@given(topologies())
def test_indices_agree(topology):
    ranks = range(topology.num_ranks)
    pairs = sorted({(topology.host(rank), topology.nic_of_rank[rank]) for rank in ranks})
    assert topology.num_nics == len(pairs)
    for rank in ranks:
        nic = topology.nic(rank)
        assert pairs[nic] == (topology.host(rank), topology.nic_of_rank[rank])
        assert topology.nic_host(nic) == topology.host(rank)
        assert topology.host_names[topology.host(rank)] == topology.host_name(rank)
    by_host = [topology.ranks_of_host(host) for host in range(topology.num_hosts)]
    assert sorted(itertools.chain(*by_host)) == list(ranks)
    assert all(list(group) == sorted(group) for group in by_host)
    assert [group[0] for group in by_host] == sorted(group[0] for group in by_host)
    topology.require(ranks)


@given(topologies())
def test_round_trips(topology):
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology
    assert topology.nic(0) >= 0  # fills the cache
    copy = pickle.loads(pickle.dumps(topology))
    assert (copy, hash(copy)) == (topology, hash(topology))
    assert "_nic_of_rank" not in vars(copy)


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 4))
def test_uniform(num_ranks, ranks_per_host, nics_per_host):
    topology = Topology.uniform(num_ranks, ranks_per_host, nics_per_host)
    assert topology.num_hosts == -(-num_ranks // ranks_per_host)
    for rank in range(num_ranks):
        assert topology.host(rank) == rank // ranks_per_host
        assert 0 <= topology.nic_of_rank[rank] < nics_per_host
    # Along the ranks, NICs never go back: each NIC has a block of them.
    nics = [topology.nic(rank) for rank in range(num_ranks)]
    assert nics == sorted(nics)
    if num_ranks >= ranks_per_host >= nics_per_host:
        sizes = np.bincount(topology.nic_of_rank[:ranks_per_host], minlength=nics_per_host)
        assert sizes.max() - sizes.min() <= 1


def test_uniform_examples():
    assert Topology.uniform(4, 2) == Topology([0, 0, 1, 1])
    assert Topology.one_rank_per_host(3) == Topology([0, 1, 2])
    assert Topology.uniform(8, 4, 2).nic_of_rank == (0, 0, 1, 1) * 2
    assert str(Topology.uniform(8, 4, 2)) == "8 ranks on 2 hosts with 4 NICs"


def test_thousands_of_ranks():
    topology = Topology.uniform(8192, 8, 4)
    assert (topology.num_hosts, topology.num_nics) == (1024, 4096)
    assert topology.nic(8191) == 4095
    assert topology.ranks_of_host(1023) == tuple(range(8184, 8192))


def test_require_names_the_strangers():
    topology = Topology.uniform(4, 2)
    assert refusal(topology.require, [0, 7, -1]) == (
        "every rank needs a host in the topology\n"
        "  values:  not in it: ranks 7, -1\n"
        "  context: topology of ranks 0..3 on 2 hosts\n"
        "  remedy:  give the topology of the whole communicator, "
        "one host_of_rank entry for every rank"
    )
    assert "not in it: rank 4" in refusal(topology.host, 4)
    assert "not in it: rank -1" in refusal(topology.nic, -1)
    assert refusal(topology.require, range(4, 40)).count(",") == 17
    assert "NIC 2" in refusal(topology.nic_host, 2)
    assert "give an index from 0 to 1" in refusal(topology.ranks_of_host, 2)


@pytest.mark.parametrize(
    ("kwargs", "phrase"),
    [
        ({"host_of_rank": []}, "host_of_rank needs an entry for every rank"),
        ({"host_of_rank": None}, "host_of_rank needs an entry for every rank"),
        ({"host_of_rank": "ab"}, "host_of_rank needs an entry for every rank"),
        ({"host_of_rank": {0: "a", 2: "b"}}, "2 keys, and no rank 1"),
        ({"host_of_rank": [0, 0], "nic_of_rank": [0]}, "1 entries for 2 ranks"),
        ({"host_of_rank": [0], "nic_of_rank": [-1]}, "the index >= 0 of a NIC"),
        ({"host_of_rank": [0], "nic_of_rank": [0.5]}, "the index >= 0 of a NIC"),
        ({"host_of_rank": [0, 1], "host_names": ["a", "a"]}, "tell the hosts apart"),
        ({"host_of_rank": [0, "host0"]}, "tell the hosts apart"),
        ({"host_of_rank": [1, 0], "host_names": ["a", "b"]}, "put the names into host_of_rank"),
        ({"host_of_rank": [0, 1], "host_names": ["a"]}, "hosts [0, 1], 1 names"),
        ({"host_of_rank": [0, 1], "nic_bandwidth_Bps": [1e9]}, "each of the 2 NICs"),
        ({"host_of_rank": [0], "nic_bandwidth_Bps": [0]}, "a finite number > 0"),
        ({"host_of_rank": [0], "nic_bandwidth_Bps": [float("inf")]}, "a finite number > 0"),
        ({"host_of_rank": [0], "nic_bandwidth_Bps": [float("nan")]}, "a finite number > 0"),
    ],
)
def test_error_texts(kwargs, phrase):
    text = refusal(Topology, **kwargs)
    assert phrase in text
    assert "values:" in text
    assert "remedy:" in text


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (True, 1, 1), (1.0, 1, 1)])
def test_uniform_refuses(counts):
    assert f"num_ranks={counts[0]!r}" in refusal(Topology.uniform, *counts)


@pytest.mark.parametrize("data", [{}, None, {"host_of_rank": [0]}])
def test_json_that_is_no_topology(data):
    assert "the JSON of a topology holds host_of_rank" in refusal(Topology.from_json, data)
