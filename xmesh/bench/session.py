"""The ranks of an experiment: those of this mpiexec, or new ones, which tell how far they are.

Ranks that an ordinary process starts print events, lines of JSON, and that process shows them.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xmesh.bench.launch import launched
from xmesh.bench.measure import Step
from xmesh.bench.rows import Row, row_from_json
from xmesh.errors import XmeshError, explain

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.bench.show import Display

#: Begins a line by which ranks tell the process that started them how far they are.
_EVENT = "\x1e"

Tell = Callable[[Step | Row], None]


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

    def tell(news: Step | Row) -> None:
        if display is None:
            kind = "step" if isinstance(news, Step) else "row"
            _print_event(kind, news._asdict() if isinstance(news, Step) else asdict(news))
        else:
            _show(display, news)

    try:
        if display is not None:
            display.__enter__()
        rows = experiment(tell)
        if events and comm.rank == 0:
            _print_event("end", len(rows))
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


def on_new_ranks(display: Display, start: Callable[[Callable[[str], None]], int]) -> list[Row]:
    """Start ranks, and show what they tell until all have ended.

    Args:
        display: where.
        start: starts ranks that print events, calls its argument with each line that they print,
            and returns mpiexec's exit status.

    Raises:
        XmeshError: they did not run to their end.
    """
    rows: list[Row] = []
    ended = False

    def on_line(line: str) -> None:
        nonlocal ended
        text, _, event = line.partition(_EVENT)
        if text:
            display.line(text)
        news: dict[str, Any] = json.loads(event) if event else {}
        if "step" in news:
            _show(display, Step(**news["step"]))
        elif "row" in news:
            rows.append(row_from_json(news["row"]))
            _show(display, rows[-1])
        elif "end" in news:
            ended = news["end"] == len(rows)

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


def write_rows(path: str, rows: Sequence[Row]) -> None:
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


def _print_event(kind: str, content: Any) -> None:
    # One write: other ranks may print at the same time.
    sys.stdout.write(f"{_EVENT}{json.dumps({kind: content})}\n")
    sys.stdout.flush()


def _show(display: Display, news: Step | Row) -> None:
    if isinstance(news, Step):
        display.step(*news)
    else:
        display.row(news)
