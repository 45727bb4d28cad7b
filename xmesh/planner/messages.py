"""The messages of a plan, as a simulation sees them: who waits for whom, by which ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xmesh.errors import PlanError, explain
from xmesh.planner.cost import CostModel
from xmesh.planner.plans import Plan
from xmesh.planner.strategy import hops_of
from xmesh.topology import Topology


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


class Link(NamedTuple):
    """From one rank to another.

    Attributes:
        out: port that a message leaves by: an even number; those of NICs come first.
        into: port that it enters by, an odd number.
        crosses: the ranks are on two hosts.
        latency_s: seconds beside the bytes.
        bandwidth_Bps: bytes per second when nobody else uses the ports.
    """

    out: int
    into: int
    crosses: bool
    latency_s: float
    bandwidth_Bps: float


def link_of(source: int, destination: int, topology: Topology, cost: CostModel) -> Link:
    """The ports and figures of messages from one rank to another."""
    crosses = topology.host(source) != topology.host(destination)
    if crosses:
        out, into = topology.nic(source), topology.nic(destination)
    else:
        out, into = topology.num_nics + source, topology.num_nics + destination
    return Link(2 * out, 2 * into + 1, crosses, *cost.link(topology, source, destination))


class Traffic:
    """All messages of a plan, known by their place in the order in which they take ports.

    That order is: by transfer; within one, what its sender sends before what relays pass on (were
    relays first, a ring over all receivers would keep the sender waiting, and everybody else with
    it); then by chunk.

    Args:
        plan: what is to move.
        cost: latencies and bandwidths.

    Attributes:
        pair: of each message, (source, destination).
        nbytes: of each message.
        link: for each pair of ranks, ports and figures.
        port_Bps: for each port, the bytes per second of all that pass it.
        queue: for each pair of ranks, its messages in posting order.
        eager_nbytes: see CostModel.
        at_sender: of each message, whether its chunk is at its source from the start.
    """

    def __init__(self, plan: Plan, cost: CostModel) -> None:
        self._topology = plan.topology
        self.eager_nbytes = cost.eager_nbytes
        self.pair: list[tuple[int, int]] = []
        self.nbytes: list[int] = []
        self.queue: dict[tuple[int, int], list[int]] = {}
        self.at_sender: list[bool] = []
        self._order: list[tuple[int, ...]] = []
        self._chunk: list[int] = []
        #: (transfer, chunk, rank): messages that can leave once the chunk is there.
        self._waiting_for: dict[tuple[int, int, int], list[int]] = {}
        #: What each message brings to its receiver.
        self._brings: list[tuple[int, int, int]] = []
        self._read(plan)
        self.link = {pair: link_of(*pair, plan.topology, cost) for pair in self.queue}
        nics = plan.topology.num_nics
        self.port_Bps = {
            port: cost.bandwidth_Bps(plan.topology, port // 2)
            if port // 2 < nics
            else cost.intra_bandwidth_Bps
            for link in self.link.values()
            for port in (link.out, link.into)
        }

    def _read(self, plan: Plan) -> None:
        for t, transfer in enumerate(plan.transfers()):
            found = []
            for rank in transfer.ranks:
                for kind, peer, first, last in hops_of(transfer, plan.topology, rank):
                    if kind == "send":
                        found += [(chunk, rank, peer) for chunk in range(first, last)]
            sizes = [sum(box.volume for box in chunk) for chunk in transfer.chunks]
            base = len(self.pair)
            # What compares equal stays as posted.
            in_order = sorted(
                range(len(found)), key=lambda i: (found[i][1] != transfer.sender, found[i][0])
            )
            number = [0] * len(found)
            for place, i in enumerate(in_order):
                chunk, rank, peer = found[i]
                number[i] = base + place
                self._order.append(transfer.order)
                self._chunk.append(chunk)
                self.nbytes.append(sizes[chunk] * plan.itemsize)
                self.pair.append((rank, peer))
                self._brings.append((t, chunk, peer))
                self.at_sender.append(rank == transfer.sender)
                if rank != transfer.sender:
                    self._waiting_for.setdefault((t, chunk, rank), []).append(base + place)
            for message, (_, rank, peer) in zip(number, found, strict=True):
                self.queue.setdefault((rank, peer), []).append(message)

    def __len__(self) -> int:
        return len(self.pair)

    def enabled_by(self, message: int) -> Sequence[int]:
        """Messages whose chunk is at their source once this one has arrived."""
        return self._waiting_for.get(self._brings[message], ())

    def require_started(self, start_s: Sequence[float | None]) -> list[float]:
        """The starts, when there is one for each message.

        Raises:
            PlanError: some message never started.
        """
        stuck = [m for m, start in enumerate(start_s) if start is None]
        if stuck:
            source, destination = self.pair[stuck[0]]
            raise PlanError(
                explain(
                    "every message of a plan must be able to start",
                    values=f"{len(stuck)} messages wait for ever, first chunk "
                    f"{self._chunk[stuck[0]]} from rank {source} to rank {destination}",
                    context=f"transfer {self._order[stuck[0]]}",
                    remedy="let xmesh.planner.check name what is wrong with the plan",
                )
            )
        return [start for start in start_s if start is not None]

    def timeline(self, start_s: Sequence[float | None], end_s: Sequence[float]) -> Simulation:
        """Timeline and totals.

        Args:
            start_s: of each message, when it takes its ports.
            end_s: of each message, when it has arrived.

        Raises:
            PlanError: some message never started.
        """
        starts = self.require_started(start_s)
        topology = self._topology
        messages = []
        busy = {True: [0.0] * topology.num_nics, False: [0.0] * topology.num_nics}
        nbytes = {True: [0] * topology.num_hosts, False: [0] * topology.num_hosts}
        for m in sorted(range(len(starts)), key=lambda m: (starts[m], m)):
            pair, size = self.pair[m], self.nbytes[m]
            messages.append(
                Message(starts[m], end_s[m], *pair, self._order[m], self._chunk[m], size)
            )
            link = self.link[pair]
            if link.crosses:
                for out, port in ((True, link.out), (False, link.into)):
                    busy[out][port // 2] += size / link.bandwidth_Bps
                    nbytes[out][topology.nic_host(port // 2)] += size
        return Simulation(
            makespan_s=max(end_s, default=0.0),
            messages=tuple(messages),
            nic_out_busy_s=tuple(busy[True]),
            nic_in_busy_s=tuple(busy[False]),
            host_out_nbytes=tuple(nbytes[True]),
            host_in_nbytes=tuple(nbytes[False]),
        )
