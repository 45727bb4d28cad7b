"""Simulation of a plan, message by message: what the paper's model (whole transfers) leaves out.

Two models of a port that several messages want. In both a message may start once its chunk is at
the sender: at time 0 for the sender of the transfer, on arrival for a relay. It takes the sender's
NIC outwards and the receiver's NIC inwards, or inside a host the two ranks; NICs are full duplex.
It arrives one latency after it left; the ports are free before that.

"exclusive", the paper's: nobody else uses the two ports meanwhile. Messages between two ranks keep
the order in which they are posted. Of all messages that could start, the first in the plan's order
does (see ``Traffic``).

"fair", what networks do: see ``xmesh.planner.fair``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from xmesh.errors import OptionError, explain
from xmesh.planner.cost import CostModel
from xmesh.planner.fair import share_fairly
from xmesh.planner.messages import Message, Simulation, Traffic
from xmesh.planner.plans import Plan

__all__ = ["SHARING", "Message", "Simulation", "simulate"]

SHARING = ("exclusive", "fair")
#: Events closer than this, relative to the time, are one: the same sum of floats in another order.
_SAME_TIME = 1e-12


def simulate(plan: Plan, cost: CostModel | None = None, sharing: str = "exclusive") -> Simulation:
    """Let a plan run on a cluster that keeps to the cost model.

    Args:
        plan: what to run.
        cost: latencies and bandwidths; default: those that the plan was made for. Bandwidths that
            the topology gives for its NICs come first, as everywhere.
        sharing: "exclusive" or "fair"; the second is closer to a network, and slower: seconds for
            some thousands of messages.

    Raises:
        PlanError: some message waits for ever (``xmesh.planner.check`` says why).
        OptionError: no such model.
    """
    if sharing not in SHARING:
        raise OptionError(
            explain(
                f"sharing must be one of {', '.join(SHARING)}",
                values=f"{sharing!r}",
                remedy="leave it at 'exclusive', the paper's model",
            )
        )
    traffic = Traffic(plan, plan.cost if cost is None else cost)
    if sharing == "fair":
        return traffic.timeline(*share_fairly(traffic))
    run = _Run(traffic)
    run.finish()
    return traffic.timeline(run.start_s, run.end_s)


class _Run:
    """State of one simulation."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.at_sender = list(traffic.at_sender)
        #: The place of the next message of each pair of ranks.
        self.head = dict.fromkeys(traffic.queue, 0)
        self.ports = _Ports([traffic.link[pair][:2] for pair in traffic.pair])
        self.start_s: list[float | None] = [None] * len(traffic)
        self.end_s = [0.0] * len(traffic)

    def finish(self) -> None:
        """Handle event after event: a message has left its ports, or has arrived."""
        traffic = self.traffic
        events: list[tuple[float, int, int, bool]] = []
        serial = count()
        first = [m for pair in traffic.queue for m in self._ready(pair)]
        self._begin(first, [], 0.0, events, serial)
        while events:
            now = events[0][0]
            limit = now * (1 + _SAME_TIME)
            fresh: list[int] = []
            freed: list[int] = []
            while events and events[0][0] <= limit:
                now, _, message, arrived = heappop(events)
                if arrived:
                    for other in traffic.enabled_by(message):
                        self.at_sender[other] = True
                        if self._is_head(other):
                            fresh.append(other)
                else:
                    freed += self.ports.free(message)
                    self.head[traffic.pair[message]] += 1
                    fresh += self._ready(traffic.pair[message])
            self._begin(fresh, freed, now, events, serial)

    def _is_head(self, message: int) -> bool:
        pair = self.traffic.pair[message]
        queue, head = self.traffic.queue[pair], self.head[pair]
        return head < len(queue) and queue[head] == message

    def _ready(self, pair: tuple[int, int]) -> list[int]:
        """The next message of a pair, if its chunk is at the sender."""
        queue, head = self.traffic.queue[pair], self.head[pair]
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
            link = self.traffic.link[self.traffic.pair[message]]
            left = now + self.traffic.nbytes[message] / link.bandwidth_Bps
            self.start_s[message], self.end_s[message] = now, left + link.latency_s
            heappush(events, (left, next(serial), message, False))
            heappush(events, (self.end_s[message], next(serial), message, True))


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
