"""The n -> m cases: reshard each from mesh to mesh, check all of it, and time it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xmesh.bench.cases import CASES, MORE_CASES, Case
from xmesh.bench.measure import MIB, Step, require_ranks, run
from xmesh.bench.methods import N_TO_M
from xmesh.bench.options import (
    add_measurement,
    add_ranks,
    chosen_methods,
    cost_of,
    topology_of,
)
from xmesh.bench.rows import Row
from xmesh.bench.session import Tell, finish, on_new_ranks, on_these_ranks, started_ranks
from xmesh.errors import XmeshError
from xmesh.mpiexec import run_ranks
from xmesh.planner import STRATEGIES
from xmesh.planner.schedulers import BY_NAME

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Step", "main", "run"]


def main(argv: Sequence[str] | None = None) -> int:
    """``xmesh bench paper``: under mpiexec on its ranks, otherwise on ranks that it starts.

    Returns:
        0; 1 when an element was wrong.

    Raises:
        XmeshError: the ranks could not be started, or failed.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(words)
    cases = chosen_cases(args.case, args.more)
    comm = started_ranks()
    if comm is None:
        rows = _rows_of_new_ranks(args, cases, words)
    else:
        rows = _rows_of_these_ranks(args, cases, comm)
        if comm.rank or args.events:
            return 0
    return finish(rows, args.json)


def chosen_cases(names: Sequence[str] | None, more: bool) -> list[Case]:
    """The cases that the options ask for.

    Args:
        names: numbers and names of cases; None for the paper's nine.
        more: those that are not in the paper's table, too.
    """
    wanted = {str(case.number) for case in CASES} if names is None else set(names)
    return [
        case
        for case in (*CASES, *MORE_CASES)
        if str(case.number) in wanted or (more and case in MORE_CASES)
    ]


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Options for ``chosen_cases``."""
    parser.add_argument(
        "--case",
        nargs="+",
        action="extend",
        choices=[str(case.number) for case in (*CASES, *MORE_CASES)],
        metavar="N",
        help="these, by number or name: 1 to 9, "
        + ", ".join(str(case.number) for case in MORE_CASES),
    )
    parser.add_argument(
        "--more", action="store_true", help="those that are not in the paper's table, too"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xmesh bench paper",
        description="The nine n -> m cases of the paper, with every element checked.",
        epilog="Without mpiexec it starts as many ranks as the cases need.",
    )
    add_cases(parser)
    add_measurement(parser)
    parser.add_argument(
        "--strategy", default="auto", choices=("auto", *STRATEGIES), help="without --method"
    )
    parser.add_argument(
        "--scheduler", default="auto", choices=tuple(BY_NAME), help="without --method"
    )
    add_ranks(parser)
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="record one more call of each case, measured and simulated, as a Chrome trace; with "
        "several cases a file for each",
    )
    return parser


def _rows_of_these_ranks(
    args: argparse.Namespace, cases: Sequence[Case], comm: MPI.Intracomm
) -> list[Row]:
    try:
        require_ranks(comm.size, cases)
    except XmeshError:
        if comm.rank == 0:
            raise
        sys.exit(2)  # one rank says it for all

    def experiment(tell: Tell) -> list[Row]:
        topology = topology_of(args, comm)
        return run(
            comm,
            nbytes=int(args.mbytes * MIB),
            repeats=args.repeats,
            strategy=args.strategy,
            scheduler=args.scheduler,
            methods=chosen_methods(args.method, N_TO_M),
            other_repeats=args.other_repeats,
            topology=topology,
            cost=cost_of(args, comm, topology, tell),
            cases=cases,
            tell=tell,
            trace=args.trace,
        )

    return on_these_ranks(comm, args.events, experiment)


def _rows_of_new_ranks(
    args: argparse.Namespace, cases: Sequence[Case], words: Sequence[str]
) -> list[Row]:
    count = max(case.num_ranks for case in cases)
    command = ["-m", "xmesh", "bench", "paper", "--events", *words]
    return on_new_ranks(
        lambda on_line: run_ranks(count, command, on_line=on_line, timeout_s=args.timeout),
        f"starting {count} ranks",
    )


if __name__ == "__main__":
    sys.exit(main())
