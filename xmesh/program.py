"""Program: what one rank does for a plan, resolved to its own arrays, once and for all calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xmesh.box import Box
from xmesh.box_index import BoxIndex
from xmesh.errors import PlanError, explain
from xmesh.planner.plans import Plan
from xmesh.planner.strategy import hops_of

#: Transfers from one rank to another that can be under way without waiting for each other.
CHANNELS = 8


@dataclass(frozen=True)
class Region:
    """Part of one local array.

    Attributes:
        array: index among the rank's boxes.
        index: index into that array; its ellipsis keeps the region of a scalar an array.
        whole: it is all of that array.
    """

    array: int
    index: tuple[Any, ...]
    whole: bool


@dataclass(frozen=True)
class Piece:
    """A chunk as one rank sees it.

    Attributes:
        transfer: place of its transfer on this rank.
        boxes: the chunk, in indices of the whole array.
        nbytes: its size.
        regions: where it lies, in the source arrays at the root and in the destination arrays
            elsewhere.
        root: True where this rank is the sender that the transfer starts from.
        sender: rank that the transfer starts from.
    """

    transfer: int
    boxes: tuple[Box, ...]
    nbytes: int
    regions: tuple[Region, ...]
    root: bool
    sender: int


@dataclass(frozen=True)
class Message:
    """One message to or from a peer.

    Attributes:
        order: place among all messages of this rank; follows the plan's order.
        peer: the other rank.
        piece: index of what it carries.
        channel: messages to one peer keep their order within a channel; each transfer has one, so
            that a relay need not hold back one transfer until another has passed.
    """

    order: int
    peer: int
    piece: int
    channel: int


@dataclass(frozen=True)
class Lines:
    """Messages one way, by line: those with one peer on one channel, which keep their order.

    Attributes:
        messages: for each line, its messages in order.
        first: (order, line) of the first message of each line, ascending.
        of_piece: for each piece, the lines that have a message with it.
    """

    messages: tuple[tuple[Message, ...], ...]
    first: tuple[tuple[int, int], ...]
    of_piece: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, messages: tuple[Message, ...], num_pieces: int) -> Lines:
        """Sort messages into lines."""
        found: dict[tuple[int, int], list[Message]] = {}
        for message in messages:
            found.setdefault((message.peer, message.channel), []).append(message)
        of_piece: list[list[int]] = [[] for _ in range(num_pieces)]
        for line, members in enumerate(found.values()):
            for message in members:
                of_piece[message.piece].append(line)
        return cls(
            tuple(map(tuple, found.values())),
            tuple(sorted((members[0].order, i) for i, members in enumerate(found.values()))),
            tuple(map(tuple, of_piece)),
        )


@dataclass(frozen=True)
class Program:
    """Everything that a call needs and that does not depend on the call's arrays.

    Attributes:
        rank: whose program it is.
        held: boxes of its source arrays.
        needed: boxes of its destination arrays.
        pieces: chunks that pass through this rank.
        receives: in posting order.
        sends: in the order of the plan.
        copies: (source region, destination region) pairs that stay on the rank.
    """

    rank: int
    held: tuple[Box, ...]
    needed: tuple[Box, ...]
    pieces: tuple[Piece, ...]
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    copies: tuple[tuple[Region, Region], ...]

    @cached_property
    def held_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the source arrays."""
        return tuple(box.shape for box in self.held)

    @cached_property
    def needed_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the destination arrays."""
        return tuple(box.shape for box in self.needed)

    @cached_property
    def receive_lines(self) -> Lines:
        """The receives by line."""
        return Lines.of(self.receives, len(self.pieces))

    @cached_property
    def send_lines(self) -> Lines:
        """The sends by line."""
        return Lines.of(self.sends, len(self.pieces))

    @cached_property
    def roots(self) -> tuple[bool, ...]:
        """For each piece, whether it is here from the start."""
        return tuple(piece.root for piece in self.pieces)

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """For each piece, how often it is sent."""
        return tuple(map(len, self.send_lines.of_piece))

    @cached_property
    def first_sends(self) -> tuple[tuple[int, int], ...]:
        """(order, line) of those first messages whose piece is here from the start."""
        lines = self.send_lines
        return tuple(
            (order, line)
            for order, line in lines.first
            if self.roots[lines.messages[line][0].piece]
        )


def compile_program(plan: Plan, rank: int) -> Program:
    """Resolve a plan for one rank.

    Raises:
        PlanError: the plan has the rank send or receive what its layouts do not give it.
    """
    held, needed = plan.src.boxes(rank), plan.dst.boxes(rank)
    held_index, needed_index = LocalBoxes(held, rank), LocalBoxes(needed, rank)
    pieces: list[Piece] = []
    receives: list[Message] = []
    sends: list[Message] = []
    # Both ends of a message count the transfers from one to the other alike.
    channels = {"send": _Channels(), "recv": _Channels()}
    order = 0
    for place, transfer in enumerate(plan.transfers(rank)):
        root = transfer.sender == rank
        local = held_index if root else needed_index
        first_piece = len(pieces)
        for chunk in transfer.chunks:
            nbytes = sum(box.volume for box in chunk) * plan.itemsize
            regions = tuple(local.find(box) for box in chunk)
            pieces.append(Piece(place, chunk, nbytes, regions, root, transfer.sender))
        for hop in hops_of(transfer, plan.topology, rank):
            channel = channels[hop.kind].of(hop.peer, place)
            for chunk_index in range(hop.first, hop.last):
                message = Message(order, hop.peer, first_piece + chunk_index, channel)
                order += 1
                (sends if hop.kind == "send" else receives).append(message)
    copies = tuple((held_index.find(box), needed_index.find(box)) for box in plan.copies(rank))
    return Program(
        rank,
        held,
        needed,
        tuple(pieces),
        tuple(receives),
        tuple(sends),
        copies,
    )


class _Channels:
    """Numbers the transfers to, or from, each peer in turn, modulo ``CHANNELS``."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def of(self, peer: int, transfer: int) -> int:
        """Channel of a transfer with a peer; asked in the order of the transfers."""
        last, count = self._seen.get(peer, (-1, -1))
        if transfer != last:
            count += 1
            self._seen[peer] = transfer, count
        return count % CHANNELS


class LocalBoxes:
    """Finds the array of a rank that a region lies in."""

    def __init__(self, boxes: tuple[Box, ...], rank: int) -> None:
        self._boxes = boxes
        self._rank = rank
        self._places = [i for i, box in enumerate(boxes) if not box.empty]
        self._index = BoxIndex([boxes[i] for i in self._places])

    def find(self, box: Box) -> Region:
        """The array and the place in it."""
        for found in self._index.overlapping(box):
            whole = self._boxes[self._places[found]]
            if whole.contains(box):
                index = (*box.slices(whole), ...)
                return Region(self._places[found], index, whole == box)
        raise PlanError(
            explain(
                "a plan may only move what its layouts give a rank",
                values=f"box {box}, rank {self._rank} has "
                f"{' '.join(map(str, self._boxes[:8])) or 'none'}",
                remedy="make the plan with xmesh.plan; xmesh.planner.check finds what is wrong",
            )
        )
