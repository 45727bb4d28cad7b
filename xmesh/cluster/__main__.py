"""The command ``python -m xmesh.cluster`` (``launch/emulate``): up, run, down and list."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from functools import partial

from xmesh.cluster.emulated import EmulatedCluster
from xmesh.cluster.network import rate_bps
from xmesh.cluster.processes import split_at_dashes
from xmesh.errors import XmeshError, explain

_INTERRUPTED = 130  # as a shell says for SIGINT
_EPILOG = """
  up --hosts 4 --rate 400mbit                        prints the cluster's name; it stays up
  run --ranks-per-host 2 -- python program.py        on the cluster that is up
  run --hosts 4 --rate 400mbit --ranks-per-host 2 -- python program.py
                                                     on one of its own, gone afterwards
  down                                               the cluster that is up
  down --all                                         all that killed processes left behind
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: its words; default: those of the process.

    Returns:
        Exit status: that of the ranks, or 2 after an error, which stands on stderr.
    """
    own, program = split_at_dashes(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(own)
    if (args.call is _run) != bool(program):
        parser.error("a program goes with run, after --")
    args.argv = program
    # So that an end by kill, too, tears down what this process put up.
    signal.signal(signal.SIGTERM, _stop)
    try:
        return int(args.call(args))
    except XmeshError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="emulate",
        description="Hosts with rate-limited NICs on this machine. Needs root and iproute2.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    up = commands.add_parser("up", help="start a cluster that stays until `down`")
    _add_shape(up, required=True)
    up.set_defaults(call=_up)

    run = commands.add_parser("run", help="run a program on all hosts, by this Python's mpiexec")
    run.add_argument("--name", help="the cluster, where several are up")
    _add_shape(run, required=False)
    run.add_argument(
        "--ranks-per-host", required=True, help="for example 2, or 2,2,1,0", metavar="R"
    )
    run.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds (600)")
    run.set_defaults(call=_run)

    down = commands.add_parser("down", help="end a cluster's processes and remove it")
    down.add_argument("name", nargs="?", help="the cluster, where several are up")
    down.add_argument(
        "--all", action="store_true", help="those, instead, whose process is dead; nobody else's"
    )
    down.set_defaults(call=_down)

    show = commands.add_parser("list", help="show what is up")
    show.set_defaults(call=_list)
    return parser


def _add_shape(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument("--hosts", type=int, required=required, metavar="K", help="number of hosts")
    parser.add_argument(
        "--rate", type=rate_bps, required=required, help="of each NIC: 200mbit, 1gbit", metavar="R"
    )
    parser.add_argument("--nics", type=int, default=1, metavar="N", help="NICs of each host (1)")


def _up(args: argparse.Namespace) -> int:
    cluster = EmulatedCluster(args.hosts, args.rate, args.nics, stays=True)
    cluster.up()
    print(cluster.name)
    return 0


def _run(args: argparse.Namespace) -> int:
    words = args.ranks_per_host.split(",")
    if not all(word.isdecimal() for word in words):
        raise XmeshError(
            explain(
                "--ranks-per-host is a number, or one for each host with commas between",
                values=repr(args.ranks_per_host),
                remedy="give for example 2, or 2,2,1,0",
            )
        )
    counts = [int(word) for word in words]
    ranks_per_host = counts[0] if len(counts) == 1 else counts
    show = partial(print, flush=True)
    if args.hosts is None and args.rate is None:
        cluster = EmulatedCluster.attach(args.name or _only())
        return cluster.run(args.argv, ranks_per_host, timeout_s=args.timeout, on_line=show).status
    if args.hosts is None or args.rate is None or args.name:
        raise XmeshError(
            explain(
                "a cluster of its own needs --hosts and --rate, and has no --name",
                remedy="give both, or neither for a cluster that is up",
            )
        )
    with EmulatedCluster(args.hosts, args.rate, args.nics) as own:
        return own.run(args.argv, ranks_per_host, timeout_s=args.timeout, on_line=show).status


def _down(args: argparse.Namespace) -> int:
    if args.all:
        for name in EmulatedCluster.remove_leftovers():
            print(name)
    elif args.name or EmulatedCluster.names():
        EmulatedCluster.attach(args.name or _only()).down()
    return 0


def _list(args: argparse.Namespace) -> int:
    for name in EmulatedCluster.names():
        network = EmulatedCluster.attach(name).network
        print(
            f"{name}: {network.num_hosts} hosts, {network.nics_per_host} NICs per host, "
            f"{network.rate_bps / 1e6:g} Mbit/s"
        )
    return 0


def _only() -> str:
    """The one cluster that is up."""
    names = EmulatedCluster.names()
    if len(names) != 1:
        raise XmeshError(
            explain(
                "without a name there must be one emulated cluster",
                values=", ".join(names) or "none is up",
                remedy="give a name, or start one: emulate up --hosts 4 --rate 400mbit",
            )
        )
    return names[0]


if __name__ == "__main__":
    sys.exit(main())
