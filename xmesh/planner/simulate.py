"""Simulation of a plan, message by message: what the paper's model (whole transfers) leaves out.

A message is one chunk on its way from one rank to another. Its rules:

- It may start once its chunk is at the sender: at time 0 for the sender of the transfer, on arrival
  for a relay. Messages between two ranks keep the order in which they are posted.
- Between hosts it takes the sender's NIC outwards and the receiver's NIC inwards, both for its
  bytes over the slower one's bandwidth, and nobody else uses those two meanwhile; NICs are full
  duplex. Inside a host it takes the two ranks in the same way, at the memory's bandwidth.
- It arrives one latency after it left; the ports are free before that.
- Of all messages that could start, the first in the plan's order does: by transfer; within one,
  what its sender sends before what relays pass on; then by chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from xmesh.errors import PlanError, explain
from xmesh.planner.cost import CostModel
from xmesh.planner.plans import Plan
from xmesh.planner.strategy import hops_of
from xmesh.topology import Topology

#: Events closer than this, relative to the time, are one: the same sum of floats in another order.
_SAME_TIME = 1e-12


class Message(NamedTuple):
    """One chunk from one rank to another.

    Attributes:
        start_s: when it takes its ports.
        end_s: when it has arrived; its ports were free a latency before.
        source: rank that sends it.
        destination: rank that receives it.
        order: the order of its transfer.
        chunk: index of the chunk in the transfer.
        nbytes: bytes of the chunk.
    """

    start_s: float
    end_s: float
    source: int
    destination: int
    order: tuple[int, ...]
    chunk: int
    nbytes: int


@dataclass(frozen=True)
class Simulation:
    """What a plan does when nothing disturbs it.

    Attributes:
        makespan_s: arrival of the last message; 0 when nothing moves.
        messages: every message, by start, then in the order of the plan.
        nic_out_busy_s: for each NIC, seconds for which it sends.
        nic_in_busy_s: for each NIC, seconds for which it receives.
        host_out_nbytes: for each host, bytes that leave it.
        host_in_nbytes: for each host, bytes that enter it.
    """

    makespan_s: float
    messages: tuple[Message, ...]
    nic_out_busy_s: tuple[float, ...]
    nic_in_busy_s: tuple[float, ...]
    host_out_nbytes: tuple[int, ...]
    host_in_nbytes: tuple[int, ...]


def simulate(plan: Plan, cost: CostModel | None = None) -> Simulation:
    """Let a plan run on a cluster that keeps to the cost model.

    Args:
        plan: what to run.
        cost: latencies and bandwidths; default: those that the plan was made for. Bandwidths that
            the topology gives for its NICs come first, as everywhere.

    Raises:
        PlanError: some message waits for ever (``xmesh.planner.check`` says why).
    """
    run = _Run(plan, plan.cost if cost is None else cost)
    run.finish()
    return run.result(plan.topology)


class _Run:
    """State of one simulation; messages are known by their place in the plan's order."""

    def __init__(self, plan: Plan, cost: CostModel) -> None:
        self.link: dict[tuple[int, int], _Link] = {}
        self.order: list[tuple[int, ...]] = []
        self.chunk: list[int] = []
        self.nbytes: list[int] = []
        self.pair: list[tuple[int, int]] = []
        #: Messages of each pair of ranks, in posting order, and the place of the next one.
        self.queue: dict[tuple[int, int], list[int]] = {}
        self.head: dict[tuple[int, int], int] = {}
        #: (transfer, chunk, rank): messages that can leave once the chunk is there.
        self.waiting_for: dict[tuple[int, int, int], list[int]] = {}
        #: What each message brings to its receiver.
        self.brings: list[tuple[int, int, int]] = []
        self.at_sender: list[bool] = []
        self._read(plan)
        for pair in self.queue:
            self.link[pair] = _link(*pair, plan.topology, cost)
        self.ports = _Ports([self.link[pair][:2] for pair in self.pair])
        self.start_s: list[float | None] = [None] * len(self.pair)
        self.end_s = [0.0] * len(self.pair)

    def _read(self, plan: Plan) -> None:
        """Messages of all transfers, numbered in the order in which they take free ports."""
        for t, transfer in enumerate(plan.transfers()):
            found = []
            for rank in transfer.ranks:
                for kind, peer, first, last in hops_of(transfer, plan.topology, rank):
                    if kind == "send":
                        found += [(chunk, rank, peer) for chunk in range(first, last)]
            sizes = [sum(box.volume for box in chunk) for chunk in transfer.chunks]
            base = len(self.pair)
            # Relays last: were they first, a ring over all receivers would keep the sender waiting,
            # and everybody else with it. What compares equal stays as posted.
            in_order = sorted(
                range(len(found)), key=lambda i: (found[i][1] != transfer.sender, found[i][0])
            )
            number = [0] * len(found)
            for place, i in enumerate(in_order):
                chunk, rank, peer = found[i]
                number[i] = base + place
                self.order.append(transfer.order)
                self.chunk.append(chunk)
                self.nbytes.append(sizes[chunk] * plan.itemsize)
                self.pair.append((rank, peer))
                self.brings.append((t, chunk, peer))
                self.at_sender.append(rank == transfer.sender)
                if rank != transfer.sender:
                    self.waiting_for.setdefault((t, chunk, rank), []).append(base + place)
            for message, (_, rank, peer) in zip(number, found, strict=True):
                self.queue.setdefault((rank, peer), []).append(message)

    def finish(self) -> None:
        """Handle event after event: a message has left its ports, or has arrived."""
        self.head = dict.fromkeys(self.queue, 0)
        events: list[tuple[float, int, int, bool]] = []
        serial = count()
        self._begin([m for pair in self.queue for m in self._ready(pair)], [], 0.0, events, serial)
        while events:
            now = events[0][0]
            limit = now * (1 + _SAME_TIME)
            fresh: list[int] = []
            freed: list[int] = []
            while events and events[0][0] <= limit:
                now, _, message, arrived = heappop(events)
                if arrived:
                    for other in self.waiting_for.get(self.brings[message], ()):
                        self.at_sender[other] = True
                        if self._is_head(other):
                            fresh.append(other)
                else:
                    freed += self.ports.free(message)
                    self.head[self.pair[message]] += 1
                    fresh += self._ready(self.pair[message])
            self._begin(fresh, freed, now, events, serial)
        stuck = [m for m, start in enumerate(self.start_s) if start is None]
        if stuck:
            source, destination = self.pair[stuck[0]]
            raise PlanError(
                explain(
                    "every message of a plan must be able to start",
                    values=f"{len(stuck)} messages wait for ever, first chunk "
                    f"{self.chunk[stuck[0]]} from rank {source} to rank {destination}",
                    context=f"transfer {self.order[stuck[0]]}",
                    remedy="let xmesh.planner.check name what is wrong with the plan",
                )
            )

    def _is_head(self, message: int) -> bool:
        queue, head = self.queue[self.pair[message]], self.head[self.pair[message]]
        return head < len(queue) and queue[head] == message

    def _ready(self, pair: tuple[int, int]) -> list[int]:
        """The next message of a pair, if its chunk is at the sender."""
        queue, head = self.queue[pair], self.head[pair]
        return [queue[head]] if head < len(queue) and self.at_sender[queue[head]] else []

    def _begin(
        self,
        fresh: Iterable[int],
        freed: Iterable[int],
        now: float,
        events: list[tuple[float, int, int, bool]],
        serial: count[int],
    ) -> None:
        """Start all that can start now."""
        for message in self.ports.begin(fresh, freed):
            link = self.link[self.pair[message]]
            left = now + self.nbytes[message] / link.bandwidth_Bps
            self.start_s[message], self.end_s[message] = now, left + link.latency_s
            heappush(events, (left, next(serial), message, False))
            heappush(events, (self.end_s[message], next(serial), message, True))

    def result(self, topology: Topology) -> Simulation:
        """Timeline and totals."""
        messages = []
        busy = {True: [0.0] * topology.num_nics, False: [0.0] * topology.num_nics}
        nbytes = {True: [0] * topology.num_hosts, False: [0] * topology.num_hosts}
        starts = [start for start in self.start_s if start is not None]
        for m in sorted(range(len(starts)), key=lambda m: (starts[m], m)):
            source, destination = self.pair[m]
            messages.append(
                Message(
                    starts[m],
                    self.end_s[m],
                    source,
                    destination,
                    self.order[m],
                    self.chunk[m],
                    self.nbytes[m],
                )
            )
            link = self.link[source, destination]
            if link.crosses:
                for out, port in ((True, link.out), (False, link.into)):
                    busy[out][port // 2] += self.nbytes[m] / link.bandwidth_Bps
                    nbytes[out][topology.nic_host(port // 2)] += self.nbytes[m]
        return Simulation(
            makespan_s=max(self.end_s, default=0.0),
            messages=tuple(messages),
            nic_out_busy_s=tuple(busy[True]),
            nic_in_busy_s=tuple(busy[False]),
            host_out_nbytes=tuple(nbytes[True]),
            host_in_nbytes=tuple(nbytes[False]),
        )


class _Link(NamedTuple):
    """From one rank to another. Outgoing ports are even, incoming ones odd; NICs come first."""

    out: int
    into: int
    crosses: bool
    latency_s: float
    bandwidth_Bps: float


def _link(source: int, destination: int, topology: Topology, cost: CostModel) -> _Link:
    crosses = topology.host(source) != topology.host(destination)
    if crosses:
        out, into = topology.nic(source), topology.nic(destination)
    else:
        out, into = topology.num_nics + source, topology.num_nics + destination
    return _Link(2 * out, 2 * into + 1, crosses, *cost.link(topology, source, destination))


class _Ports:
    """Which ports are free, and which messages wait for which.

    A message waits in the heap of either port, and in that of the pair of ports. Usually the first
    message of a port that came free can start; where its other port is taken, the heads of the
    pairs are looked through, over the free ports or over the pairs, whichever are fewer.

    Args:
        ports: outgoing and incoming port of each message.
    """

    def __init__(self, ports: Sequence[tuple[int, int]]) -> None:
        self._ports = ports
        every = {port for pair in ports for port in pair}
        self._free_out = {port for port in every if port % 2 == 0}
        self._free_in = every - self._free_out
        self._waiting = [False] * len(ports)
        self._of_port: dict[int, list[int]] = {port: [] for port in every}
        self._of_pair: dict[int, dict[int, list[int]]] = {port: {} for port in every}

    def free(self, message: int) -> tuple[int, int]:
        """Give back the ports of a message that has left."""
        out, into = self._ports[message]
        self._free_out.add(out)
        self._free_in.add(into)
        return out, into

    def begin(self, fresh: Iterable[int], freed: Iterable[int]) -> list[int]:
        """Messages that start now, and take their ports, given what changed.

        Args:
            fresh: messages that from now on wait for their ports.
            freed: ports that came free.
        """
        # A message to try, and the port to look further for should it not start; -1 for none.
        candidates: list[tuple[int, int]] = []
        for message in fresh:
            self._wait(message)
            candidates.append((message, -1))
        for port in freed:
            first = self._top(self._of_port[port])
            if first is not None:
                candidates.append((first, port))
        heapify(candidates)
        others: dict[int, list[int]] = {}
        started = []
        while candidates:
            message, port = heappop(candidates)
            out, into = self._ports[message]
            if self._waiting[message] and out in self._free_out and into in self._free_in:
                self._waiting[message] = False
                self._free_out.remove(out)
                self._free_in.remove(into)
                started.append(message)
            elif port in self._free_out or port in self._free_in:
                if port not in others:
                    others[port] = self._startable(port)
                if others[port]:
                    heappush(candidates, (heappop(others[port]), port))
        return started

    def _wait(self, message: int) -> None:
        out, into = self._ports[message]
        self._waiting[message] = True
        heappush(self._of_port[out], message)
        heappush(self._of_port[into], message)
        # Both directions share one heap.
        heap = self._of_pair[out].get(into)
        if heap is None:
            heap = self._of_pair[out][into] = self._of_pair[into][out] = []
        heappush(heap, message)

    def _top(self, heap: list[int]) -> int | None:
        """First message of a heap that still waits."""
        while heap and not self._waiting[heap[0]]:
            heappop(heap)
        return heap[0] if heap else None

    def _startable(self, port: int) -> list[int]:
        """A heap of the first waiting message towards each free port."""
        pairs = self._of_pair[port]
        free = self._free_in if port % 2 == 0 else self._free_out
        few, many = (free, pairs) if len(free) < len(pairs) else (pairs, free)
        tops = [self._top(pairs[other]) for other in few if other in many]
        found = [message for message in tops if message is not None]
        heapify(found)
        return found
