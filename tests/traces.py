"""Reading traces: which messages stand in one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from xmesh.planner.simulate import simulate


def messages_of(made):
    """(source, destination, transfer, bytes) of each message that the plan asks for."""
    return Counter(
        (m.source, m.destination, ".".join(map(str, m.order)), m.chunk, m.nbytes)
        for m in simulate(made).messages
    )


def bars(trace, run):
    """Bars of the processes of a run: calls apart from messages."""
    events = trace["traceEvents"]
    processes = {
        event["pid"]
        for event in events
        if event["name"] == "process_name" and event["args"]["name"].split()[0] == run
    }
    found = [e for e in events if e["ph"] == "X" and e["pid"] in processes]
    calls = [bar for bar in found if bar["name"] == "call"]
    return calls, [bar for bar in found if bar["name"] != "call"]


def ends(found):
    """(source, destination, transfer, chunk, bytes), as seen by senders and by receivers."""
    sent: Counter[Any] = Counter()
    received: Counter[Any] = Counter()
    for bar in found:
        about = bar["args"]
        _, direction, peer = bar["name"].split()
        pair = (about["rank"], int(peer)) if direction == "to" else (int(peer), about["rank"])
        side = sent if direction == "to" else received
        side[(*pair, about["transfer"], about["chunk"], about["nbytes"])] += 1
    return sent, received
