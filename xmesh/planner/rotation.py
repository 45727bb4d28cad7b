"""Transfers by rule, for plans with too many unit tasks to search or even to list.

Two rotations, one inside the other: in each outer round every source host sends to one destination
host and every destination host receives from one, and within it the same holds for groups of ranks.
That is balanced for the regular patterns that reach such sizes. Any rank finds its own transfers
without looking at the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from xmesh.planner.cost import CostModel
from xmesh.planner.demand import Demand, demands_of
from xmesh.planner.lower import make_transfer
from xmesh.planner.transfer import Transfer
from xmesh.planner.unit_task import Stream, Streams
from xmesh.topology import Topology

#: What a plan's JSON says in place of a list of transfers.
RULE = "rotation"


class RotatedTransfers:
    """The transfers of all streams, in rotated order, with senders spread by a fixed hash.

    Args:
        streams: what moves.
        strategy: strategy of all transfers.
        itemsize: bytes of an element.
        topology: rank -> host.
        cost: decides chunks, and between chain and tree.
        chunk_volume: elements in a chunk at the most.
    """

    def __init__(
        self,
        streams: Streams,
        strategy: str,
        itemsize: int,
        topology: Topology,
        cost: CostModel,
        chunk_volume: int,
    ) -> None:
        self._streams = streams
        self._strategy = strategy
        self._itemsize = itemsize
        self._topology = topology
        self._cost = cost
        self._chunk_volume = chunk_volume
        self._width = max(len(streams.src.group_ranks), len(streams.dst.group_ranks), 1)
        # Each side numbers its own hosts: with one numbering disjoint meshes would idle in rounds.
        self._source_place = _places(streams.src.group_ranks, topology)
        self._destination_place = _places(streams.dst.group_ranks, topology)
        self._host_width = max(len(self._source_place), len(self._destination_place), 1)

    def all(self) -> Iterator[Transfer]:
        """Every transfer, in order."""
        yield from sorted(
            (transfer for stream in self._streams for transfer in self._of_stream(stream)),
            key=lambda transfer: transfer.order,
        )

    @cached_property
    def _seen(self) -> dict[int, list[Transfer]]:
        return {}

    def of_rank(self, rank: int) -> list[Transfer]:
        """Transfers that a rank sends, receives or relays, in order."""
        if rank not in self._seen:
            mine = [
                transfer
                for stream in self._streams.of_rank(rank)
                for transfer in self._of_stream(stream)
                if rank == transfer.sender or rank in transfer.receivers
            ]
            self._seen[rank] = sorted(mine, key=lambda transfer: transfer.order)
        return self._seen[rank]

    def to_json(self) -> Any:
        """The name of the rule."""
        return RULE

    def _of_stream(self, stream: Stream) -> Iterator[Transfer]:
        for demand in demands_of(stream, self._topology):
            source, destination, *rest = demand.key
            sender = self._sender(demand)
            from_place = self._source_place[self._topology.host(sender)]
            to_place = self._destination_place[self._topology.host(demand.receivers[0])]
            order = (
                (to_place - from_place) % self._host_width,
                (destination - source) % self._width,
                source,
                destination,
                *rest,
            )
            yield make_transfer(
                order,
                demand,
                sender,
                self._strategy,
                self._itemsize,
                self._topology,
                self._cost,
                self._chunk_volume,
            )

    def _sender(self, demand: Demand) -> int:
        # Holders are spread by a multiplicative hash of the stream: no rank knows what the others
        # were given, so a running balance is not to be had.
        source, destination = demand.key[:2]
        mixed = (source * 0x9E3779B1 + destination * 0x85EBCA77) & 0xFFFFFFFF
        return demand.senders[(mixed >> 8) % len(demand.senders)]


def _places(groups: Sequence[tuple[int, ...]], topology: Topology) -> dict[int, int]:
    """Host -> its place among the hosts of one side."""
    hosts = sorted({topology.host(rank) for ranks in groups for rank in ranks})
    return {host: place for place, host in enumerate(hosts)}
