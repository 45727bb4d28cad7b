"""``xmesh bench``: run an experiment, a module of ``xmesh.bench`` with ``main(argv) -> int``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path

from xmesh.errors import XmeshError, explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes; the experiment reads the words after its name."""
    parser.add_argument("experiment", help=f"one of: {', '.join(experiments()) or 'none here'}")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="options of the experiment, --help among them; most take --json FILE",
    )


def run(args: argparse.Namespace) -> int:
    """Hand over to the experiment."""
    if args.experiment not in experiments():
        raise XmeshError(
            explain(
                "an experiment must be one that there is",
                values=repr(args.experiment),
                remedy=f"choose from: {', '.join(experiments()) or 'none in this installation'}",
            )
        )
    module = importlib.import_module(f"xmesh.bench.{args.experiment}")
    return int(module.main(args.words) or 0)


def experiments() -> list[str]:
    """Names of the modules that have a ``main``, found by their text: none is imported."""
    spec = importlib.util.find_spec("xmesh.bench")
    folders = spec.submodule_search_locations if spec is not None else None
    return sorted(
        path.stem
        for folder in folders or ()
        for path in Path(folder).glob("*.py")
        if not path.stem.startswith("_") and "\ndef main(" in path.read_text(encoding="utf-8")
    )
