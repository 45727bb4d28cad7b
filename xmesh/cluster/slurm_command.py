"""The command ``launch/slurm-local``: a local Slurm up, run and down."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Sequence

from xmesh.cluster.local_slurm import LocalSlurm
from xmesh.cluster.processes import split_at_dashes
from xmesh.errors import XmeshError, explain

_EPILOG = """
  eval "$(slurm-local up)"                       start it, and let this shell's srun find it
  srun -N4 -n8 --mpi=pmi2 python program.py
  slurm-local down
  slurm-local run -- srun -N4 -n8 --mpi=pmi2 python program.py      all three in one
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: its words; default: those of the process.

    Returns:
        Exit status: that of the command run, or 2 after an error, which stands on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="slurm-local",
        description="A real Slurm of several nodes on this machine (packages slurm-wlm and munge).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["up", "run", "down"])
    parser.add_argument("--nodes", type=int, default=4, help="number of nodes (4)")
    parser.add_argument("--cpus", type=int, default=2, help="tasks that fit on a node (2)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="of run (600)")
    parser.add_argument(
        "--all", action="store_true", help="down: only those whose process is dead, nobody else's"
    )
    own, program = split_at_dashes(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(own)
    if (args.action == "run") != bool(program):
        parser.error("a command goes with run, after --")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if args.action == "up":
            slurm = LocalSlurm(args.nodes, args.cpus, stays=True)
            slurm.up()
            print(f"export SLURM_CONF={slurm.folder}/slurm.conf")
        elif args.action == "run":
            with LocalSlurm(args.nodes, args.cpus) as slurm:
                show = functools.partial(print, flush=True)
                return slurm.run(program, timeout_s=args.timeout, on_line=show).status
        elif args.all:
            LocalSlurm.remove_leftovers()
        else:
            _down()
        return 0
    except XmeshError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # as a shell says for SIGINT


def _down() -> None:
    """The one that SLURM_CONF names, else the one that is up."""
    folders = LocalSlurm.folders()
    chosen = [path for path in folders if os.environ.get("SLURM_CONF") == f"{path}/slurm.conf"]
    if len(chosen or folders) > 1:
        raise XmeshError(
            explain(
                "it must be known which local Slurm is meant",
                values=", ".join(map(str, folders)),
                remedy="export SLURM_CONF=FOLDER/slurm.conf",
            )
        )
    for folder in chosen or folders:
        LocalSlurm.attach(folder).down()


if __name__ == "__main__":
    sys.exit(main())
