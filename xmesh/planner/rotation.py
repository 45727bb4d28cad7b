"""Transfers by rule, for plans with too many unit tasks to search or even to list.

Round r moves the streams from source group i to destination group (i + r) mod n: in each round
every group sends to one other and receives from one other, which is balanced for the regular
patterns that reach such sizes. Any rank finds its own transfers without looking at the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
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
            order = ((destination - source) % self._width, source, destination, *rest)
            yield make_transfer(
                order,
                demand,
                self._sender(demand),
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
