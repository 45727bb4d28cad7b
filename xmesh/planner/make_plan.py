"""``xmesh.plan``: choose strategy, senders and order for one resharding."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from xmesh.dtypes import as_dtype
from xmesh.errors import PlanError, explain
from xmesh.layout import Layout
from xmesh.planner.cost import CostModel
from xmesh.planner.demand import (
    Demand,
    candidates_of,
    demands_of,
    jobs_of,
    predicted_s,
    split_over_entries,
    split_over_senders,
)
from xmesh.planner.lower import make_transfer
from xmesh.planner.plans import ListedTransfers, Plan, TransferTable
from xmesh.planner.rotation import RotatedTransfers
from xmesh.planner.schedule import SLACK, Job, Schedule, run
from xmesh.planner.schedulers import BY_NAME
from xmesh.planner.strategy import STRATEGIES
from xmesh.planner.transfer import Transfer
from xmesh.planner.unit_task import Streams
from xmesh.topology import Topology

#: Unit tasks up to which a plan is searched; beyond, transfers follow a rule.
SEARCH_LIMIT = 4096
#: Default for the largest chunk: long enough for full bandwidth, short enough to pack in passing.
CHUNK_NBYTES = 4 * 2**20
#: Messages above this gain nothing, and MPI libraries differ in what they do past 2^31 bytes.
_LARGEST_CHUNK_NBYTES = 2**30
#: Pieces below this are not worth a message of their own.
_LEAST_PIECE_NBYTES = 4096


def plan(
    src: Layout,
    dst: Layout,
    dtype: Any = "float32",
    topology: Topology | None = None,
    strategy: str = "auto",
    scheduler: str = "auto",
    seed: int = 0,
    cost: CostModel | None = None,
    name: str = "array",
    chunk_nbytes: int = CHUNK_NBYTES,
) -> Plan:
    """Plan the resharding of an array from one layout to another.

    Pure and deterministic: the same arguments give the same plan on every rank, without
    communication and without a look at the clock.

    Args:
        src: layout that holds the array.
        dst: layout that needs it; same shape, any mesh.
        dtype: element type of any fixed size.
        topology: rank -> host; by default every rank counts as a host of its own.
        strategy: one of ``STRATEGIES`` (paper section 3.1), or "auto" for the least predicted time.
        scheduler: "naive", "load_balance", "dfs", "greedy" (paper section 3.2), or "auto" for the
            best that they find.
        seed: of the randomised scheduler.
        cost: latencies and bandwidths; default ``CostModel()``.
        name: what error texts call the array.
        chunk_nbytes: largest chunk in bytes; bounds the staging memory. More than 1 GiB counts as
            1 GiB.

    Raises:
        PlanError: shapes differ, elements are missing, or an option has no meaning.
        TopologyError: a rank of a mesh is not in the topology.
    """
    _check_options(strategy, scheduler)
    chunk_nbytes = min(_integer("chunk_nbytes", chunk_nbytes, 1, 2**62), _LARGEST_CHUNK_NBYTES)
    seed = _integer("seed", seed, -(2**63), 2**63)
    check_types(src, dst, topology, cost, name)
    element = as_dtype(dtype)
    cost = cost if cost is not None else CostModel()
    ranks = {*src.ranks, *dst.ranks}
    if topology is None:
        topology = Topology.one_rank_per_host(max(ranks, default=0) + 1)
    topology.require(sorted(ranks))
    streams = Streams(src, dst)
    chunk_volume = max(1, chunk_nbytes // element.itemsize)
    table: TransferTable
    if streams.count(SEARCH_LIMIT) > SEARCH_LIMIT:
        chosen, optimal = ("broadcast" if strategy == "auto" else strategy), False
        table = RotatedTransfers(streams, chosen, element.itemsize, topology, cost, chunk_volume)
    else:
        planner = _Planner(streams, element.itemsize, topology, cost, chunk_volume, scheduler, seed)
        chosen, transfers, optimal = planner.search(strategy)
        table = ListedTransfers(tuple(transfers))
    return Plan(
        src=src,
        dst=dst,
        dtype=element,
        topology=topology,
        cost=cost,
        name=name,
        strategy=chosen,
        scheduler=scheduler,
        seed=seed,
        chunk_nbytes=chunk_nbytes,
        table=table,
        optimal=optimal,
    )


def check_types(src: Any, dst: Any, topology: Any, cost: Any, name: Any) -> None:
    """Refuse arguments of ``plan`` that are of another kind than it takes.

    Raises:
        PlanError: says which.
    """
    for what, value, kind, remedy in (
        ("src", src, Layout, "build one: xmesh.Layout(mesh, spec, shape)"),
        ("dst", dst, Layout, "build one: xmesh.Layout(mesh, spec, shape)"),
        ("topology", topology, Topology, "build one: xmesh.Topology(host_of_rank=[...])"),
        ("cost", cost, CostModel, "build one: xmesh.CostModel(nic_bandwidth_Bps=...)"),
        ("name", name, str, "pass a string"),
    ):
        optional = what in ("topology", "cost")
        if not (isinstance(value, kind) or (optional and value is None)):
            raise PlanError(
                explain(
                    f"{what} must be a {kind.__name__}",
                    values=f"{value!r} of type {type(value).__name__}",
                    remedy=remedy,
                )
            )


def _check_options(strategy: str, scheduler: str) -> None:
    for what, value, known in (
        ("strategy", strategy, (*STRATEGIES, "auto")),
        ("scheduler", scheduler, tuple(BY_NAME)),
    ):
        if not isinstance(value, str) or value not in known:
            raise PlanError(
                explain(
                    f"{what} must be one of {', '.join(known)}",
                    values=f"{value!r}",
                    remedy=f"pass {what}='auto' to let the planner choose",
                )
            )


def _integer(what: str, value: Any, least: int, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise PlanError(
            explain(
                f"{what} must be an integer from {least} to {most}",
                values=f"{what}={value!r}",
                remedy="leave it at its default",
            )
        )
    return number


class _Planner:
    """The search for one resharding; what all strategies share is worked out once."""

    def __init__(
        self,
        streams: Streams,
        itemsize: int,
        topology: Topology,
        cost: CostModel,
        chunk_volume: int,
        scheduler: str,
        seed: int,
    ) -> None:
        self.itemsize = itemsize
        self.topology = topology
        self.cost = cost
        self.chunk_volume = chunk_volume
        self.scheduler = scheduler
        self.seed = seed
        demands = [demand for stream in streams for demand in demands_of(stream, topology)]
        self.crossing = [demand for demand in demands if demand.crosses]
        self.inside = [demand for demand in demands if not demand.crosses]

    def search(self, strategy: str) -> tuple[str, list[Transfer], bool]:
        """Strategy in use, its transfers in order, and whether the schedule is known optimal."""
        names = self._worth_trying() if strategy == "auto" else [strategy]
        best = min((self._scheduled(name) for name in names), key=lambda found: found.predicted_s)
        return best.strategy, best.transfers(self), best.optimal

    def _worth_trying(self) -> list[str]:
        """Strategies that are not beaten by broadcast on every single demand."""
        demands = self.crossing or self.inside
        seconds = {
            name: [
                predicted_s(name, demand, self.itemsize, self.topology, self.cost)
                for demand in demands
            ]
            for name in STRATEGIES
        }
        ours = seconds.pop("broadcast")
        better = [
            name
            for name, theirs in seconds.items()
            if any(a < b * (1 - SLACK) for a, b in zip(theirs, ours, strict=True))
        ]
        return ["broadcast", *better]

    def _scheduled(self, strategy: str) -> _Found:
        crossing, schedule = self._schedule(self.crossing, strategy)
        inside, inside_schedule = self._schedule(self.inside, strategy)
        return _Found(
            strategy,
            [(crossing, schedule), (inside, inside_schedule)],
            max(
                self._with_latency_s(crossing, schedule, strategy),
                self._with_latency_s(inside, inside_schedule, strategy),
            ),
            schedule.optimal and inside_schedule.optimal,
        )

    def _schedule(
        self, demands: Sequence[Demand], strategy: str
    ) -> tuple[Sequence[Demand], Schedule]:
        """Demands, or pieces of them where that ends earlier, and their schedule."""
        search = BY_NAME[self.scheduler]
        jobs = self._jobs(demands, strategy)
        best, found = demands, search(jobs, self.seed)
        if self.scheduler in ("naive", "load_balance"):
            return best, found  # the paper's baselines
        if not demands or not demands[0].crosses:
            return best, found
        floor_s = _receiving_floor_s(jobs, self.topology)
        for divide in (self._over_senders, self._over_entries, self._over_both):
            if found.makespan_s <= floor_s * (1 + SLACK):
                break
            pieces = divide(demands, strategy)
            if len(pieces) > len(demands):
                schedule = search(self._jobs(pieces, strategy), self.seed)
                if schedule.makespan_s < found.makespan_s * (1 - SLACK):
                    best, found = pieces, schedule
        return best, found

    def _over_senders(self, demands: Sequence[Demand], strategy: str) -> Sequence[Demand]:
        if all(len(candidates_of(demand, self.topology)) == 1 for demand in demands):
            return demands
        return split_over_senders(
            demands, strategy, self.itemsize, self.topology, self.cost, _LEAST_PIECE_NBYTES
        )

    def _over_entries(self, demands: Sequence[Demand], strategy: str) -> Sequence[Demand]:
        return split_over_entries(
            demands, self.itemsize, self.topology, self.cost, _LEAST_PIECE_NBYTES
        )

    def _over_both(self, demands: Sequence[Demand], strategy: str) -> Sequence[Demand]:
        return self._over_senders(self._over_entries(demands, strategy), strategy)

    def _jobs(self, demands: Sequence[Demand], strategy: str) -> list[Job]:
        return jobs_of(demands, strategy, self.itemsize, self.topology, self.cost)

    def _with_latency_s(
        self, demands: Sequence[Demand], schedule: Schedule, strategy: str
    ) -> float:
        """End of the same order when each transfer takes its predicted time."""
        jobs = self._jobs(demands, strategy)
        slower = [
            Job(
                job.senders,
                job.receivers,
                (predicted_s(strategy, demand, self.itemsize, self.topology, self.cost),)
                * len(job.senders),
            )
            for job, demand in zip(jobs, demands, strict=True)
        ]
        return run(slower, schedule.decisions).makespan_s


def _receiving_floor_s(jobs: Sequence[Job], topology: Topology) -> float:
    """When the busiest host has received everything, if its NICs share the work evenly."""
    receiving: dict[int, float] = {}
    nics: dict[int, set[int]] = {}
    for host in range(topology.num_hosts):
        nics[host] = {topology.nic(rank) for rank in topology.ranks_of_host(host)}
    for job in jobs:
        for port in job.receivers:
            host = topology.nic_host(port)
            receiving[host] = receiving.get(host, 0.0) + min(job.durations_s)
    return max((seconds / len(nics[host]) for host, seconds in receiving.items()), default=0.0)


class _Found:
    """One strategy's schedules, and how they turn into transfers."""

    def __init__(
        self,
        strategy: str,
        parts: list[tuple[Sequence[Demand], Schedule]],
        predicted_s: float,
        optimal: bool,
    ) -> None:
        self.strategy = strategy
        self.parts = parts
        self.predicted_s = predicted_s
        self.optimal = optimal

    def transfers(self, planner: _Planner) -> list[Transfer]:
        """All transfers, ordered by start; the ranks behind a port take turns by bytes sent."""
        entries = []
        for kind, (demands, schedule) in enumerate(self.parts):
            for place, (decision, start_s) in enumerate(
                zip(schedule.decisions, schedule.starts_s, strict=True)
            ):
                entries.append((start_s, kind, place, demands[decision.job], decision.candidate))
        entries.sort(key=lambda entry: entry[:3])
        sent: dict[int, int] = {}
        transfers = []
        naive = planner.scheduler == "naive"
        for position, (_, _, _, demand, candidate) in enumerate(entries):
            ranks = list(candidates_of(demand, planner.topology).values())[candidate]
            sender = ranks[0] if naive else min(ranks, key=lambda rank: sent.get(rank, 0))
            sent[sender] = sent.get(sender, 0) + demand.volume
            transfers.append(
                make_transfer(
                    (position,),
                    demand,
                    sender,
                    self.strategy,
                    planner.itemsize,
                    planner.topology,
                    planner.cost,
                    planner.chunk_volume,
                )
            )
        return transfers
