"""Timelines by NIC: which are the busiest, how busy all are over time, and a picture in characters.

A lane is one direction of a NIC. A message inside a host is on none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmesh.planner.cost import CostModel
from xmesh.planner.describe import seconds_text
from xmesh.planner.plans import Plan
from xmesh.planner.simulate import Message, Simulation
from xmesh.topology import Topology

#: One character for each transfer, in turn.
_MARKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Lane(NamedTuple):
    """One direction of one NIC."""

    nic: int
    incoming: bool


def crossing(messages: Iterable[Message], topology: Topology, cost: CostModel) -> list[Message]:
    """Messages between hosts, each from when it takes its NICs to when it leaves them.

    A simulated message arrives one latency later, when others have its NICs already.
    """
    host, latency_s = topology.host_of_rank, cost.nic_latency_s
    return [
        message._replace(end_s=message.end_s - latency_s)
        for message in messages
        if host[message.source] != host[message.destination]
    ]


def busiest_nics(simulation: Simulation, most: int) -> list[int]:
    """NICs that are busy at all, up to ``most`` of them.

    Where there are more, those that send longest and those that receive longest, in turn; the
    first among equals.

    Returns:
        Global indices, ascending.
    """
    directions = [np.array(simulation.nic_out_busy_s), np.array(simulation.nic_in_busy_s)]
    orders = [np.argsort(-busy_s, kind="stable") for busy_s in directions]
    chosen: dict[int, None] = {}
    for pair in zip(*orders, strict=True):
        for nic, busy_s in zip(pair, directions, strict=True):
            if busy_s[nic] > 0 and len(chosen) < most:
                chosen[int(nic)] = None
    return sorted(chosen)


def lane_names(nics: Sequence[int], topology: Topology) -> dict[int, str]:
    """Name of each NIC: its host's, and a number where some host has several."""
    several = topology.num_nics > topology.num_hosts
    first = {topology.nic_host(nic): nic for nic in reversed(range(topology.num_nics))}
    return {
        nic: topology.host_names[host] + (f".{nic - first[host]}" if several else "")
        for nic in nics
        for host in [topology.nic_host(nic)]
    }


def by_lane(
    messages: Iterable[Message], topology: Topology, nics: Iterable[int]
) -> dict[Lane, list[Message]]:
    """Messages in each lane of some NICs, in their order; lanes without any are left out.

    Args:
        messages: from ``crossing``.
        topology: rank -> NIC.
        nics: global indices.
    """
    lanes: dict[Lane, list[Message]] = {
        Lane(nic, incoming): [] for nic in nics for incoming in (False, True)
    }
    for message in messages:
        for lane in (
            Lane(topology.nic(message.source), False),
            Lane(topology.nic(message.destination), True),
        ):
            if lane in lanes:
                lanes[lane].append(message)
    return {lane: found for lane, found in lanes.items() if found}


def utilisation(
    messages: Sequence[Message],
    topology: Topology,
    cost: CostModel,
    end_s: float,
    bins: int,
    incoming: bool,
) -> NDArray[np.float64]:
    """How much of what its NICs can carry a plan uses over time.

    Args:
        messages: from ``crossing``.
        topology: rank -> NIC.
        cost: bandwidths.
        end_s: end of the last bin; the first begins at 0.
        bins: equal parts of the time.
        incoming: of the NICs that receive anything at all; otherwise of those that send.

    Returns:
        Shape (bins,): bytes moved over bytes that those NICs could move, 0 to 1.
    """
    nics = {topology.nic(m.destination if incoming else m.source) for m in messages}
    if not nics or end_s <= 0:
        return np.zeros(bins)
    starts, ends = np.array([(m.start_s, m.end_s) for m in messages]).T
    rates_Bps = np.array([m.nbytes for m in messages]) / np.maximum(ends - starts, 1e-15)
    edges = np.linspace(0, end_s, bins + 1)

    def moved(times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes up to each edge, had each message begun at its time and never ended."""
        order = np.argsort(times)
        rate = np.concatenate([[0.0], np.cumsum(rates_Bps[order])])
        early = np.concatenate([[0.0], np.cumsum((rates_Bps * times)[order])])
        before = np.searchsorted(times[order], edges, side="right")
        nbytes: NDArray[np.float64] = rate[before] * edges - early[before]
        return nbytes

    capacity_Bps = sum(cost.bandwidth_Bps(topology, nic) for nic in nics)
    share = np.diff(moved(starts) - moved(ends)) / (end_s / bins * capacity_Bps)
    return np.clip(share, 0.0, None)  # rounding


def text_timeline(
    plan: Plan, simulation: Simulation, width: int = 100, most: int = 16
) -> list[str]:
    """A Gantt chart in characters: a line for what each NIC sends, one for what it receives.

    Each column is an equal part of the makespan, with the mark of the transfer that takes most of
    it, or "." where the lane is idle for more than half of it.

    Args:
        plan: what was simulated.
        simulation: of it.
        width: characters in a line, at the most.
        most: NICs that are drawn, the busiest.
    """
    topology = plan.topology
    nics = busiest_nics(simulation, most)
    if not nics:
        return ["  nothing moves between hosts"]
    names = lane_names(nics, topology)
    head = max(map(len, names.values())) + 5
    columns = max(10, width - head - 2)
    orders = sorted({message.order for message in simulation.messages})
    mark = {order: _MARKS[i % len(_MARKS)] for i, order in enumerate(orders)}
    shown = crossing(simulation.messages, topology, plan.cost)
    lines = []
    for lane, messages in by_lane(shown, topology, nics).items():
        side = "in" if lane.incoming else "out"
        row = _row(messages, mark, simulation.makespan_s, columns)
        lines.append(f"  {names[lane.nic]:{head - 5}} {side:>3} {row}")
    end = seconds_text(simulation.makespan_s)
    axis = f"  {'':{head}}0{end:>{columns - 1}}"
    used = sum(s > 0 for s in map(max, simulation.nic_out_busy_s, simulation.nic_in_busy_s))
    more = [f"  ... {used - len(nics):,} more NICs, no busier"] if used > len(nics) else []
    return [*lines, axis, *more]


def _row(
    messages: Iterable[Message], mark: dict[tuple[int, ...], str], makespan_s: float, columns: int
) -> str:
    column_s = makespan_s / columns
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for message in messages:
        first = min(int(message.start_s / column_s), columns - 1)
        last = min(int(message.end_s / column_s), columns - 1)
        sign = mark[message.order]
        for column in range(first, last + 1):
            begin_s, end_s = column * column_s, (column + 1) * column_s
            part_s = min(message.end_s, end_s) - max(message.start_s, begin_s)
            shares[column][sign] = shares[column].get(sign, 0.0) + part_s
    return "".join(
        max(share, key=lambda sign: share[sign]) if sum(share.values()) > column_s / 2 else "."
        for share in shares
    )
