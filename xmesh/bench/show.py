"""What an experiment shows: how far it is, and a table at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from xmesh.planner.describe import nbytes_text, seconds_text

if TYPE_CHECKING:
    from xmesh.bench.rows import Row
    from xmesh.planner import CostModel

#: Characters of a line where no terminal sets a limit.
_PLAIN_WIDTH = 200


class Display:
    """A bar on a terminal, and a plain line for each row elsewhere; both on stderr.

    Args:
        console: where; default stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )

    def step(self, done: int, total: int, text: str) -> None:
        """Say how far it is."""
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(text, total=total)
        self._bar.update(self._task, completed=done, total=total, description=text)

    def row(self, row: Row) -> None:
        """Say what came out of a case."""
        if self._bar is None:
            check = "verified" if row.verified else f"WRONG: {row.problem}"
            self.line(
                f"case {row.case}: {row.src} -> {row.dst}, {_method(row)}, "
                f"{seconds_text(row.time_s)}, {check}"
            )

    def cost(self, cost: CostModel) -> None:
        """Say what was measured of the cluster."""
        self.line(f"measured: {cost_text(cost)}")

    def line(self, text: str) -> None:
        """Print a line as it is, above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def cost_text(cost: CostModel) -> str:
    """A cost model in one line."""
    return (
        f"{cost.nic_bandwidth_Bps * 8 / 1e6:.1f} Mbit/s and {seconds_text(cost.nic_latency_s)} "
        f"between hosts, {cost.intra_bandwidth_Bps * 8 / 1e9:.1f} Gbit/s and "
        f"{seconds_text(cost.intra_latency_s)} within one"
    )


def table(rows: Sequence[Row], narrow: bool = False) -> Table:
    """The rows as a table.

    Args:
        rows: what came out.
        narrow: leave out what a narrow terminal has no room for.
    """
    shown = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    chosen = [column for column in _COLUMNS if not (narrow and column.wide_only)]
    if all(row.formula_s is None for row in rows):
        chosen.remove(_FORMULA)
    for column in chosen:
        shown.add_column(column.header, justify=column.justify, no_wrap=True)
    for row in rows:
        cells = (column.text(row) for column in chosen)
        shown.add_row(*cells, style=None if row.verified else "bold red")
    return shown


def print_table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the table on stdout, what its columns mean, and what was wrong."""
    console = console or Console()
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    unlimited = console.options.update(width=_PLAIN_WIDTH)
    narrow = Measurement.get(console, unlimited, table(rows)).maximum > console.width
    console.print(table(rows, narrow), highlight=False)
    console.print(legend(rows, narrow), markup=False, highlight=False)
    for row in rows:
        if not row.verified:
            console.print(
                f"case {row.case}: {row.problem}", markup=False, highlight=False, soft_wrap=True
            )


class _Column(NamedTuple):
    header: str
    justify: Literal["left", "right"]
    text: Callable[[Row], str]
    wide_only: bool = False


def _most(nbytes: Sequence[int]) -> str:
    return nbytes_text(max(nbytes)) if nbytes else ""


def _strategy(row: Row) -> str:
    return f"auto: {row.strategy}" if row.method == "auto" else row.strategy


def _method(row: Row) -> str:
    return row.method if "/" in row.method else _strategy(row)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(seconds)


_FORMULA = _Column("formula", "right", lambda row: _seconds(row.formula_s))
_COLUMNS = (
    _Column("case", "right", lambda row: str(row.case)),
    _Column("source -> destination", "left", lambda row: f"{row.src} -> {row.dst}"),
    _Column("tasks", "right", lambda row: str(row.unit_tasks), wide_only=True),
    _Column("strategy", "left", _strategy),
    _Column("scheduler", "left", lambda row: row.scheduler, wide_only=True),
    _Column("host sends", "right", lambda row: _most(row.sent_nbytes), wide_only=True),
    _Column("receives", "right", lambda row: _most(row.received_nbytes), wide_only=True),
    _Column("makespan", "right", lambda row: _seconds(row.makespan_s), wide_only=True),
    _Column("bound", "right", lambda row: seconds_text(row.bound_s), wide_only=True),
    _Column("ratio", "right", lambda row: "" if row.ratio is None else f"{row.ratio:.3f}"),
    _Column("predicted", "right", lambda row: _seconds(row.predicted_s), wide_only=True),
    _FORMULA,
    _Column("measured", "right", lambda row: seconds_text(row.time_s)),
    _Column("check", "right", lambda row: "ok" if row.verified else "WRONG"),
)


def legend(rows: Sequence[Row], narrow: bool = False) -> str:
    """What the columns of ``table`` mean."""
    if not rows:
        return "no case was run"
    sizes = sorted({nbytes_text(row.nbytes) for row in rows})
    hosts = " or ".join(str(n) for n in sorted({row.ranks_per_host for row in rows}))
    rates = " or ".join(f"{rate * 8 / 1e9:.4g}" for rate in {row.nic_bandwidth_Bps for row in rows})
    counts = " or ".join(str(n) for n in sorted({len(row.times_s) for row in rows}))
    lines = [
        f"arrays of {' and '.join(sizes)}; planned for hosts of {hosts} ranks with a NIC of "
        f"{rates} Gbit/s each",
        "host sends, receives: the most that one host sends to, and gets from, other hosts",
        "bound: no plan takes less there; predicted: the plan there, message by message",
        "makespan: end of the plan in the paper's model; ratio: makespan / bound",
        f"measured: the slowest rank, median of {counts}, where the ranks really "
        f"ran (this machine has {os.cpu_count()} cores)",
        "check: every element on every rank, in every repeat",
    ]
    return "\n".join([lines[0], *lines[3:]] if narrow else lines)
