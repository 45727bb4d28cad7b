"""Transfer: some boxes on their way from one chosen sender to all ranks that lack them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xmesh.box import Box
from xmesh.planner.chunk import Chunk, chunks_of


@dataclass(frozen=True)
class Transfer:
    """A scheduled piece of a stream.

    Attributes:
        order: place in the one order that all ranks follow; compares as tuples do.
        boxes: the regions, disjoint, in indices of the whole array.
        sender: rank that they come from.
        receivers: ranks that get them, none of which holds them before; in relay order, the
            ranks of one host next to each other.
        strategy: how it is lowered: "send_recv", "local_allgather", "global_allgather",
            "chain" or "tree" (the two forms of "broadcast").
        chunk_volume: elements in a chunk at the most.
    """

    order: tuple[int, ...]
    boxes: tuple[Box, ...]
    sender: int
    receivers: tuple[int, ...]
    strategy: str
    chunk_volume: int

    @property
    def volume(self) -> int:
        """Number of elements."""
        return sum(box.volume for box in self.boxes)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks, in the order in which they travel."""
        return chunks_of(self.boxes, self.chunk_volume)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Sender and receivers."""
        return (self.sender, *self.receivers)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return {
            "order": list(self.order),
            "boxes": [[list(box.start), list(box.stop)] for box in self.boxes],
            "sender": self.sender,
            "receivers": list(self.receivers),
            "strategy": self.strategy,
            "chunk_volume": self.chunk_volume,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Transfer:
        """Inverse of ``to_json``."""
        return cls(
            order=tuple(data["order"]),
            boxes=tuple(Box(tuple(a), tuple(b)) for a, b in data["boxes"]),
            sender=data["sender"],
            receivers=tuple(data["receivers"]),
            strategy=data["strategy"],
            chunk_volume=data["chunk_volume"],
        )


@dataclass(frozen=True)
class Op:
    """What one rank does for one transfer, or a copy inside the rank.

    Attributes:
        kind: "send", "recv" or "copy".
        peer: the other rank; the rank itself for a copy.
        transfer: what moves; None for a copy.
        first: first chunk.
        last: one past the last chunk.
        boxes: regions of the whole array that the operation covers.
    """

    kind: str
    peer: int
    transfer: Transfer | None
    first: int
    last: int
    boxes: tuple[Box, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return sum(box.volume for box in self.boxes)

    def __str__(self) -> str:
        arrow = {"send": f"-> {self.peer}", "recv": f"<- {self.peer}", "copy": ""}[self.kind]
        regions = " ".join(map(str, self.boxes))
        return f"{self.kind} {arrow} {regions}".replace("  ", " ")
