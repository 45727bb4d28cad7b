"""Timelines of plans in the Chrome trace format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xmesh.planner.simulate import Message
from xmesh.topology import Topology

_MICROSECONDS = 1e6


def chrome_trace(messages: Iterable[Message], topology: Topology) -> dict[str, Any]:
    """Messages as a trace: a process for each host, and two threads for each rank, out and in.

    Args:
        messages: from ``simulate``; times in seconds.
        topology: rank -> host.

    Returns:
        Plain data for ``json.dump``; times in microseconds, as the format asks.
    """
    events: list[dict[str, Any]] = []
    ranks: set[int] = set()
    for message in messages:
        ranks |= {message.source, message.destination}
        times = {
            "ts": message.start_s * _MICROSECONDS,
            "dur": (message.end_s - message.start_s) * _MICROSECONDS,
        }
        transfer = ".".join(map(str, message.order))
        about = {"transfer": transfer, "chunk": message.chunk, "nbytes": message.nbytes}
        for rank, thread, text in (
            (message.source, 2 * message.source, f"{transfer} to {message.destination}"),
            (message.destination, 2 * message.destination + 1, f"{transfer} from {message.source}"),
        ):
            events.append(
                {
                    "name": text,
                    "ph": "X",
                    "pid": topology.host(rank),
                    "tid": thread,
                    "args": about,
                    **times,
                }
            )
    for host in sorted({topology.host(rank) for rank in ranks}):
        events.append(_name("process_name", host, 0, topology.host_names[host]))
    for rank in sorted(ranks):
        host = topology.host(rank)
        events.append(_name("thread_name", host, 2 * rank, f"rank {rank} out"))
        events.append(_name("thread_name", host, 2 * rank + 1, f"rank {rank} in"))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
