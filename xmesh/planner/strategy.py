"""Strategies: how one transfer becomes sends and receives (paper section 3.1).

Each strategy is a function from a transfer and one of its ranks to that rank's hops, in the order
in which they are posted. A hop may only be sent once its chunks have arrived, and hops between two
ranks keep their order; nothing else is implied, so a relay passes a chunk on as soon as it has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xmesh.planner.cost import CostModel
from xmesh.planner.transfer import Op, Transfer
from xmesh.topology import Topology

STRATEGIES = ("send_recv", "local_allgather", "global_allgather", "broadcast")


class Hop(NamedTuple):
    """Chunks ``first`` to ``last`` (exclusive) from or to a peer."""

    kind: str
    peer: int
    first: int
    last: int


def _part(transfer: Transfer, index: int, count: int) -> tuple[int, int]:
    """Chunk range of one of ``count`` parts; may be empty."""
    total = len(transfer.chunks)
    return total * index // count, total * (index + 1) // count


def _send_recv(transfer: Transfer, topology: Topology, rank: int) -> list[Hop]:
    """The sender sends everything to each receiver in turn."""
    total = len(transfer.chunks)
    if rank == transfer.sender:
        return [Hop("send", peer, 0, total) for peer in transfer.receivers]
    return [Hop("recv", transfer.sender, 0, total)]


def _local_allgather(transfer: Transfer, topology: Topology, rank: int) -> list[Hop]:
    """One part to each receiver of a host; the receivers of that host exchange their parts."""
    groups = hosts_of(transfer.receivers, topology)
    if rank == transfer.sender:
        return [
            Hop("send", peer, *_part(transfer, i, len(group)))
            for group in groups
            for i, peer in enumerate(group)
        ]
    group = next(group for group in groups if rank in group)
    own = _part(transfer, group.index(rank), len(group))
    hops = [Hop("recv", transfer.sender, *own)]
    for i, peer in enumerate(group):
        if peer != rank:
            hops.append(Hop("send", peer, *own))
            hops.append(Hop("recv", peer, *_part(transfer, i, len(group))))
    return hops


def _global_allgather(transfer: Transfer, topology: Topology, rank: int) -> list[Hop]:
    """One part to each receiver; a ring over all of them completes it."""
    ring = transfer.receivers
    n = len(ring)
    if rank == transfer.sender:
        return [Hop("send", peer, *_part(transfer, i, n)) for i, peer in enumerate(ring)]
    own = ring.index(rank)
    hops = [Hop("recv", transfer.sender, *_part(transfer, own, n))]
    for step in range(n - 1):
        hops.append(Hop("send", ring[(own + 1) % n], *_part(transfer, (own - step) % n, n)))
        hops.append(Hop("recv", ring[own - 1], *_part(transfer, (own - step - 1) % n, n)))
    return hops


def _chain(transfer: Transfer, topology: Topology, rank: int) -> list[Hop]:
    """Each rank passes each chunk to the next, host by host: one copy in and out of each NIC."""
    total = len(transfer.chunks)
    ranks = transfer.ranks
    place = ranks.index(rank)
    hops = []
    if place > 0:
        hops.append(Hop("recv", ranks[place - 1], 0, total))
    if place + 1 < len(ranks):
        hops.append(Hop("send", ranks[place + 1], 0, total))
    return hops


def _tree(transfer: Transfer, topology: Topology, rank: int) -> list[Hop]:
    """A binomial tree over hosts, then one inside each host: few steps, one copy into each host."""
    total = len(transfer.chunks)
    groups = hosts_of(transfer.receivers, topology)
    leaders = [transfer.sender, *(group[0] for group in groups)]
    if topology.host(groups[0][0]) == topology.host(transfer.sender):
        # Inside one host there is one tree, with the sender at its root.
        levels: list[Sequence[int]] = [[transfer.sender, *groups[0]]]
    else:
        levels = [leaders, *(group for group in groups if rank in group)]
    hops: list[Hop] = []
    for members in levels:
        if rank in members:
            place = list(members).index(rank)
            if place > 0:
                parent = members[place & (place - 1)]
                hops.append(Hop("recv", parent, 0, total))
            hops += [Hop("send", members[c], 0, total) for c in _children(place, len(members))]
    return hops


def _children(place: int, count: int) -> list[int]:
    """Children in a binomial tree, the deepest subtree first; a parent clears the lowest bit."""
    step = 1
    children = []
    while place + step < count and not place & step:
        children.append(place + step)
        step *= 2
    return children[::-1]


_LOWER: dict[str, Callable[[Transfer, Topology, int], list[Hop]]] = {
    "send_recv": _send_recv,
    "local_allgather": _local_allgather,
    "global_allgather": _global_allgather,
    "chain": _chain,
    "tree": _tree,
}


def hops_of(transfer: Transfer, topology: Topology, rank: int) -> list[Hop]:
    """Hops of one rank of a transfer, in posting order; hops without a chunk are left out."""
    lowered = _LOWER[transfer.strategy](transfer, topology, rank)
    return [hop for hop in lowered if hop.first < hop.last]


def ops_of(transfer: Transfer, topology: Topology, rank: int) -> list[Op]:
    """The same as ``hops_of``, with the regions spelled out."""
    ops = []
    for kind, peer, first, last in hops_of(transfer, topology, rank):
        whole = first == 0 and last == len(transfer.chunks)
        boxes = (
            transfer.boxes
            if whole
            else tuple(box for chunk in transfer.chunks[first:last] for box in chunk)
        )
        ops.append(Op(kind, peer, transfer, first, last, boxes))
    return ops


def hosts_of(receivers: Sequence[int], topology: Topology) -> list[list[int]]:
    """Receivers grouped by host, in their order."""
    groups: dict[int, list[int]] = {}
    for rank in receivers:
        groups.setdefault(topology.host(rank), []).append(rank)
    return list(groups.values())


class Shape(NamedTuple):
    """What the cost of a transfer depends on.

    Attributes:
        nbytes: bytes of one copy.
        hosts: receiving hosts (1 when sender and receivers share one).
        ranks_per_host: receivers on the host that has most.
        receivers: receivers in all.
        latency_s: of a message on the slow link (NIC, or memory inside one host).
        byte_s: seconds per byte on that link.
        intra_latency_s: of a message inside a receiving host.
        intra_byte_s: seconds per byte there.
    """

    nbytes: int
    hosts: int
    ranks_per_host: int
    receivers: int
    latency_s: float
    byte_s: float
    intra_latency_s: float
    intra_byte_s: float


def occupancy(strategy: str, hosts: int, receivers: int) -> int:
    """How many times a transfer takes the sender's NIC for one copy's time (paper section 3.1).

    A*B for send/recv, A for local all-gather, 2 for global all-gather (1 when all receivers share a
    host: their ring then crosses no NIC), 1 for broadcast.
    """
    if strategy == "send_recv":
        return receivers
    if strategy == "local_allgather":
        return hosts
    if strategy == "global_allgather":
        return 1 if hosts == 1 else 2
    return 1


def estimate_s(strategy: str, shape: Shape, chunks: int = 1) -> float:
    """Predicted seconds of one transfer alone, latencies included.

    Args:
        strategy: as in Transfer ("chain" and "tree" in place of "broadcast").
        shape: sizes and link figures.
        chunks: number of chunks; matters to "chain" only.
    """
    a, b, n = shape.hosts, shape.ranks_per_host, shape.receivers
    t = shape.nbytes * shape.byte_s
    intra_t = shape.nbytes * shape.intra_byte_s
    if strategy == "send_recv":
        return n * (shape.latency_s + t)
    if strategy == "local_allgather":
        gather = (b - 1) * (shape.intra_latency_s + intra_t / b)
        return a * (b * shape.latency_s + t) + gather
    if strategy == "global_allgather":
        ring = (shape.latency_s, t) if a > 1 else (shape.intra_latency_s, intra_t)
        return n * shape.latency_s + t + (n - 1) * (ring[0] + ring[1] / n)
    if strategy == "tree":
        outer = math.ceil(math.log2(a + 1)) * (shape.latency_s + t)
        return outer + math.ceil(math.log2(b)) * (shape.intra_latency_s + intra_t)
    hop = shape.latency_s + t / chunks
    intra_hop = shape.intra_latency_s + intra_t / chunks
    return a * hop + (n - a) * intra_hop + (chunks - 1) * max(hop, intra_hop if n > a else 0.0)


def shape_of(
    nbytes: int, sender: int, receivers: Sequence[int], topology: Topology, cost: CostModel
) -> Shape:
    """Sizes and link figures of one transfer."""
    groups = hosts_of(receivers, topology)
    links = [cost.link(topology, sender, group[0]) for group in groups]
    return Shape(
        nbytes=nbytes,
        hosts=len(groups),
        ranks_per_host=max(map(len, groups)),
        receivers=len(receivers),
        latency_s=max(latency for latency, _ in links),
        byte_s=max(1 / bandwidth for _, bandwidth in links),
        intra_latency_s=cost.intra_latency_s,
        intra_byte_s=1 / cost.intra_bandwidth_Bps,
    )


def chain_chunks(shape: Shape) -> int:
    """Number of chunks that makes a chain fastest (paper section 3.1: t + A*t/K, plus latency).

    With H hops after the first, latency a and copy time t the time is (K + H) * (a + t/K); its
    minimum lies at K = sqrt(H * t / a). A chain of one hop needs no cutting.
    """
    hops = shape.receivers - 1
    copy_s = shape.nbytes * shape.byte_s
    if hops == 0 or copy_s == 0:
        return 1
    if shape.latency_s == 0:
        return 100
    # The hops inside a host are cheap; weigh them by what they cost against one over the NIC.
    weight = min(1.0, shape.intra_byte_s / shape.byte_s)
    fill = (shape.hosts - 1) + (shape.receivers - shape.hosts) * weight
    best = math.sqrt(max(fill, weight) * copy_s / shape.latency_s)
    return max(1, round(min(128.0, best)))


def best_form(strategy: str, shape: Shape) -> tuple[str, float, int]:
    """Form that a strategy takes for a transfer, its predicted seconds, and its chunk count."""
    if strategy != "broadcast":
        parts = shape.ranks_per_host if strategy == "local_allgather" else shape.receivers
        chunks = 1 if strategy == "send_recv" else parts
        return strategy, estimate_s(strategy, shape), chunks
    chunks = chain_chunks(shape)
    chain, tree = estimate_s("chain", shape, chunks), estimate_s("tree", shape)
    return ("chain", chain, chunks) if chain <= tree else ("tree", tree, 1)
