"""Demands: the parts of a stream that really travel, before anyone is chosen to send them.

A rank that holds the bytes and needs them keeps them by a copy. Receivers on a host where some rank
holds the bytes are served inside that host. Only the others cost the NICs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xmesh.box import Box
from xmesh.planner.chunk import take
from xmesh.planner.cost import CostModel
from xmesh.planner.fraction import balance
from xmesh.planner.schedule import Job
from xmesh.planner.strategy import Shape, best_form, hosts_of, occupancy, shape_of
from xmesh.planner.unit_task import Stream
from xmesh.topology import Topology


@dataclass(frozen=True)
class Demand:
    """Boxes that some ranks lack.

    Attributes:
        key: source group, destination group, then numbers that tell the parts of that stream
            apart; unique, and the same on all ranks.
        boxes: the regions.
        senders: ranks that could send them.
        receivers: ranks that lack them, the ranks of one host next to each other.
        crosses: True when the receivers are on other hosts than the senders.
    """

    key: tuple[int, ...]
    boxes: tuple[Box, ...]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    crosses: bool

    @property
    def volume(self) -> int:
        """Number of elements."""
        return sum(box.volume for box in self.boxes)


def demands_of(stream: Stream, topology: Topology) -> list[Demand]:
    """What must travel of one stream: first inside hosts that hold it, last between hosts."""
    holding: dict[int, list[int]] = {}
    for rank in stream.senders:
        holding.setdefault(topology.host(rank), []).append(rank)
    inside: dict[int, list[int]] = {}
    outside: dict[int, list[int]] = {}
    senders = frozenset(stream.senders)
    for rank in stream.receivers:
        if rank not in senders:
            host = topology.host(rank)
            (inside if host in holding else outside).setdefault(host, []).append(rank)
    key = (stream.source, stream.destination)
    demands = [
        Demand((*key, 0, host), stream.boxes, tuple(holding[host]), tuple(inside[host]), False)
        for host in sorted(inside)
    ]
    if outside:
        receivers = tuple(rank for host in sorted(outside) for rank in outside[host])
        demands.append(Demand((*key, 1, 0), stream.boxes, stream.senders, receivers, True))
    return demands


def sending_port(sender: int, crosses: bool, topology: Topology) -> int:
    """Port that a sender takes: its NIC between hosts; inside a host itself, after the NICs."""
    return topology.nic(sender) if crosses else topology.num_nics + sender


def receiving_ports(receivers: Sequence[int], crosses: bool, topology: Topology) -> tuple[int, ...]:
    """Ports that a transfer takes on the receiving side.

    Between hosts, on each host the NIC of the rank where the bytes enter; inside a host, the ranks.
    """
    if not crosses:
        return tuple(topology.num_nics + rank for rank in receivers)
    entries: dict[int, int] = {}
    for rank in receivers:
        entries.setdefault(topology.host(rank), topology.nic(rank))
    return tuple(entries.values())


def candidates_of(demand: Demand, topology: Topology) -> dict[int, list[int]]:
    """Sending port -> ranks behind it, the port of the lowest rank first."""
    candidates: dict[int, list[int]] = {}
    for rank in demand.senders:
        port = sending_port(rank, demand.crosses, topology)
        candidates.setdefault(port, []).append(rank)
    return candidates


def occupied_s(strategy: str, shape: Shape) -> float:
    """Seconds for which a transfer takes its ports, latencies left out (paper section 3.1)."""
    return occupancy(strategy, shape.hosts, shape.receivers) * shape.nbytes * shape.byte_s


def jobs_of(
    demands: Sequence[Demand], strategy: str, itemsize: int, topology: Topology, cost: CostModel
) -> list[Job]:
    """Demands as the scheduler sees them."""
    width = 1 + max((max(d.key[:2]) for d in demands), default=0)
    jobs = []
    for demand in demands:
        candidates = candidates_of(demand, topology)
        receiving = receiving_ports(demand.receivers, demand.crosses, topology)
        nbytes = demand.volume * itemsize
        durations = tuple(
            occupied_s(strategy, shape_of(nbytes, ranks[0], demand.receivers, topology, cost))
            for ranks in candidates.values()
        )
        source, destination = demand.key[:2]
        rotation = ((destination - source) % width, source)
        jobs.append(Job(tuple(candidates), receiving, durations, rotation))
    return jobs


def split_over_entries(
    demands: Sequence[Demand],
    itemsize: int,
    topology: Topology,
    cost: CostModel,
    least_nbytes: int,
) -> list[Demand]:
    """Divide demands over the NICs of their receiving hosts, by the bandwidths of these.

    The receivers of each piece are ordered so that it enters a host by one NIC and, passed on by
    the last receiver, leaves it by the same one where two receivers share it.

    Args:
        demands: demands between hosts.
        itemsize: bytes of an element.
        topology: rank -> NIC.
        cost: bandwidths.
        least_nbytes: pieces smaller than this are not cut off.
    """
    pieces = []
    for demand in demands:
        groups = [_by_nic(group, topology) for group in hosts_of(demand.receivers, topology)]
        widest = max(groups, key=len)
        speeds = [cost.bandwidth_Bps(topology, nic) for nic in widest]
        count = len(widest)
        if count == 1 or demand.volume * itemsize < count * least_nbytes:
            pieces.append(demand)
            continue
        left = demand.boxes
        for place in range(count):
            share = speeds[place] / sum(speeds[place:])
            volume = sum(box.volume for box in left)
            head, left = take(left, round(volume * share))
            receivers = tuple(
                rank for by_nic in groups for rank in _through(by_nic, place % len(by_nic))
            )
            pieces.append(
                Demand((*demand.key, place), head, demand.senders, receivers, demand.crosses)
            )
    return [piece for piece in pieces if piece.boxes]


def _by_nic(ranks: Sequence[int], topology: Topology) -> dict[int, list[int]]:
    """NIC -> ranks of one host behind it, the NIC of the first rank first."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(topology.nic(rank), []).append(rank)
    return found


def _through(by_nic: dict[int, list[int]], place: int) -> list[int]:
    """All ranks of a host, those of one NIC first, and one of these last."""
    groups = list(by_nic.values())
    chosen = groups.pop(place)
    others = [rank for group in groups for rank in group]
    return [*chosen[:1], *chosen[1:-1], *others, *chosen[1:][-1:]]


def split_over_senders(
    demands: Sequence[Demand],
    strategy: str,
    itemsize: int,
    topology: Topology,
    cost: CostModel,
    least_nbytes: int,
) -> list[Demand]:
    """Divide demands over several sending ports, so that the busiest of them sends least.

    Past the paper, whose unit task has one sender. The quotas are the fractional optimum; each set
    of candidates is dealt out port after port, so it is cut less often than it has ports.

    Args:
        demands: demands between hosts.
        strategy: decides how often a transfer sends its bytes.
        itemsize: bytes of an element.
        topology: rank -> NIC.
        cost: bandwidths.
        least_nbytes: pieces smaller than this are not cut off.

    Returns:
        Pieces whose senders all share a port; together they hold what the demands hold.
    """
    wanted: dict[tuple[int, ...], int] = {}
    by_set: dict[tuple[int, ...], list[tuple[Demand, int]]] = {}
    for demand in demands:
        ports = tuple(sorted(candidates_of(demand, topology)))
        hosts = len({topology.host(rank) for rank in demand.receivers})
        times = occupancy(strategy, hosts, len(demand.receivers))
        wanted[ports] = wanted.get(ports, 0) + demand.volume * itemsize * times
        by_set.setdefault(ports, []).append((demand, times))
    speeds = {port: cost.bandwidth_Bps(topology, port) for ports in wanted for port in ports}
    _, quota = balance(wanted, speeds)
    pieces = []
    for ports, members in by_set.items():
        at = 0
        room = {port: quota.get((ports, port), 0) for port in ports}
        for demand, times in members:
            left, part = demand.boxes, 0
            volume = demand.volume
            unit = itemsize * times
            while volume:
                port = ports[at]
                fits = round(room[port] / unit)
                last = at == len(ports) - 1
                if last or (volume - fits) * itemsize < least_nbytes:
                    head, left, volume_taken = left, (), volume
                else:
                    head, left = take(left, fits) if fits * itemsize >= least_nbytes else ((), left)
                    volume_taken = sum(box.volume for box in head)
                room[port] -= volume_taken * unit
                volume -= volume_taken
                if head:
                    ranks = tuple(candidates_of(demand, topology)[port])
                    key = (*demand.key, part)
                    pieces.append(Demand(key, head, ranks, demand.receivers, True))
                    part += 1
                if volume and not last:
                    at += 1
    return pieces


def predicted_s(
    strategy: str, demand: Demand, itemsize: int, topology: Topology, cost: CostModel
) -> float:
    """Seconds of one demand alone, latencies included; "broadcast" takes its better form."""
    shape = shape_of(demand.volume * itemsize, demand.senders[0], demand.receivers, topology, cost)
    return best_form(strategy, shape)[1]
