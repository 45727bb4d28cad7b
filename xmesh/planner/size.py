"""How many messages a plan has, known before they are made."""

from __future__ import annotations

from xmesh.planner.plans import Plan
from xmesh.planner.rotation import RotatedTransfers

#: Unit tasks of a plan by rule up to which its messages are counted.
COUNT_LIMIT = 20_000
#: Receivers that are looked at where they are not.
_SAMPLES = 12


def count_messages(plan: Plan) -> tuple[int, bool]:
    """Messages of a plan, and whether that is exact.

    Every strategy brings each chunk to each receiver once, so no message need be made to be
    counted. A plan by rule with many unit tasks is not even enumerated: a few receivers, spread
    evenly over the destination, stand for all.
    """
    by_rule = isinstance(plan.table, RotatedTransfers)
    if not by_rule or plan.streams.count(COUNT_LIMIT) <= COUNT_LIMIT:
        return sum(len(t.receivers) * len(t.chunks) for t in plan.table.all()), True
    ranks = plan.dst.ranks
    sample = [ranks[i * len(ranks) // _SAMPLES] for i in range(min(_SAMPLES, len(ranks)))]
    received = sum(
        len(transfer.chunks)
        for rank in sample
        for transfer in plan.table.of_rank(rank)
        if rank in transfer.receivers
    )
    return received * len(ranks) // len(sample), False
