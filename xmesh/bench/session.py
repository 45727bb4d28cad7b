"""The ranks of an experiment: those of this mpiexec, or new ones, which tell how far they are.

Ranks that an ordinary process starts print events, lines of JSON, and that process shows them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xmesh.bench.measure import Step
from xmesh.bench.rows import Row, row_from_json
from xmesh.errors import XmeshError, explain
from xmesh.mpiexec import launched
from xmesh.planner import CostModel

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.bench.show import Display

#: Begins a line by which ranks tell the process that started them how far they are.
_EVENT = "\x1e"

News = Step | Row | CostModel
Tell = Callable[[News], None]


def started_ranks() -> MPI.Intracomm | None:
    """The communicator of the ranks that mpiexec started, None in an ordinary process.

    Raises:
        XmeshError: no mpi4py, or no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise XmeshError(
            explain(
                "this experiment needs mpi4py and an MPI library",
                values=str(error),
                remedy="pip install 'xmesh[mpich]', or mpi4py for the MPI of your cluster",
            )
        ) from error
    comm = MPI.COMM_WORLD
    return comm if launched() or comm.size > 1 else None


def on_these_ranks(
    comm: MPI.Intracomm, events: bool, experiment: Callable[[Tell], list[Row]]
) -> list[Row]:
    """Run an experiment on every rank, and show on rank 0 how far it is.

    Args:
        comm: the ranks; all of them call it.
        events: print events on stdout instead, for the process that started the ranks.
        experiment: given what to call on rank 0 with each piece of news, returns the rows.

    Returns:
        The rows. After an error no rank returns: all are ended.
    """
    from xmesh.bench.show import Display

    display = Display() if comm.rank == 0 and not events else None

    def tell(news: News) -> None:
        if display is None:
            _print_event(news)
        else:
            _show(display, news)

    try:
        if display is not None:
            display.__enter__()
        rows = experiment(tell)
        if events and comm.rank == 0:
            _print({"end": len(rows)})
    except BaseException as error:
        # The other ranks may be waiting for this one.
        text = str(error) if isinstance(error, XmeshError) else traceback.format_exc()
        print(f"rank {comm.rank}: {text}", file=sys.stderr, flush=True)
        comm.Abort(2)
        sys.exit(2)
    finally:
        if display is not None:
            display.__exit__(None, None, None)
    return rows


def on_new_ranks(
    start: Callable[[Callable[[str], None]], int],
    purpose: str,
    display: Display | None = None,
    tell: Tell | None = None,
) -> list[Row]:
    """Start ranks, and show what they tell until all have ended.

    Args:
        start: starts ranks that print events, calls its argument with each line that they print,
            and returns mpiexec's exit status.
        purpose: what to show until the first one tells something.
        display: where; default one of its own.
        tell: called with each piece of news, too.

    Raises:
        XmeshError: they did not run to their end.
    """
    from xmesh.bench.show import Display

    if display is None:
        with Display() as own:
            return on_new_ranks(start, purpose, own, tell)
    display.step(0, 1, purpose)
    rows: list[Row] = []
    ended = False

    def on_line(line: str) -> None:
        nonlocal ended
        text, _, event = line.partition(_EVENT)
        if text:
            display.line(text)
        content: dict[str, Any] = json.loads(event) if event else {}
        if "end" in content:
            ended = content["end"] == len(rows)
            return
        news = _news(content)
        if news is None:
            return
        if isinstance(news, Row):
            rows.append(news)
        _show(display, news)
        if tell is not None:
            tell(news)

    status = start(on_line)
    if status or not ended:
        raise XmeshError(
            explain(
                "the ranks must run to their end",
                values=f"mpiexec ended with status {status} after {len(rows)} results; what the "
                "ranks printed is above",
                remedy="xmesh doctor shows whether MPI works here",
            )
        )
    return rows


def finish(rows: Sequence[Row], json_path: str | None) -> int:
    """Print the table, write the rows where that was asked for, and give the exit status.

    Raises:
        XmeshError: they cannot be written.
    """
    from xmesh.bench.show import print_table

    print_table(rows)
    if json_path:
        write_rows(json_path, rows)
    return 0 if all(row.verified for row in rows) else 1


def write_rows(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Write rows to a file, as a JSON list.

    Raises:
        XmeshError: it cannot be written.
    """
    text = json.dumps([asdict(row) for row in rows], indent=1)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise XmeshError(
            explain(
                "the rows are written to a file that can be written",
                values=str(error),
                remedy="give --json another path",
            )
        ) from error


def _print_event(news: News) -> None:
    if isinstance(news, Step):
        _print({"step": news._asdict()})
    elif isinstance(news, Row):
        _print({"row": asdict(news)})
    else:
        _print({"cost": news.to_json()})


def _print(event: dict[str, Any]) -> None:
    # One write: other ranks may print at the same time.
    sys.stdout.write(f"{_EVENT}{json.dumps(event)}\n")
    sys.stdout.flush()


def _news(event: dict[str, Any]) -> News | None:
    if "step" in event:
        return Step(**event["step"])
    if "row" in event:
        return row_from_json(event["row"])
    return CostModel.from_json(event["cost"]) if "cost" in event else None


def _show(display: Display, news: News) -> None:
    if isinstance(news, Step):
        display.step(*news)
    elif isinstance(news, Row):
        display.row(news)
    else:
        display.cost(news)
