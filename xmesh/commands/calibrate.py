"""``xmesh calibrate``: measure the links of this cluster and write them as a cost model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from xmesh.errors import OptionError, TransportError, explain
from xmesh.planner.describe import seconds_text, table_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.epilog = (
        "  mpiexec -n 8 xmesh calibrate --output cost.json\n"
        "  xmesh plan SRC DST --shape ... --cost cost.json"
    )
    parser.add_argument("--output", metavar="FILE", help="where to write the model as JSON")
    parser.add_argument("--mbytes", type=float, default=8, help="size of a stream, in MiB (8)")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many counts (5)")


def run(args: argparse.Namespace) -> int:
    """Measure, print on rank 0, and write the file."""
    if args.mbytes <= 0 or args.repeats < 1:
        raise OptionError(
            explain(
                "a measurement needs bytes and repeats",
                values=f"--mbytes {args.mbytes:g} --repeats {args.repeats}",
                remedy="leave both out for their defaults",
            )
        )
    try:
        from mpi4py import MPI

        from xmesh.bench.calibration import calibrate
        from xmesh.world import World
    except ImportError as error:
        raise TransportError(
            explain(
                "calibrate measures MPI, and needs mpi4py",
                values=str(error),
                remedy="pip install 'xmesh[mpich]', or mpi4py for the MPI of your cluster",
            )
        ) from error

    comm = MPI.COMM_WORLD
    if comm.size == 1:
        raise OptionError(
            explain(
                "calibrate measures between ranks, and needs two or more",
                values="it runs on one rank",
                remedy="mpiexec -n 8 xmesh calibrate, with ranks on two hosts or more",
            )
        )
    with World(comm) as world:
        topology = world.topology
        cost, links = calibrate(comm, topology, int(args.mbytes * 2**20), args.repeats)
    if comm.rank:
        return 0
    rows = [
        (
            f"{a} ({topology.host_name(a)})",
            f"{b} ({topology.host_name(b)})",
            seconds_text(link.latency_s),
            f"{link.bandwidth_Bps / 1e6:,.1f} MB/s",
        )
        for a, b, link in links
    ]
    print(*table_lines(("from", "to", "latency", "bandwidth"), rows, "<<>>"), sep="\n")
    if not any(topology.host(a) != topology.host(b) for a, b, _ in links):
        print("one host only: this says nothing about a network, whose figures are the defaults")
    text = json.dumps(cost.to_json(), indent=2)
    print(text)
    if args.output:
        try:
            Path(args.output).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(
                explain(
                    "--output must name a file that can be written",
                    values=str(error),
                    remedy="copy the figures above, or measure again with another name",
                )
            ) from error
        print(f"wrote {args.output}")
    return 0
