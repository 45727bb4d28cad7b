"""Messages that share ports fairly, as flows do in a network.

Between two ranks there is one flow at a time, as over one connection: their messages go one after
the other. Flows that meet in a port share it by max-min fairness: none can be faster without one
that is no faster becoming slower. A rank has a few sends under way at a time, in the order of the
plan among those whose chunk is there, as the executor has; a message that the library takes off its
hands is none of these.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from heapq import heappop, heappush

from xmesh.planner.messages import Link, Traffic

#: Sends that a rank has under way at a time, here as in the executor: enough to hide the latency
#: between two chunks; more would undo the order.
SENDS_IN_FLIGHT = 4
#: A flow with less than this part of a message left has ended: what remains is rounding.
_NOTHING_LEFT = 1e-9

Pair = tuple[int, int]


def share_fairly(traffic: Traffic) -> tuple[list[float | None], list[float]]:
    """Start and arrival of each message, in seconds; None for one that never starts."""
    run = _FairRun(traffic)
    run.finish()
    return run.start_s, run.end_s


class _FairRun:
    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.start_s: list[float | None] = [None] * len(traffic)
        self.end_s = [0.0] * len(traffic)
        self._now_s = 0.0
        #: By sending rank: messages whose chunk is there, and how many are under way.
        self._ready: dict[int, list[int]] = {}
        self._under_way: Counter[int] = Counter()
        #: Messages under way by pair; the first of them moves.
        self._posted: dict[Pair, deque[int]] = {}
        self._left_nbytes: dict[Pair, float] = {}
        self._rate_Bps: dict[Pair, float] = {}
        #: Heap of (time, message): messages that have left, and are to arrive.
        self._arriving: list[tuple[float, int]] = []
        for message, here in enumerate(traffic.at_sender):
            if here:
                self._offer(message)

    def finish(self) -> None:
        """From event to event: a message leaves, or arrives."""
        self._post(self._ready)
        while self._left_nbytes or self._arriving:
            if self._left_nbytes:
                flows = {pair: self.traffic.link[pair] for pair in self._left_nbytes}
                self._rate_Bps = max_min_rates(flows, self.traffic.port_Bps)
            leave_s = min(
                (left / self._rate_Bps[pair] for pair, left in self._left_nbytes.items()),
                default=math.inf,
            )
            arrive_s = self._arriving[0][0] - self._now_s if self._arriving else math.inf
            self._advance(min(leave_s, arrive_s))

    def _advance(self, step_s: float) -> None:
        self._now_s += step_s
        ranks: dict[int, None] = {}
        for pair in list(self._left_nbytes):
            self._left_nbytes[pair] -= step_s * self._rate_Bps[pair]
            message = self._posted[pair][0]
            if self._left_nbytes[pair] <= _NOTHING_LEFT * self.traffic.nbytes[message]:
                self._leave(pair)
                ranks[pair[0]] = None
        while self._arriving and self._arriving[0][0] <= self._now_s:
            _, message = heappop(self._arriving)
            for other in self.traffic.enabled_by(message):
                self._offer(other)
                ranks[self.traffic.pair[other][0]] = None
        self._post(ranks)

    def _leave(self, pair: Pair) -> None:
        posted = self._posted[pair]
        message = posted.popleft()
        if not self._eager(message):
            self._under_way[pair[0]] -= 1
        self.end_s[message] = self._now_s + self.traffic.link[pair].latency_s
        heappush(self._arriving, (self.end_s[message], message))
        if posted:
            self._move(pair)
        else:
            del self._left_nbytes[pair]

    def _offer(self, message: int) -> None:
        heappush(self._ready.setdefault(self.traffic.pair[message][0], []), message)

    def _post(self, ranks: Mapping[int, object]) -> None:
        for rank in ranks:
            ready = self._ready.get(rank, [])
            while ready and self._under_way[rank] < SENDS_IN_FLIGHT:
                message = heappop(ready)
                if not self._eager(message):
                    self._under_way[rank] += 1
                pair = self.traffic.pair[message]
                self._posted.setdefault(pair, deque()).append(message)
                if len(self._posted[pair]) == 1:
                    self._move(pair)

    def _eager(self, message: int) -> bool:
        crosses = self.traffic.link[self.traffic.pair[message]].crosses
        return crosses and self.traffic.nbytes[message] <= self.traffic.eager_nbytes

    def _move(self, pair: Pair) -> None:
        message = self._posted[pair][0]
        self.start_s[message] = self._now_s
        self._left_nbytes[pair] = float(self.traffic.nbytes[message])


def max_min_rates(flows: Mapping[Pair, Link], port_Bps: Mapping[int, float]) -> dict[Pair, float]:
    """Bytes per second of each flow, by progressive filling.

    All grow alike until some port is full; the flows through it stay as they are, the others go on.

    Args:
        flows: what moves, and by which ports.
        port_Bps: bytes per second of each port.
    """
    users: dict[int, dict[Pair, None]] = {}
    for pair, link in flows.items():
        for port in (link.out, link.into):
            users.setdefault(port, {})[pair] = None
    room = {port: port_Bps[port] for port in users}
    rates: dict[Pair, float] = {}
    while len(rates) < len(flows):
        full = min((port for port in users if users[port]), key=lambda p: room[p] / len(users[p]))
        share = room[full] / len(users[full])
        for pair in list(users[full]):
            rates[pair] = share
            for port in (flows[pair].out, flows[pair].into):
                del users[port][pair]
                room[port] -= share
    return rates
