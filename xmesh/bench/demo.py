"""``make demo``: the nine cases of the paper, then a heat solver with an analysis beside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from xmesh.bench import paper
from xmesh.bench.launch import run_ranks
from xmesh.errors import XmeshError, explain

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLE = _ROOT / "examples" / "coupled_heat.py"
_EXAMPLE_RANKS = 6
_TIMEOUT_S = 120


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; it starts all ranks itself.

    Returns:
        0; 1 when something came out wrong.

    Raises:
        XmeshError: the ranks could not be started, or failed.
    """
    parser = argparse.ArgumentParser(
        prog="xmesh bench demo",
        description="The nine cases of the paper, then examples/coupled_heat.py; about a minute.",
    )
    parser.parse_args(argv)
    say("Nine reshardings from mesh to mesh, on up to 20 ranks of this machine\n")
    status = paper.main(["--timeout", str(_TIMEOUT_S)])
    if not _EXAMPLE.is_file():
        say("\nThe second half, coupled_heat.py, is in examples/ of the source distribution.")
        return status
    say(f"\nA heat solver on 4 ranks, its analysis on 2: mpiexec -n 6 python {_short(_EXAMPLE)}\n")
    ended = run_ranks(
        _EXAMPLE_RANKS, [str(_EXAMPLE)], on_line=say, timeout_s=_TIMEOUT_S, import_from=_ROOT
    )
    if ended:
        raise XmeshError(
            explain(
                "the example must run to its end",
                values=f"mpiexec ended with status {ended}; what the ranks printed is above",
                remedy="xmesh doctor shows whether MPI works here",
            )
        )
    return status


def say(text: str) -> None:
    """Print at once, whatever stdout is."""
    print(text, flush=True)


def _short(path: Path) -> Path:
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path


if __name__ == "__main__":
    try:
        sys.exit(main())
    except XmeshError as error:
        sys.exit(f"error: {error}")
