"""The nine cases of the paper: reshard each from mesh to mesh, check all of it, and time it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xmesh.bench.cases import CASES, Case
from xmesh.bench.launch import run_ranks
from xmesh.bench.measure import MIB, Step, require_ranks, run
from xmesh.bench.rows import Row
from xmesh.bench.session import Tell, on_new_ranks, on_these_ranks, started_ranks, write_rows
from xmesh.errors import XmeshError
from xmesh.planner import STRATEGIES, CostModel
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
    args = _parser().parse_args(argv)
    cases = [case for case in CASES if args.case is None or case.number in args.case]
    comm = started_ranks()
    if comm is None:
        rows = _rows_of_new_ranks(args, cases)
    else:
        rows = _rows_of_these_ranks(args, cases, comm)
        if comm.rank or args.events:
            return 0
    from xmesh.bench.show import print_table

    print_table(rows)
    if args.json:
        write_rows(args.json, rows)
    return 0 if all(row.verified for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xmesh bench paper",
        description="The nine n -> m cases of the paper, with every element checked.",
        epilog="Without mpiexec it starts as many ranks as the cases need.",
    )
    numbers = [case.number for case in CASES]
    parser.add_argument(
        "--case", type=int, nargs="+", action="extend", choices=numbers, metavar="N", help="these"
    )
    parser.add_argument(
        "--mbytes",
        type=_positive(float),
        default=16,
        metavar="M",
        help="size of each array at most, in MiB (16)",
    )
    parser.add_argument(
        "--repeats", type=_positive(int), default=5, metavar="N", help="calls that are timed (5)"
    )
    parser.add_argument("--strategy", default="auto", choices=("auto", *STRATEGIES))
    parser.add_argument("--scheduler", default="auto", choices=tuple(BY_NAME))
    parser.add_argument(
        "--topology",
        default="uniform",
        choices=("uniform", "discovered"),
        help="plan for hosts of 4 consecutive ranks as in the paper, or for those there are",
    )
    parser.add_argument(
        "--nic-gbits",
        type=_positive(float),
        default=CostModel().nic_bandwidth_Bps * 8 / 1e9,
        metavar="G",
        help="plan for NICs of G Gbit/s in each direction (10)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows, as a JSON list")
    parser.add_argument(
        "--timeout",
        type=_positive(float),
        default=600,
        metavar="S",
        help="limit of ranks started here (600)",
    )
    parser.add_argument("--events", action="store_true", help=argparse.SUPPRESS)
    return parser


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
        return value

    return number


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
        from xmesh.world import World

        topology = None
        if args.topology == "discovered":
            with World(comm) as world:
                topology = world.topology
        return run(
            comm,
            nbytes=int(args.mbytes * MIB),
            repeats=args.repeats,
            strategy=args.strategy,
            scheduler=args.scheduler,
            topology=topology,
            cost=CostModel(nic_bandwidth_Bps=args.nic_gbits * 1e9 / 8),
            cases=cases,
            tell=tell,
        )

    return on_these_ranks(comm, args.events, experiment)


def _rows_of_new_ranks(args: argparse.Namespace, cases: Sequence[Case]) -> list[Row]:
    from xmesh.bench.show import Display

    count = max(case.num_ranks for case in cases)
    words = ["-m", "xmesh", "bench", "paper", "--events"]
    words += ["--case", *(str(case.number) for case in cases)]
    for name in ("mbytes", "repeats", "strategy", "scheduler", "topology", "nic-gbits"):
        words += [f"--{name}", str(getattr(args, name.replace("-", "_")))]
    with Display() as display:
        display.step(0, 1, f"starting {count} ranks")
        return on_new_ranks(
            display,
            lambda on_line: run_ranks(count, words, on_line=on_line, timeout_s=args.timeout),
        )


if __name__ == "__main__":
    sys.exit(main())
