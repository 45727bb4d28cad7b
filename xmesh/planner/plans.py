"""Plan: everything about one resharding, as pure data that is the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from xmesh.box import Box
from xmesh.dtypes import dtype_name, named_dtype
from xmesh.errors import PlanError, explain
from xmesh.layout import Layout
from xmesh.planner.bound import lower_bound_s
from xmesh.planner.cost import CostModel
from xmesh.planner.demand import occupied_s, receiving_ports, sending_port
from xmesh.planner.schedule import Decision, Job, Schedule, run
from xmesh.planner.strategy import ops_of, shape_of
from xmesh.planner.transfer import Op, Transfer
from xmesh.planner.unit_task import Streams, UnitTask
from xmesh.topology import Topology

_FORMAT = 1


class TransferTable(Protocol):
    """Where a plan's transfers come from: a searched list, or a rule."""

    def all(self) -> Iterator[Transfer]:
        """Every transfer, in order."""

    def of_rank(self, rank: int) -> list[Transfer]:
        """Transfers that a rank sends, receives or relays, in order."""

    def to_json(self) -> Any:
        """Plain data from which the same table can be made."""


class ListedTransfers:
    """Transfers that a search found, one by one."""

    def __init__(self, transfers: tuple[Transfer, ...]) -> None:
        self._transfers = tuple(sorted(transfers, key=lambda transfer: transfer.order))

    def all(self) -> Iterator[Transfer]:
        """Every transfer, in order."""
        return iter(self._transfers)

    @cached_property
    def _by_rank(self) -> dict[int, list[Transfer]]:
        table: dict[int, list[Transfer]] = {}
        for transfer in self._transfers:
            for rank in transfer.ranks:
                table.setdefault(rank, []).append(transfer)
        return table

    def of_rank(self, rank: int) -> list[Transfer]:
        """Transfers that a rank sends, receives or relays, in order."""
        return self._by_rank.get(rank, [])

    def to_json(self) -> Any:
        """The transfers as a list."""
        return [transfer.to_json() for transfer in self._transfers]


@dataclass(frozen=True, eq=False)
class Plan:
    """How an array moves from one layout to another.

    Made by ``xmesh.plan`` or ``Plan.from_json``; compares by content.

    Attributes:
        src: layout that holds the array.
        dst: layout that needs it.
        dtype: element type.
        topology: rank -> host and NIC.
        cost: the model that the plan was made for.
        name: what error texts call the array.
        strategy: the strategy in use, one of ``xmesh.planner.STRATEGIES``.
        scheduler: the scheduler asked for.
        seed: of the randomised scheduler.
        chunk_nbytes: no chunk is larger, except one of a single element.
        table: the transfers.
        optimal: True when the schedule is known to be the best for its transfers.
    """

    src: Layout
    dst: Layout
    dtype: np.dtype[Any]
    topology: Topology
    cost: CostModel
    name: str
    strategy: str
    scheduler: str
    seed: int
    chunk_nbytes: int
    table: TransferTable
    optimal: bool

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)

    @cached_property
    def streams(self) -> Streams:
        """What moves, before anyone decided how."""
        return Streams(self.src, self.dst)

    @cached_property
    def unit_tasks(self) -> tuple[UnitTask, ...]:
        """Intersections of distinct source and destination boxes, with holders and receivers."""
        return tuple(self.streams.unit_tasks())

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of either layout, ascending."""
        return tuple(sorted({*self.src.ranks, *self.dst.ranks}))

    def transfers(self, rank: int | None = None) -> tuple[Transfer, ...]:
        """Transfers in order: those that a rank takes part in, or all."""
        return tuple(self.table.all() if rank is None else self.table.of_rank(rank))

    def copies(self, rank: int) -> tuple[Box, ...]:
        """Regions that a rank holds and needs: they never leave it."""
        return tuple(
            box
            for stream in self.streams.of_rank(rank)
            if rank in stream.senders and rank in stream.receivers
            for box in stream.boxes
        )

    def ops(self, rank: int) -> tuple[Op, ...]:
        """What one rank does, in order: copies, then sends and receives transfer by transfer.

        Costs what this rank moves, not what the plan moves.
        """
        copies = self.copies(rank)
        ops = [Op("copy", rank, None, 0, 0, copies)] if copies else []
        for transfer in self.transfers(rank):
            ops += ops_of(transfer, self.topology, rank)
        return tuple(ops)

    @property
    def makespan_s(self) -> float:
        """End of the last transfer under the paper's model (eq. 1-4), in seconds.

        Transfers take whole NICs, one at a time on each side, and latencies are left out; see
        ``xmesh.planner.simulate`` for a prediction of each message.
        """
        return self.schedule.makespan_s

    @cached_property
    def schedule(self) -> Schedule:
        """Starts of all transfers under the model of ``makespan_s``."""
        jobs = []
        for transfer in self.table.all():
            home = self.topology.host(transfer.sender)
            crosses = self.topology.host(transfer.receivers[0]) != home
            port = sending_port(transfer.sender, crosses, self.topology)
            receiving = receiving_ports(transfer.receivers, crosses, self.topology)
            shape = shape_of(
                transfer.volume * self.itemsize,
                transfer.sender,
                transfer.receivers,
                self.topology,
                self.cost,
            )
            jobs.append(Job((port,), receiving, (occupied_s(transfer.strategy, shape),)))
        return run(jobs, [Decision(i, 0) for i in range(len(jobs))], self.optimal)

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds that no plan can beat under the same cost model; 0 when nothing moves."""
        return lower_bound_s(self.streams, self.itemsize, self.topology, self.cost)

    def to_json(self) -> str:
        """The plan as JSON text; ``Plan.from_json`` gives an equal plan back."""
        return json.dumps(self.fields(), sort_keys=True, separators=(",", ":"))

    def fields(self) -> dict[str, Any]:
        """What makes the plan what it is, as plain data by name; ``to_json`` writes it."""
        return {
            "xmesh_plan": _FORMAT,
            "src": self.src.to_json(),
            "dst": self.dst.to_json(),
            "dtype": dtype_name(self.dtype),
            "topology": self.topology.to_json(),
            "cost": self.cost.to_json(),
            "name": self.name,
            "strategy": self.strategy,
            "scheduler": self.scheduler,
            "seed": self.seed,
            "chunk_nbytes": self.chunk_nbytes,
            "transfers": self.table.to_json(),
            "optimal": self.optimal,
        }

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of ``to_json``.

        Raises:
            PlanError: the text is no plan, one of another format, or one that does not move what
                its layouts ask for (``xmesh.planner.check``).
        """
        from xmesh.planner.check import check
        from xmesh.planner.rotation import RULE, RotatedTransfers

        try:
            data = json.loads(text)
            if not isinstance(data, Mapping) or data.get("xmesh_plan") != _FORMAT:
                raise ValueError(f"key 'xmesh_plan' must be {_FORMAT}")
            src, dst = Layout.from_json(data["src"]), Layout.from_json(data["dst"])
            dtype = named_dtype(data["dtype"])
            topology = Topology.from_json(data["topology"])
            cost = CostModel.from_json(data["cost"])
            chunk_nbytes = int(data["chunk_nbytes"])
            rows = data["transfers"]
            table: TransferTable
            if rows == RULE:
                chunk = max(1, chunk_nbytes // dtype.itemsize)
                table = RotatedTransfers(
                    Streams(src, dst), data["strategy"], dtype.itemsize, topology, cost, chunk
                )
            else:
                table = ListedTransfers(tuple(Transfer.from_json(row) for row in rows))
            plan = cls(
                src=src,
                dst=dst,
                dtype=dtype,
                topology=topology,
                cost=cost,
                name=str(data["name"]),
                strategy=str(data["strategy"]),
                scheduler=str(data["scheduler"]),
                seed=int(data["seed"]),
                chunk_nbytes=chunk_nbytes,
                table=table,
                optimal=bool(data["optimal"]),
            )
            # The text may have been edited: a wrong plan is found here and not while it runs.
            if isinstance(table, ListedTransfers):
                check(plan)
            return plan
        except Exception as error:
            # Anything may stand in a text, and go wrong in as many ways.
            raise PlanError(
                explain(
                    "text must be a plan as Plan.to_json writes it",
                    values=f"{str(text)[:60]!r}{'...' if len(str(text)) > 60 else ''}",
                    context=f"{type(error).__name__}: {error}",
                    remedy="write the plan with the same version of xmesh",
                )
            ) from error

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the JSON text: equal plans, and no others, agree on it."""
        return hashlib.sha256(self.to_json().encode()).digest()

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        from xmesh.planner.describe import describe

        return describe(self)
