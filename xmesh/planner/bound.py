"""The lower bound on the time of a resharding, and the bytes that hosts must exchange."""

from __future__ import annotations

from collections.abc import Iterable

from xmesh.planner.cost import CostModel
from xmesh.planner.fraction import balance
from xmesh.planner.unit_task import Stream
from xmesh.topology import Topology


def lower_bound_s(
    streams: Iterable[Stream], itemsize: int, topology: Topology, cost: CostModel
) -> float:
    """Seconds that no plan can beat: bytes over bandwidth, latencies left out.

    The largest of: for each host, the bytes that it needs and no rank of it holds, over the
    bandwidth of its NICs; the bytes that hosts must send, over all fractional choices of sender;
    for each rank, the bytes that it lacks over its NIC and its host's memory together, and those
    that no other host holds or needs over the memory alone.

    Args:
        streams: everything that moves.
        itemsize: bytes of an element.
        topology: rank -> host.
        cost: bandwidths.
    """
    host_sets: dict[tuple[int, ...], tuple[int, ...]] = {}

    def hosts(ranks: tuple[int, ...]) -> tuple[int, ...]:
        if ranks not in host_sets:
            host_sets[ranks] = tuple(sorted({topology.host(rank) for rank in ranks}))
        return host_sets[ranks]

    into_host: dict[int, int] = {}
    into_rank: dict[int, int] = {}
    within_host: dict[int, int] = {}
    leaving: dict[tuple[int, ...], int] = {}
    for stream in streams:
        nbytes = stream.volume * itemsize
        have = hosts(stream.senders)
        lacking = [host for host in hosts(stream.receivers) if host not in have]
        for host in lacking:
            into_host[host] = into_host.get(host, 0) + nbytes
        if lacking:
            leaving[have] = leaving.get(have, 0) + nbytes
        senders = frozenset(stream.senders)
        for rank in stream.receivers:
            if rank not in senders:
                into_rank[rank] = into_rank.get(rank, 0) + nbytes
                if have == hosts(stream.receivers) and len(have) == 1:
                    within_host[rank] = within_host.get(rank, 0) + nbytes
    bandwidth = {
        host: cost.host_bandwidth_Bps(topology, host)
        for host in {*into_host, *(h for candidates in leaving for h in candidates)}
    }
    receive_s = max((n / bandwidth[host] for host, n in into_host.items()), default=0.0)
    send_s, _ = balance(leaving, bandwidth)
    memory = cost.intra_bandwidth_Bps
    rank_s = max(
        (
            nbytes / (memory + cost.bandwidth_Bps(topology, topology.nic(rank)))
            for rank, nbytes in into_rank.items()
        ),
        default=0.0,
    )
    memory_s = max((nbytes / memory for nbytes in within_host.values()), default=0.0)
    return max(receive_s, send_s, rank_s, memory_s)
