"""The nine cases of the paper: reshard each from mesh to mesh, check all of it, and time it."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xmesh.bench.cases import CASES, Case, scaled_shape
from xmesh.bench.content import codes, difference, key
from xmesh.bench.launch import launched, run_ranks
from xmesh.bench.recording import path_of_case, record
from xmesh.bench.rows import Row, row_from_json
from xmesh.errors import XmeshError, explain
from xmesh.planner import STRATEGIES, CostModel, Plan, plan
from xmesh.planner.describe import host_traffic
from xmesh.planner.schedulers import BY_NAME
from xmesh.planner.simulate import simulate
from xmesh.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

#: Ranks of a host in the paper's cluster.
RANKS_PER_HOST = 4
MIB = 2**20
#: Begins a line by which ranks tell the process that started them how far they are.
_EVENT = "\x1e"
_POLL_S = 50e-6


class Step(NamedTuple):
    """How far a run is.

    Attributes:
        done: repeats that are over, of all cases.
        total: repeats of all cases.
        text: the case at work.
    """

    done: int
    total: int
    text: str


def run(
    comm: MPI.Intracomm,
    *,
    nbytes: int = 16 * MIB,
    repeats: int = 5,
    strategy: str = "auto",
    scheduler: str = "auto",
    topology: Topology | None = None,
    cost: CostModel | None = None,
    cases: Sequence[Case] = CASES,
    tell: Callable[[Step | Row], None] | None = None,
    trace: str | None = None,
) -> list[Row]:
    """Run cases on the ranks of a communicator; all of them call it.

    Args:
        comm: has the ranks of every case; those that a case does not need look on.
        nbytes: most bytes of an array, see ``scaled_shape``.
        repeats: calls that are timed, after one that is not; the content differs in each.
        strategy: see ``xmesh.plan``.
        scheduler: see ``xmesh.plan``.
        topology: what to plan for; default the paper's cluster, hosts of 4 consecutive ranks.
        cost: latencies and bandwidths to plan for; default ``CostModel()``.
        cases: which.
        tell: called on rank 0 after each repeat with a Step, after each case with its Row.
        trace: file for a Chrome trace of one more call, which is not timed; see ``record``.

    Raises:
        XmeshError: too few ranks, or repeats.
    """
    _require_ranks(comm.size, cases)
    if repeats < 1:
        raise XmeshError(
            explain("there must be a repeat to time", values=f"{repeats}", remedy="give 1 or more")
        )
    topology = topology or Topology.uniform(comm.size, RANKS_PER_HOST)
    tell = tell if tell is not None and comm.rank == 0 else _say_nothing
    rows = []
    for index, case in enumerate(cases):
        src, dst = case.layouts(scaled_shape(case, nbytes))
        name = f"case {case.number}"
        made = plan(src, dst, "uint32", topology, strategy, scheduler, cost=cost, name=name)

        def repeat_done(count: int, index: int = index, case: Case = case) -> None:
            done, total = index * (repeats + 1) + count, len(cases) * (repeats + 1)
            tell(Step(done, total, f"case {case.number}: {case.src_spec} -> {case.dst_spec}"))

        times_s, problem = _measure(comm, made, case.number, repeats, repeat_done)
        rows.append(_row(made, case.number, times_s, problem))
        if trace is not None:
            record(comm, made, path_of_case(trace, case.number, len(cases)))
        tell(rows[-1])
    return rows


def _say_nothing(_: Step | Row) -> None:
    pass


def _require_ranks(size: int, cases: Sequence[Case]) -> None:
    need = max((case.num_ranks for case in cases), default=0)
    if size < need:
        fitting = " ".join(str(case.number) for case in cases if case.num_ranks <= size)
        raise XmeshError(
            explain(
                "there must be a rank for every place of both meshes",
                values=f"{size} ranks; the cases asked for need {need}",
                remedy=f"start {need} ranks (mpiexec -n {need} xmesh bench paper), "
                + (f"or leave cases out: --case {fitting}, " if fitting else "")
                + "or start xmesh bench paper without mpiexec: it starts the ranks itself",
            )
        )


# --- One case -------------------------------------------------------------------------------------


def _measure(
    comm: MPI.Intracomm, made: Plan, number: int, repeats: int, repeat_done: Callable[[int], None]
) -> tuple[list[float], str]:
    """Time of the slowest rank in each repeat, and what was wrong first, on every rank."""
    from xmesh.resharder import Resharder

    (src_box,), (dst_box,) = (layout.boxes(comm.rank) or (None,) for layout in (made.src, made.dst))
    source = None if src_box is None else codes(src_box, made.src.shape)
    wanted = None if dst_box is None else codes(dst_box, made.dst.shape)
    local = None if source is None else np.empty_like(source)
    out = None if wanted is None else np.empty_like(wanted)
    times_s, problem = [], ""
    with Resharder(made, comm) as resharder:
        # Repeat 0 is the first call, in which the ranks agree; it is checked but not timed.
        for repeat in range(repeats + 1):
            mask = key(number, repeat)
            if source is not None:
                np.bitwise_xor(source, mask, out=local)
            if wanted is not None:
                # No element is right before the call, so one that nobody writes is found.
                np.bitwise_xor(wanted, ~mask, out=out)
            _quiet_barrier(comm)
            began_s = time.perf_counter()
            resharder(local, out)
            elapsed_s = time.perf_counter() - began_s
            # Ranks that are done, or not in the case at all, must not slow down the others.
            _quiet_barrier(comm, longest_poll_s=5e-3)
            if wanted is not None and out is not None and dst_box is not None:
                problem = problem or difference(wanted ^ mask, out, dst_box, comm.rank, repeat)
            slowest: tuple[float, str] = comm.allreduce((elapsed_s, problem), op=_worse)
            problem = slowest[1]
            if repeat:
                times_s.append(slowest[0])
            repeat_done(repeat + 1)
    return times_s, problem


def _worse(a: tuple[float, str], b: tuple[float, str]) -> tuple[float, str]:
    return max(a[0], b[0]), a[1] or b[1]


def _quiet_barrier(comm: MPI.Intracomm, longest_poll_s: float = _POLL_S) -> None:
    """A barrier that leaves the cores to those who are still at work."""
    request = comm.Ibarrier()
    poll_s = _POLL_S
    while not request.Test():
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, longest_poll_s)


def _row(made: Plan, number: int, times_s: list[float], problem: str) -> Row:
    traffic = host_traffic(made)
    topology = made.topology
    return Row(
        case=number,
        src=str(made.src),
        dst=str(made.dst),
        shape=made.src.shape,
        nbytes=math.prod(made.src.shape) * made.itemsize,
        unit_tasks=len(made.unit_tasks),
        strategy=made.strategy,
        scheduler=made.scheduler,
        ranks_per_host=max(len(topology.ranks_of_host(host)) for host in range(topology.num_hosts)),
        nic_bandwidth_Bps=made.cost.nic_bandwidth_Bps,
        sent_nbytes=tuple(host.sent_nbytes for host in traffic),
        received_nbytes=tuple(host.received_nbytes for host in traffic),
        makespan_s=made.makespan_s,
        bound_s=made.lower_bound_s,
        ratio=made.makespan_s / made.lower_bound_s if made.lower_bound_s else 1.0,
        predicted_s=simulate(made).makespan_s,
        time_s=statistics.median(times_s),
        times_s=tuple(times_s),
        verified=not problem,
        problem=problem,
    )


# --- The command ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """``xmesh bench paper``: under mpiexec on its ranks, otherwise on ranks that it starts.

    Returns:
        0; 1 when an element was wrong.

    Raises:
        XmeshError: the ranks could not be started, or failed.
    """
    args = _parser().parse_args(argv)
    cases = [case for case in CASES if case.number in (args.case or range(len(CASES) + 1))]
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
    if not launched() and comm.size == 1:
        rows = _rows_of_new_ranks(args, cases)
    else:
        rows = _rows_of_these_ranks(args, cases, comm)
        if comm.rank or args.events:
            return 0
    from xmesh.bench.show import print_table

    print_table(rows)
    if args.json:
        _write(args.json, rows)
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
        "--trace",
        metavar="FILE",
        help="record one more call of each case, measured and simulated, as a Chrome trace; with "
        "several cases a file for each",
    )
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
    from xmesh.bench.show import Display
    from xmesh.world import World

    try:
        _require_ranks(comm.size, cases)
    except XmeshError:
        if comm.rank == 0:
            raise
        sys.exit(2)  # one rank says it for all
    display = Display() if comm.rank == 0 and not args.events else None

    def tell(news: Step | Row) -> None:
        if display is None:
            kind = "step" if isinstance(news, Step) else "row"
            content = news._asdict() if isinstance(news, Step) else asdict(news)
            sys.stdout.write(f"{_EVENT}{json.dumps({kind: content})}\n")
            sys.stdout.flush()
        elif isinstance(news, Step):
            display.step(*news)
        else:
            display.row(news)

    try:
        topology = None
        if args.topology == "discovered":
            with World(comm) as world:
                topology = world.topology
        if display is not None:
            display.__enter__()
        rows = run(
            comm,
            nbytes=int(args.mbytes * MIB),
            repeats=args.repeats,
            strategy=args.strategy,
            scheduler=args.scheduler,
            topology=topology,
            cost=CostModel(nic_bandwidth_Bps=args.nic_gbits * 1e9 / 8),
            cases=cases,
            tell=tell,
            trace=args.trace,
        )
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


def _rows_of_new_ranks(args: argparse.Namespace, cases: Sequence[Case]) -> list[Row]:
    from xmesh.bench.show import Display

    rows: list[Row] = []
    count = max(case.num_ranks for case in cases)
    words = ["-m", "xmesh", "bench", "paper", "--events"]
    words += ["--case", *(str(case.number) for case in cases)]
    for name in ("mbytes", "repeats", "strategy", "scheduler", "topology", "nic-gbits"):
        words += [f"--{name}", str(getattr(args, name.replace("-", "_")))]
    if args.trace:
        words += ["--trace", args.trace]
    with Display() as display:

        def on_line(line: str) -> None:
            text, _, event = line.partition(_EVENT)
            if text:
                display.line(text)
            news: dict[str, Any] = json.loads(event) if event else {}
            if "step" in news:
                display.step(**news["step"])
            elif "row" in news:
                rows.append(row_from_json(news["row"]))
                display.row(rows[-1])

        display.step(0, 1, f"starting {count} ranks")
        status = run_ranks(count, words, on_line=on_line, timeout_s=args.timeout)
    if status or len(rows) != len(cases):
        raise XmeshError(
            explain(
                "the ranks must run to their end",
                values=f"mpiexec ended with status {status} after {len(rows)} of "
                f"{len(cases)} cases; what the ranks printed is above",
                remedy="xmesh doctor shows whether MPI works here",
            )
        )
    return rows


def _write(path: str, rows: Sequence[Row]) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
