"""Proof that a plan is sound, from its operations alone: whoever made it, by search or by rule.

Delivery: each rank gets each element that it needs once, from a holder, and no other element.
Matching: what one rank sends to another, the other receives, in the same order; an execution
without buffers, in which only data and order block, comes to its end.
Frugality: a broadcast enters each host once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

from xmesh.box import Box
from xmesh.box_index import BoxIndex
from xmesh.errors import PlanError, explain
from xmesh.planner.plans import Plan
from xmesh.planner.strategy import Hop, hops_of
from xmesh.planner.transfer import Transfer
from xmesh.topology import Topology

Pair = tuple[int, int]
#: A chunk of a transfer, given by their indices.
Piece = tuple[int, int]


def check(plan: Plan) -> None:
    """Prove that a plan moves the array as its layouts say, and that it cannot hang.

    Args:
        plan: any plan; nothing in it is trusted but the two layouts and the topology.

    Raises:
        PlanError: says which rule is broken, by which transfer, rank and box.
    """
    transfers = plan.transfers()
    held = {rank: _Boxes(plan.src.boxes(rank)) for rank in plan.src.ranks}
    for transfer in transfers:
        _check_transfer(plan, transfer, held)
    _check_views(plan, transfers)
    _check_deliveries(plan, transfers, held)
    all_hops = []
    for transfer in transfers:
        hops = {rank: hops_of(transfer, plan.topology, rank) for rank in transfer.ranks}
        check_hops(transfer, hops, plan.topology)
        all_hops.append(hops)
    check_order(transfers, all_hops)


def _fail(rule: str, values: str, transfer: Transfer | None = None) -> NoReturn:
    context = "" if transfer is None else f"transfer {transfer.order} from rank {transfer.sender}"
    remedy = "do not use this plan; if xmesh.plan made it, report it together with its to_json()"
    raise PlanError(explain(rule, values=values, context=context, remedy=remedy))


def _check_views(plan: Plan, transfers: Sequence[Transfer]) -> None:
    """One order for all, and each rank alone sees what all see together."""
    for before, after in pairwise(transfers):
        if not before.order < after.order:
            _fail("transfers must have an order each", f"{before.order} twice or late", after)
    of_rank: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        for rank in transfer.ranks:
            of_rank.setdefault(rank, []).append(transfer)
    for rank in sorted({*plan.ranks, *of_rank}):
        if list(plan.transfers(rank)) != of_rank.get(rank, []):
            _fail(
                "a rank must see its transfers as all ranks together do",
                f"rank {rank} sees {len(plan.transfers(rank))} transfers, "
                f"the plan has {len(of_rank.get(rank, []))} for it",
            )


class _Boxes:
    """Boxes that some rank holds or needs: the disjoint ``all`` of them, and where they are."""

    def __init__(self, boxes: Iterable[Box] = ()) -> None:
        self.all = tuple(box for box in boxes if not box.empty)
        self.index = BoxIndex(self.all)

    def around(self, box: Box) -> int | None:
        """Index of the one that contains ``box``, or None."""
        found = self.index.overlapping(box)
        return found[0] if len(found) == 1 and self.all[found[0]].contains(box) else None

    def __str__(self) -> str:
        shown = " ".join(map(str, self.all[:4])) or "no box"
        return shown + (" ..." if len(self.all) > 4 else "")


def _check_transfer(plan: Plan, transfer: Transfer, held: Mapping[int, _Boxes]) -> None:
    """A holder sends to others, in chunks that are the boxes and not too large."""
    forms = ("chain", "tree") if plan.strategy == "broadcast" else (plan.strategy,)
    if transfer.strategy not in forms:
        _fail(
            f"transfers of a {plan.strategy} plan must be {' or '.join(forms)}",
            f"{transfer.strategy!r}",
            transfer,
        )
    if not transfer.receivers or len(set(transfer.ranks)) != len(transfer.ranks):
        _fail(
            "a transfer needs receivers, each once, and none of them its sender",
            f"receivers {transfer.receivers}",
            transfer,
        )
    own = held.get(transfer.sender, _Boxes())
    for box in transfer.boxes:
        if own.around(box) is None:
            _fail(
                "a sender must hold what it sends",
                f"rank {transfer.sender} holds {own}, not {box}",
                transfer,
            )
    pieces = [box for chunk in transfer.chunks for box in chunk]
    wrong = _not_cut_from(pieces, _Boxes(transfer.boxes))
    if wrong is not None:
        _fail("chunks must be the boxes, cut", wrong, transfer)
    for i, chunk in enumerate(transfer.chunks):
        volume = sum(box.volume for box in chunk)
        if volume > 1 and volume * plan.itemsize > plan.chunk_nbytes:
            _fail(
                "a chunk must not be larger than chunk_nbytes",
                f"chunk {i} has {volume * plan.itemsize} bytes, the limit is {plan.chunk_nbytes}",
                transfer,
            )


def _check_deliveries(
    plan: Plan, transfers: Iterable[Transfer], held: Mapping[int, _Boxes]
) -> None:
    """Copies and transfers write each element of each destination box once, and no other."""
    received: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        for rank in transfer.receivers:
            received.setdefault(rank, []).append(transfer)
    needed = {rank: plan.dst.boxes(rank) for rank in plan.dst.ranks}
    for rank in sorted({*plan.ranks, *received}):
        own = held.get(rank, _Boxes())
        boxes = list(plan.copies(rank))
        for box in boxes:
            if own.around(box) is None:
                _fail(
                    "a copy must be of what the rank holds", f"rank {rank} holds {own}, not {box}"
                )
        for transfer in received.get(rank, ()):
            for box in transfer.boxes:
                if own.index.overlapping(box):
                    _fail(
                        "no byte must be sent to a rank that holds it",
                        f"rank {rank} holds part of {box}",
                        transfer,
                    )
            boxes += transfer.boxes
        wrong = _not_cut_from(boxes, _Boxes(needed.get(rank, ())))
        if wrong is not None:
            _fail(f"rank {rank} must get each element that it needs, once, and no other", wrong)


def _not_cut_from(pieces: Sequence[Box], wholes: _Boxes) -> str | None:
    """Why ``pieces`` are not disjoint parts that make up ``wholes``; None if they are."""
    left = [box.volume for box in wholes.all]
    for piece in pieces:
        around = wholes.around(piece)
        if around is None:
            return f"{piece} is not inside one of {wholes}"
        left[around] -= piece.volume
    twice = [box for box, times in Counter(pieces).items() if times > 1]
    if not twice:
        index = BoxIndex(pieces)
        twice = [box for i, box in enumerate(pieces) if index.overlapping(box) != [i]]
    if twice:
        return f"{twice[0]} comes more than once"
    for box, missing in zip(wholes.all, left, strict=True):
        if missing:
            return f"{missing} elements of {box} do not come"
    return None


def check_hops(transfer: Transfer, hops: dict[int, list[Hop]], topology: Topology) -> None:
    """Prove that the hops of one transfer match, and bring each chunk once to each receiver.

    Args:
        transfer: what moves.
        hops: those of each of its ranks.
        topology: rank -> host.

    Raises:
        PlanError: names the ranks and the chunks.
    """
    total = len(transfer.chunks)
    sent: dict[Pair, list[tuple[int, int]]] = {}
    received: dict[Pair, list[tuple[int, int]]] = {}
    for rank, mine in hops.items():
        for kind, peer, first, last in mine:
            if peer == rank or peer not in hops or not 0 <= first < last <= total:
                _fail("a hop needs a peer and chunks of its transfer", f"{kind} {peer}", transfer)
            pair = (rank, peer) if kind == "send" else (peer, rank)
            (sent if kind == "send" else received).setdefault(pair, []).append((first, last))
    for pair in sorted({*sent, *received}):
        if sent.get(pair, []) != received.get(pair, []):
            _fail(
                "what one rank sends the other must receive, in one order",
                f"rank {pair[0]} sends chunks {sent.get(pair, [])}, "
                f"rank {pair[1]} receives {received.get(pair, [])}",
                transfer,
            )
    gets = {rank: Counter(_chunks(mine, "recv")) for rank, mine in hops.items()}
    every = Counter(range(total))
    for rank in transfer.receivers:
        if gets.get(rank) != every:
            times = gets.get(rank, Counter())
            wrong = [(c, times[c]) for c in range(total) if times[c] != 1]
            _fail(
                "each receiver must receive each chunk once",
                f"rank {rank} receives chunk {wrong[0][0]} {wrong[0][1]} times",
                transfer,
            )
    if gets[transfer.sender]:
        _fail("nobody must send to the sender of a transfer", f"rank {transfer.sender}", transfer)
    if transfer.strategy in ("chain", "tree"):
        _check_entries(transfer, hops, topology)


def _chunks(hops: Iterable[Hop], kind: str) -> Iterator[int]:
    return (chunk for hop in hops if hop.kind == kind for chunk in range(hop.first, hop.last))


def _check_entries(transfer: Transfer, hops: dict[int, list[Hop]], topology: Topology) -> None:
    """A broadcast enters each receiving host once, and the host that has it never."""
    entries: Counter[tuple[int, int]] = Counter()
    for rank, mine in hops.items():
        host = topology.host(rank)
        for hop in mine:
            if hop.kind == "recv" and topology.host(hop.peer) != host:
                entries.update((host, chunk) for chunk in range(hop.first, hop.last))
    home = topology.host(transfer.sender)
    hosts = {topology.host(rank) for rank in transfer.receivers} - {home}
    wanted = {(host, chunk): 1 for host in hosts for chunk in range(len(transfer.chunks))}
    if entries != wanted:
        host, chunk = min(key for key in {*entries, *wanted} if entries[key] != wanted.get(key, 0))
        _fail(
            "a broadcast must bring each chunk into each host once",
            f"chunk {chunk} enters {topology.host_names[host]} {entries[host, chunk]} times",
            transfer,
        )


def check_order(transfers: Sequence[Transfer], all_hops: Sequence[dict[int, list[Hop]]]) -> None:
    """Prove that a plan ends: execute it without buffers, blocked by data and order alone.

    Between two ranks, sends meet receives in the order in which each side posts them; a send waits
    until its chunk is there. What comes to an end in this way does so at any speed of any link.

    Args:
        transfers: all transfers, in order.
        all_hops: the hops of each rank for each transfer.

    Raises:
        PlanError: names a message that waits for ever, or that meets another one's receive.
    """
    sends: dict[Pair, deque[Piece]] = {}
    receives: dict[Pair, deque[Piece]] = {}
    for t, hops in enumerate(all_hops):
        for rank, mine in hops.items():
            for kind, peer, first, last in mine:
                pair = (rank, peer) if kind == "send" else (peer, rank)
                queue = (sends if kind == "send" else receives).setdefault(pair, deque())
                queue.extend((t, chunk) for chunk in range(first, last))
    have = {(t, c, x.sender) for t, x in enumerate(transfers) for c in range(len(x.chunks))}
    # A pair whose next chunk is not at its sender sleeps under that chunk.
    asleep: dict[tuple[int, int, int], list[Pair]] = {}
    awake = deque(sends)
    while awake:
        pair = awake.popleft()
        source, destination = pair
        queue, other = sends[pair], receives.get(pair, deque())
        while queue:
            t, chunk = queue[0]
            if (t, chunk, source) not in have:
                asleep.setdefault((t, chunk, source), []).append(pair)
                break
            if not other or other[0] != (t, chunk):
                _fail(
                    "sends must meet their own receives",
                    f"rank {source} sends chunk {chunk} to rank {destination}, which waits for "
                    + (f"chunk {other[0][1]} of transfer {other[0][0]}" if other else "nothing"),
                    transfers[t],
                )
            queue.popleft()
            other.popleft()
            have.add((t, chunk, destination))
            awake.extend(asleep.pop((t, chunk, destination), ()))
    for waiting, what in ((sends, "send"), (receives, "receive")):
        for (source, destination), queue in waiting.items():
            if queue:
                t, chunk = queue[0]
                _fail(
                    "a plan must come to an end",
                    f"rank {source} to rank {destination}: the {what} of chunk {chunk} waits "
                    f"for ever, with {len(queue) - 1} behind it",
                    transfers[t],
                )
