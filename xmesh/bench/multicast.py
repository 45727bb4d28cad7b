"""1 -> m: one rank sends an array to ranks of other hosts, which all need the whole of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from xmesh.bench.cases import RANKS_PER_HOST, RECEIVERS, Case, multicast_case
from xmesh.bench.measure import MIB, run
from xmesh.bench.methods import ONE_TO_M
from xmesh.bench.options import (
    add_measurement,
    add_ranks,
    chosen_methods,
    cost_of,
    topology_of,
)
from xmesh.bench.rows import Row
from xmesh.bench.session import News, Tell, finish, on_new_ranks, on_these_ranks, started_ranks
from xmesh.errors import XmeshError, explain
from xmesh.mpiexec import run_ranks
from xmesh.planner import STRATEGIES

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.topology import Topology


def main(argv: Sequence[str] | None = None) -> int:
    """``xmesh bench multicast``: under mpiexec on its ranks, otherwise on 20 that it starts.

    Returns:
        0; 1 when an element was wrong.

    Raises:
        XmeshError: the ranks could not be started, or failed.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(words)
    comm = started_ranks()
    if comm is None:
        count = RANKS_PER_HOST * (1 + max(hosts for hosts, _ in RECEIVERS))
        command = ["-m", "xmesh", "bench", "multicast", "--events", *words]
        rows = on_new_ranks(
            lambda on_line: run_ranks(count, command, on_line=on_line, timeout_s=args.timeout),
            f"starting {count} ranks",
        )
    else:
        rows = _rows_of_these_ranks(args, comm)
        if comm.rank or args.events:
            return 0
    return finish(rows, args.json)


def fitting_cases(topology: Topology) -> dict[str, tuple[Case, int, int]]:
    """The cases that there are hosts and ranks for: name -> case, hosts, ranks of each.

    Raises:
        XmeshError: none.
    """
    hosts = [topology.ranks_of_host(host) for host in range(topology.num_hosts)]
    found = {}
    for num_hosts, ranks_per_host in RECEIVERS:
        if sum(len(ranks) >= ranks_per_host for ranks in hosts[1 : 1 + num_hosts]) == num_hosts:
            case = multicast_case(hosts, num_hosts, ranks_per_host)
            found[str(case.number)] = (case, num_hosts, ranks_per_host)
    if not found:
        raise XmeshError(
            explain(
                "a multicast needs a rank on one host and one on another",
                values=f"{topology.num_ranks} ranks on {topology.num_hosts} hosts",
                remedy="start more ranks, or take --topology uniform",
            )
        )
    return found


def formula_s(
    strategy: str, num_hosts: int, ranks_per_host: int, alone_s: float, chunks: int
) -> float | None:
    """Seconds in the paper's latency model, in which only bytes between hosts cost time.

    Args:
        strategy: of the planner.
        num_hosts: hosts that receive.
        ranks_per_host: ranks that receive on each.
        alone_s: seconds that the array takes to one rank of another host, t.
        chunks: parts that a broadcast passes on one by one, K.

    Returns:
        A*B*t for send_recv, A*t for local_allgather, 2t for global_allgather (t where the ring
        stays within one host), t + A*t/K for broadcast; t where one rank receives, to which
        every strategy sends plainly. None for what is no strategy.
    """
    if num_hosts * ranks_per_host == 1 and strategy in STRATEGIES:
        return alone_s
    if strategy == "send_recv":
        return num_hosts * ranks_per_host * alone_s
    if strategy == "local_allgather":
        return num_hosts * alone_s
    if strategy == "global_allgather":
        return (2 if num_hosts > 1 else 1) * alone_s
    if strategy == "broadcast":
        return alone_s + num_hosts * alone_s / max(1, chunks)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xmesh bench multicast",
        description="One rank to ranks of other hosts, with every element checked.",
        epilog="Without mpiexec it starts 20 ranks.",
    )
    add_measurement(parser)
    add_ranks(parser)
    return parser


def _rows_of_these_ranks(args: argparse.Namespace, comm: MPI.Intracomm) -> list[Row]:
    def experiment(tell: Tell) -> list[Row]:
        topology = topology_of(args, comm)
        cases = fitting_cases(topology)

        def finished(row: Row) -> Row:
            _, num_hosts, ranks_per_host = cases[str(row.case)]
            alone_s = row.nbytes / row.nic_bandwidth_Bps
            expected_s = formula_s(row.strategy, num_hosts, ranks_per_host, alone_s, row.chunks)
            return replace(row, formula_s=expected_s)

        def tell_finished(news: News) -> None:
            tell(finished(news) if isinstance(news, Row) else news)

        rows = run(
            comm,
            nbytes=int(args.mbytes * MIB),
            repeats=args.repeats,
            methods=chosen_methods(args.method, ONE_TO_M) or ONE_TO_M,
            other_repeats=args.other_repeats,
            topology=topology,
            cost=cost_of(args, comm, topology, tell),
            cases=[case for case, *_ in cases.values()],
            tell=tell_finished,
        )
        return [finished(row) for row in rows]

    return on_these_ranks(comm, args.events, experiment)


if __name__ == "__main__":
    sys.exit(main())
