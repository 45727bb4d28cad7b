"""The command ``xmesh``: each subcommand is a module of `xmesh.commands`, imported on demand."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from xmesh import __version__
from xmesh.errors import XmeshError

COMMANDS = {
    "layout": "draw which rank holds which part of an array",
    "plan": "plan a resharding and show it",
    "calibrate": "measure latency and bandwidth of this cluster (under mpiexec)",
    "simulate": "let a plan run on a simulated cluster",
    "pipeline": "show a pipeline schedule, and what it takes",
    "doctor": "say what this Python, its MPI and its GPUs offer to xmesh",
    "bench": "run an experiment",
}
_INTERRUPTED = 130  # as a shell says for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: the words after ``xmesh``; default: those of the process.

    Returns:
        Exit status: 0, or 2 after an error, which stands on stderr.

    Raises:
        SystemExit: by argparse: after ``--help`` and ``--version``, and for unknown options.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser(words).parse_args(words)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except XmeshError as error:
        print(f"xmesh: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough (`xmesh plan ... | head`); nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xmesh",
        description="Cross-mesh resharding of N-d arrays: plan it, look at it, measure it.",
        epilog="xmesh COMMAND --help says more.",
    )
    parser.add_argument("--version", action="version", version=f"xmesh {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Only the command that is asked for is imported: planning needs no MPI, and help is quick.
    asked = next((word for word in words if not word.startswith("-")), None)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == asked:
            module = importlib.import_module(f"xmesh.commands.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
