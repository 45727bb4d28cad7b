"""From a demand and its chosen sender to a transfer: form, relay order and chunk size."""

from __future__ import annotations

from xmesh.planner.cost import CostModel
from xmesh.planner.demand import Demand
from xmesh.planner.strategy import best_form, shape_of
from xmesh.planner.transfer import Transfer
from xmesh.topology import Topology


def make_transfer(
    order: tuple[int, ...],
    demand: Demand,
    sender: int,
    strategy: str,
    itemsize: int,
    topology: Topology,
    cost: CostModel,
    chunk_volume: int,
) -> Transfer:
    """Fix how a demand travels.

    Args:
        order: its place among all transfers.
        demand: what must travel.
        sender: one of the demand's senders.
        strategy: one of STRATEGIES.
        itemsize: bytes of an element.
        topology: rank -> host.
        cost: decides chunks, and between chain and tree.
        chunk_volume: elements in a chunk at the most.
    """
    volume = demand.volume
    shape = shape_of(volume * itemsize, sender, demand.receivers, topology, cost)
    form, _, chunks = best_form(strategy, shape)
    # Relaying starts with the hosts after the sender's: where meshes overlap, and every host both
    # sends and relays, each then relays about as much as the others.
    home = topology.host(sender)
    receivers = sorted(
        demand.receivers, key=lambda rank: (topology.host(rank) - home) % topology.num_hosts
    )
    return Transfer(
        order=order,
        boxes=demand.boxes,
        sender=sender,
        receivers=tuple(receivers),
        strategy=form,
        chunk_volume=max(1, min(chunk_volume, -(-volume // chunks))),
    )
