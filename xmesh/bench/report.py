"""The report of a cluster's measurements, in Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from xmesh.bench.rows import Row
from xmesh.bench.show import cost_text
from xmesh.bench.targets import RIVALS, best_planned, by_case, targets
from xmesh.planner import CostModel
from xmesh.planner.describe import nbytes_text, seconds_text

_NONE = "\u2013"


@dataclass(frozen=True)
class Setting:
    """What was measured, and on what.

    Attributes:
        command: the words that do it again.
        hosts: number of hosts.
        ranks_per_host: ranks of each.
        rate_bps: bits per second of each NIC, headers included.
        mpi: name and version of the MPI library.
        date: of the run.
        load: load average of the machine before it, that is, what others ran on the same cores.
        costs: what was measured of the cluster, by experiment.
        left_out: cases for which the cluster is too small.
    """

    command: str
    hosts: int
    ranks_per_host: int
    rate_bps: float
    mpi: str = ""
    date: str = ""
    load: float = 0.0
    costs: dict[str, CostModel] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The cluster in a line."""
        return (
            f"Emulated cluster: {self.hosts} hosts of {self.ranks_per_host} ranks, NICs of "
            f"{self.rate_bps / 1e6:g} Mbit/s"
        )


def report(n_to_m: Sequence[Row], one_to_m: Sequence[Row], setting: Setting) -> str:
    """All of it as a Markdown text.

    Args:
        n_to_m: rows of ``xmesh bench paper``.
        one_to_m: rows of ``xmesh bench multicast``.
        setting: what they were measured on.
    """
    parts = [_head((*n_to_m, *one_to_m), setting), "## Targets", targets_text(n_to_m, one_to_m)]
    if n_to_m:
        parts += [
            "## n to m",
            _layouts(n_to_m),
            "### Time / bound",
            "1 is all that the NICs allow, by the goodput of one pair of ranks in the same run.",
            _matrix(n_to_m, lambda row: f"{row.time_s / row.bound_s:.2f}"),
            "### Predicted / measured",
            _matrix(_planned(n_to_m), _prediction),
            "### What auto gains",
            "Time of the other method over that of auto; the last columns are about the best of "
            "the planner's strategies.",
            _gains(n_to_m),
        ]
    if one_to_m:
        parts += [
            "## 1 to m",
            f"An array of {nbytes_text(one_to_m[0].nbytes)} from one rank to hosts x ranks of "
            "each.",
            "### Time / bound",
            _matrix(one_to_m, lambda row: f"{row.time_s / row.bound_s:.2f}"),
            "### Measured / formula",
            "A hosts of B ranks, t = bytes / goodput: send_recv A\u00b7B\u00b7t, local_allgather "
            "A\u00b7t, global_allgather 2t (t to one host, where no byte of the ring takes a NIC), "
            "broadcast t + A\u00b7t/K for K chunks.",
            _matrix(
                [row for row in one_to_m if row.formula_s is not None],
                lambda row: f"{row.time_s / row.formula_s:.2f}" if row.formula_s else _NONE,
            ),
            "### Predicted / measured",
            _matrix(_planned(one_to_m), _prediction),
        ]
    return "\n\n".join(parts) + "\n"


def _head(rows: Sequence[Row], setting: Setting) -> str:
    repeats = {row.method == "auto": len(row.times_s) for row in rows}
    wrong = sum(not row.verified for row in rows)
    lines = [
        f"# {setting.title}",
        "",
        f"- `{setting.command}`" + (f", {setting.date}" if setting.date else ""),
        f"- {os.cpu_count()} cores for everything, load average before {setting.load:.1f}, "
        f"{platform.machine()}, Python {platform.python_version()}"
        + (f", {setting.mpi}" if setting.mpi else ""),
        *(f"- measured before {what}: {cost_text(cost)}" for what, cost in setting.costs.items()),
        f"- time: the slowest rank, median of {repeats.get(True, 0)} calls of auto and "
        f"{repeats.get(False, 0)} of the others, after one that is not timed",
        "- every element was checked on every rank in every call: "
        + (f"WRONG in {wrong} of {len(rows)} rows" if wrong else "all right"),
        "- plain MPI uses the nonblocking calls and looks for their end every 50 us, as the "
        "package does: the blocking ones spin, and the ranks share few cores",
    ]
    if setting.left_out:
        lines.append(f"- too large for these hosts: case {', '.join(setting.left_out)}")
    return "\n".join(lines)


def targets_text(n_to_m: Sequence[Row], one_to_m: Sequence[Row]) -> str:
    """Which targets were met, and by what the others were missed, as a list."""
    lines = []
    for target in targets(n_to_m, one_to_m):
        if not target.checked:
            state = "not measured"
        elif target.met:
            state = f"**met**, {target.checked} of {target.checked}"
        else:
            state = f"**missed** in {len(target.missed)} of {target.checked}"
        lines.append(f"- {target.rule}: {state}")
        lines += [f"    - {text}" for text in target.missed]
    return "\n".join(lines)


def _layouts(rows: Sequence[Row]) -> str:
    table = by_case(rows)
    first = [next(iter(own.values())) for own in table.values()]
    return _table(
        ("case", "from", "to", "array", "bytes", "unit tasks", "receivers of each", "bound"),
        (
            (
                str(row.case),
                row.src,
                row.dst,
                " x ".join(map(str, row.shape)),
                nbytes_text(row.nbytes),
                str(row.unit_tasks),
                str(row.receivers),
                seconds_text(row.bound_s),
            )
            for row in first
        ),
    )


def _matrix(rows: Sequence[Row], text: Callable[[Row], str]) -> str:
    """A line for each case and a column for each method."""
    methods = list(dict.fromkeys(row.method for row in rows))
    return _table(
        ("case", *methods),
        (
            (str(case), *(text(own[name]) if name in own else _NONE for name in methods))
            for case, own in by_case(rows).items()
        ),
    )


def _gains(rows: Sequence[Row]) -> str:
    names = [
        name
        for name in ("send_recv", *RIVALS, "mpi_isend")
        if any(row.method == name for row in rows)
    ]
    lines = []
    for case, own in by_case(rows).items():
        auto, best = own.get("auto"), best_planned(own)
        if auto is None or best is None:
            continue
        ratios = [f"{own[n].time_s / auto.time_s:.2f}" if n in own else _NONE for n in names]
        loss = f"{auto.time_s / best.time_s - 1:+.1%}"
        lines.append((str(case), *ratios, auto.strategy, best.method, loss))
    return _table(("case", *names, "auto takes", "best", "auto is slower by"), lines)


def _planned(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.predicted_s is not None]


def _prediction(row: Row) -> str:
    return _NONE if row.predicted_s is None else f"{row.predicted_s / row.time_s:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
