"""Timelines in the Chrome trace format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol, TypeVar

from xmesh.planner.cost import CostModel
from xmesh.planner.simulate import Message
from xmesh.topology import Topology

_MICROSECONDS = 1e6
#: Spans that overlap by less follow each other; viewers count in nanoseconds.
_ROUNDING_S = 0.5e-9


class Span(NamedTuple):
    """One end of a message: what one rank did, from when to when.

    Attributes:
        start_s: seconds on the axis of the trace.
        end_s: the same.
        rank: whose doing it is.
        peer: the other rank.
        incoming: the message comes from the peer.
        order: the order of its transfer.
        chunk: index of the chunk in the transfer.
        nbytes: bytes of the chunk.
    """

    start_s: float
    end_s: float
    rank: int
    peer: int
    incoming: bool
    order: tuple[int, ...]
    chunk: int
    nbytes: int


class Call(NamedTuple):
    """One rank's call of a resharder, from its start to its end on the axis of the trace."""

    start_s: float
    end_s: float
    rank: int


def both_ends(messages: Iterable[Message], topology: Topology, cost: CostModel) -> list[Span]:
    """Spans of simulated messages: each on its sender, then on its receiver.

    The sender is done, and the receiver begins, a latency apart from the message.

    Args:
        messages: of a simulation.
        topology: rank -> host.
        cost: that of the simulation.
    """
    spans = []
    for message in messages:
        source, destination = message.source, message.destination
        latency_s, _ = cost.link(topology, source, destination)
        left_s = max(message.start_s, message.end_s - latency_s)
        first_s = min(message.end_s, message.start_s + latency_s)
        about = message.order, message.chunk, message.nbytes
        spans.append(Span(message.start_s, left_s, source, destination, False, *about))
        spans.append(Span(first_s, message.end_s, destination, source, True, *about))
    return spans


def chrome_trace(
    runs: Mapping[str, Iterable[Span | Call]],
    topology: Topology,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs of a plan on one time axis: a process for each run and host, threads for each rank.

    A rank has one thread for what it sends and one for what it receives. The format has no place
    for messages that overlap on a thread, and Perfetto drops them: they get more threads.

    Args:
        runs: name of the run -> what happened in it.
        topology: rank -> host.
        about: what a reader should know, kept as the trace's ``otherData``.

    Returns:
        Plain data for ``json.dump``; times in microseconds, as the format asks.
    """
    events: list[dict[str, Any]] = []
    for number, (run, happened) in enumerate(runs.items()):
        lanes: dict[tuple[int, int], list[Span | Call]] = {}
        for span in happened:
            kind = 0 if isinstance(span, Call) else 2 if span.incoming else 1
            lanes.setdefault((span.rank, kind), []).append(span)
        hosts = sorted({topology.host(rank) for rank, _ in lanes})
        process = {host: 1 + number * topology.num_hosts + host for host in hosts}
        for host in hosts:
            name = f"{run} {topology.host_names[host]}"
            events.append(metadata_event("process_name", process[host], 0, name=name))
            events.append(
                metadata_event("process_sort_index", process[host], 0, sort_index=process[host])
            )
        thread = 0
        for (rank, kind), spans in sorted(lanes.items()):
            for place, row in enumerate(apart(spans)):
                thread += 1
                pid = process[topology.host(rank)]
                name = f"rank {rank} {('call', 'out', 'in')[kind]}"
                name += f" ({place + 1})" if place else ""
                events.append(metadata_event("thread_name", pid, thread, name=name))
                events.append(metadata_event("thread_sort_index", pid, thread, sort_index=thread))
                events += [_event(span, pid, thread) for span in row]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}


class Timed(Protocol):
    """Anything that lasts from one time to another, in seconds."""

    @property
    def start_s(self) -> float:
        """When it begins."""

    @property
    def end_s(self) -> float:
        """When it ends."""


AnySpan = TypeVar("AnySpan", bound=Timed)


def apart(spans: Sequence[AnySpan]) -> list[list[AnySpan]]:
    """Spans in as few rows as there are at one time, so that those of a row do not overlap."""
    rows: list[list[AnySpan]] = []
    busy: list[tuple[float, int]] = []  # (end, row), and rows that are free
    free: list[int] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        while busy and busy[0][0] <= span.start_s + _ROUNDING_S:
            heappush(free, heappop(busy)[1])
        row = heappop(free) if free else len(rows)
        if row == len(rows):
            rows.append([])
        rows[row].append(span)
        heappush(busy, (span.end_s, row))
    return rows


def _event(span: Span | Call, process: int, thread: int) -> dict[str, Any]:
    name, about = "call", {}
    if isinstance(span, Span):
        transfer = ".".join(map(str, span.order))
        name = f"{transfer} {'from' if span.incoming else 'to'} {span.peer}"
        about = {"transfer": transfer, "chunk": span.chunk, "nbytes": span.nbytes}
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": span.start_s * _MICROSECONDS,
        "dur": (span.end_s - span.start_s) * _MICROSECONDS,
        "args": {**about, "rank": span.rank},
    }


def metadata_event(kind: str, process: int, thread: int, **about: Any) -> dict[str, Any]:
    """An event that names or orders a process or a thread of a Chrome trace."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": about}
