"""What one rank gives to NCCL for a plan: launches, in an order that all ranks share.

NCCL has no tags: operations meet by their order, within a communicator and, as its kernels hold a
GPU while they wait, across communicators as well. So the transfers of a plan are put in one order.
A *wave* holds transfers of which no two have the same sender or a receiver in common, so that each
rank sends and receives at most one; large ones are cut into pieces, and the pieces of one wave take
turns. Every rank launches what it takes part in, in that order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xmesh.planner.chunk import chunks_of
from xmesh.planner.plans import Plan
from xmesh.planner.transfer import Transfer
from xmesh.program import LocalBoxes, Region

#: Communicators of one plan; each takes memory of the GPU, and time to make.
MAX_COMMUNICATORS = 32
#: Bytes of one operation at the most: pieces that must be packed are packed while others travel.
PIECE_NBYTES = 32 * 2**20


@dataclass(frozen=True)
class Operation:
    """One call of NCCL.

    Attributes:
        kind: "broadcast", "send" or "recv".
        peer: the other rank; of a broadcast the rank that it starts from.
        nbytes: its size.
        regions: where its bytes lie: in the source arrays of the rank that they start from, and in
            the destination arrays elsewhere.
        root: this rank is the one that they start from.
    """

    kind: str
    peer: int
    nbytes: int
    regions: tuple[Region, ...]
    root: bool


@dataclass(frozen=True)
class Launch:
    """Operations that are given to NCCL at once.

    Attributes:
        group: index of the communicator's ranks among ``NcclProgram.groups``.
        operations: one broadcast, or sends and receives that make progress together.
        lane: which of two streams it goes to, so that what comes in and what goes out overlap.
    """

    group: int
    operations: tuple[Operation, ...]
    lane: int


@dataclass(frozen=True)
class NcclProgram:
    """What a call does on one rank.

    Attributes:
        rank: whose program it is.
        groups: sets of ranks, ascending, that need a communicator; the same on all ranks.
        launches: in order.
        copies: (source region, destination region) pairs that stay on the rank.
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]
    launches: tuple[Launch, ...]
    copies: tuple[tuple[Region, Region], ...]


def groups_of(plan: Plan, most: int = MAX_COMMUNICATORS) -> tuple[tuple[int, ...], ...]:
    """Sets of ranks that need a communicator, those that move most bytes first.

    Where there would be too many, the rest of the transfers are sent to each receiver by itself, in
    the communicator of all ranks. That of all ranks comes last, if it is needed.
    """
    nbytes: dict[tuple[int, ...], int] = {}
    alone = False
    for transfer in plan.transfers():
        if broadcasts(transfer):
            members = tuple(sorted(transfer.ranks))
            nbytes[members] = nbytes.get(members, 0) + transfer.volume * plan.itemsize
        else:
            alone = True
    ordered = sorted(nbytes, key=lambda members: (-nbytes[members], members))
    if plan.ranks in nbytes:
        ordered.remove(plan.ranks)
    everyone = alone or plan.ranks in nbytes or len(ordered) > most - 1
    return (*ordered[: most - everyone], *([plan.ranks] if everyone else []))


def broadcasts(transfer: Transfer) -> bool:
    """It goes to several receivers at once, unless the plan's strategy says one by one."""
    return len(transfer.receivers) > 1 and transfer.strategy != "send_recv"


def waves_of(transfers: Iterable[Transfer]) -> list[tuple[int, Transfer]]:
    """Each transfer's wave, in the order of the plan."""
    sends: dict[int, int] = {}
    receives: dict[int, int] = {}
    found = []
    for transfer in transfers:
        before = [sends.get(transfer.sender, -1)]
        before += [receives.get(rank, -1) for rank in transfer.receivers]
        wave = 1 + max(before)
        sends[transfer.sender] = wave
        receives.update(dict.fromkeys(transfer.receivers, wave))
        found.append((wave, transfer))
    return found


def compile_nccl(plan: Plan, rank: int) -> NcclProgram:
    """Resolve a plan for one rank.

    Raises:
        PlanError: the plan has the rank send or receive what its layouts do not give it.
    """
    groups = groups_of(plan)
    place = {members: i for i, members in enumerate(groups)}
    held = LocalBoxes(plan.src.boxes(rank), rank)
    needed = LocalBoxes(plan.dst.boxes(rank), rank)
    volume = max(1, PIECE_NBYTES // plan.itemsize)
    # By wave and piece: broadcasts in the order of the plan, then what goes to single receivers.
    turns: dict[tuple[int, int], tuple[list[Launch], list[Operation]]] = {}
    for wave, transfer in waves_of(plan.transfers()):
        if rank not in transfer.ranks:
            continue
        root = rank == transfer.sender
        group = place.get(tuple(sorted(transfer.ranks))) if broadcasts(transfer) else None
        for piece, boxes in enumerate(chunks_of(transfer.boxes, volume)):
            nbytes = sum(box.volume for box in boxes) * plan.itemsize
            regions = tuple((held if root else needed).find(box) for box in boxes)
            launches, alone = turns.setdefault((wave, piece), ([], []))
            if group is not None:
                operation = Operation("broadcast", transfer.sender, nbytes, regions, root)
                launches.append(Launch(group, (operation,), lane=0 if root else 1))
            elif root:
                alone += [
                    Operation("send", peer, nbytes, regions, root) for peer in transfer.receivers
                ]
            else:
                alone.append(Operation("recv", transfer.sender, nbytes, regions, root))
    ordered: list[Launch] = []
    for _, (launches, alone) in sorted(turns.items()):
        ordered += launches
        if alone:
            ordered.append(Launch(place[plan.ranks], tuple(alone), lane=0))
    copies = tuple((held.find(box), needed.find(box)) for box in plan.copies(rank))
    return NcclProgram(rank, groups, tuple(ordered), copies)
