"""``make cluster-bench``: both microbenchmarks on an emulated cluster, with report and figures."""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xmesh.bench import figures, multicast
from xmesh.bench.methods import Method
from xmesh.bench.options import add_measurement, positive
from xmesh.bench.paper import add_cases, chosen_cases
from xmesh.bench.report import Setting, report, targets_text
from xmesh.bench.rows import Row
from xmesh.bench.session import News, on_new_ranks, write_rows
from xmesh.cluster import EmulatedCluster
from xmesh.cluster.network import rate_bps
from xmesh.errors import OptionError, explain
from xmesh.planner import CostModel
from xmesh.topology import Topology

if TYPE_CHECKING:
    from xmesh.bench.show import Display

EXPERIMENTS = ("multicast", "paper")
_FULL = {"mbytes": 16.0, "repeats": 5, "other_repeats": 3}
_QUICK = {"mbytes": 4.0, "repeats": 3, "other_repeats": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """``xmesh bench cluster``: an ordinary process of root's, which starts hosts and ranks.

    Returns:
        0, also where a target was missed; 1 when an element was wrong.

    Raises:
        XmeshError: no root, no iproute2, no matplotlib, or the ranks failed. The cluster is gone
            then, as after Ctrl-C.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(words)
    for name, value in (_QUICK if args.quick else _FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    work, left_out = _work(args)
    figures.require_matplotlib()
    folder = _made(Path(args.output))
    load = os.getloadavg()[0]
    costs: dict[str, CostModel] = {}
    rows: dict[str, list[Row]] = {name: [] for name in EXPERIMENTS}
    from xmesh.bench.show import Display

    with (
        _sigterm_raises(),
        EmulatedCluster(args.hosts, args.rate) as cluster,
        Display() as display,
    ):
        display.line(f"{cluster.name}: {args.hosts} hosts, {args.rate / 1e6:g} Mbit/s each")
        for name, options in work.items():
            try:
                _run(cluster, display, args, [name, *options], _listener(name, rows[name], costs))
            finally:
                # What was measured before an error or Ctrl-C is kept.
                if rows[name]:
                    write_rows(folder / f"{name}.json", rows[name])
    setting = Setting(
        command=" ".join(["xmesh bench cluster", *words]),
        hosts=args.hosts,
        ranks_per_host=args.ranks_per_host,
        rate_bps=args.rate,
        mpi=_mpi_version(),
        date=datetime.date.today().isoformat(),
        load=load,
        costs=costs,
        left_out=left_out,
    )
    n_to_m, one_to_m = rows["paper"], rows["multicast"]
    (folder / "report.md").write_text(report(n_to_m, one_to_m, setting), encoding="utf-8")
    figures.draw(n_to_m, one_to_m, folder, setting.title)
    print(targets_text(n_to_m, one_to_m))
    print(f"\nreport, rows and figures: {folder}")
    return 0 if all(row.verified for row in (*n_to_m, *one_to_m)) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xmesh bench cluster",
        description="The paper's microbenchmarks over MPI, on emulated hosts with rate-limited "
        "NICs, with every element checked. Needs root, iproute2 and matplotlib.",
        epilog="Some 25 minutes; with --quick 5.",
    )
    parser.add_argument("--hosts", type=positive(int), default=5, metavar="K", help="hosts (5)")
    parser.add_argument(
        "--ranks-per-host", type=positive(int), default=4, metavar="R", help="ranks of each (4)"
    )
    parser.add_argument(
        "--rate", type=rate_bps, default=200e6, metavar="R", help="of each NIC (200mbit)"
    )
    parser.add_argument(
        "--only", choices=EXPERIMENTS, help="this experiment: 1 to m (multicast) or n to m (paper)"
    )
    parser.add_argument("--quick", action="store_true", help="4 MiB, 3 calls of auto, 1 of others")
    add_cases(parser)
    add_measurement(parser)
    parser.set_defaults(**dict.fromkeys(_FULL))
    parser.add_argument(
        "--output",
        default="out/cluster-bench",
        metavar="DIR",
        help="folder of report, rows and figures (out/cluster-bench)",
    )
    parser.add_argument(
        "--timeout", type=positive(float), default=3600, metavar="S", help="of each part (3600)"
    )
    return parser


def _work(args: argparse.Namespace) -> tuple[dict[str, list[str]], list[str]]:
    """Options of each experiment's own, and the cases for which there are too few ranks.

    Raises:
        XmeshError: nothing is left to do.
    """
    num_ranks = args.hosts * args.ranks_per_host
    cases = chosen_cases(args.case, args.more or args.case is None)
    fitting = [str(case.number) for case in cases if case.num_ranks <= num_ranks]
    left_out = [str(case.number) for case in cases if case.num_ranks > num_ranks]
    work: dict[str, list[str]] = {}
    if args.only != "paper":
        multicast.fitting_cases(Topology.uniform(num_ranks, args.ranks_per_host))
        work["multicast"] = []
    if args.only != "multicast" and fitting:
        work["paper"] = ["--case", *fitting]
    if not work:
        raise OptionError(
            explain(
                "some case must fit the cluster",
                values=f"{num_ranks} ranks, which is too few for case {', '.join(left_out)}",
                remedy="leave --hosts and --ranks-per-host at 5 and 4",
            )
        )
    return work, left_out


def _run(
    cluster: EmulatedCluster,
    display: Display,
    args: argparse.Namespace,
    experiment: Sequence[str],
    tell: Callable[[News], None],
) -> None:
    command = [sys.executable, "-m", "xmesh", "bench", *experiment, "--events"]
    command += ["--topology", "discovered", "--calibrate"]
    for name in _FULL:
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    methods: list[Method | None] = args.method or [None]
    command += ["--method", *("all" if method is None else str(method) for method in methods)]

    def start(on_line: Callable[[str], None]) -> int:
        return cluster.run(
            command, args.ranks_per_host, timeout_s=args.timeout, on_line=on_line
        ).status

    on_new_ranks(start, f"{experiment[0]}: starting ranks and calibrating", display, tell)


def _listener(name: str, rows: list[Row], costs: dict[str, CostModel]) -> Callable[[News], None]:
    def tell(news: News) -> None:
        if isinstance(news, Row):
            rows.append(news)
        elif isinstance(news, CostModel):
            costs[name] = news

    return tell


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            explain(
                "--output must name a folder that can be made",
                values=str(error),
                remedy="give another one",
            )
        ) from error
    return folder


def _mpi_version() -> str:
    """The MPI library's name and version, asked of a process of its own: this one is no rank."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "print(MPI.Get_library_version())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    words = answer.stdout.partition("\n")[0].partition(",")[0].split()
    return " ".join(word for word in words if word != "Version:")


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """So that an end by kill, too, tears down the cluster."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
