"""Rows: what came out of a case of an experiment, as data that goes through JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """What came out of one case; the same on every rank.

    Attributes:
        case: number or name of the case.
        src: source layout.
        dst: destination layout.
        shape: of the array.
        nbytes: bytes of the array, held once.
        unit_tasks: how many the resharding breaks into.
        strategy: the strategy in use, or what of plain MPI was.
        scheduler: the scheduler asked for; "" for plain MPI.
        ranks_per_host: most ranks on a host in the topology that the plan is for.
        nic_bandwidth_Bps: bytes per second of a NIC that the plan is for.
        sent_nbytes: for each host, bytes it sends to other hosts; of a plan, as the next ones:
            plain MPI has none, and () or None here.
        received_nbytes: for each host, bytes it gets from other hosts.
        makespan_s: of the plan, in the paper's model.
        bound_s: what no plan can beat in that model.
        ratio: makespan over bound; 1 when nothing moves.
        predicted_s: end of a simulation, message by message.
        time_s: measured: median of ``times_s``.
        times_s: measured: for each repeat, the time of the slowest rank.
        verified: every element was right on every rank, in every repeat.
        problem: the first that was not.
        method: as asked for: "auto", "broadcast/naive", "mpi_bcast"; see xmesh.bench.methods.
        receivers: most ranks that lack the box of one unit task; 1 means nothing to multicast.
        chunks: most chunks that a transfer is cut into; 0 for plain MPI.
        formula_s: of the paper's latency model, for 1 -> m.
    """

    case: int | str
    src: str
    dst: str
    shape: tuple[int, ...]
    nbytes: int
    unit_tasks: int
    strategy: str
    scheduler: str
    ranks_per_host: int
    nic_bandwidth_Bps: float
    sent_nbytes: tuple[int, ...]
    received_nbytes: tuple[int, ...]
    makespan_s: float | None
    bound_s: float
    ratio: float | None
    predicted_s: float | None
    time_s: float
    times_s: tuple[float, ...]
    verified: bool
    problem: str
    method: str = ""
    receivers: int = 0
    chunks: int = 0
    formula_s: float | None = None


def row_from_json(data: dict[str, Any]) -> Row:
    """Inverse of ``dataclasses.asdict`` after a way through JSON."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }
    return Row(**values)
