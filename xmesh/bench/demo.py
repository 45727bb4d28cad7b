"""``make demo``: the paper's cases, a heat solver with an analysis beside it, a GPT in training."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from xmesh.bench import paper
from xmesh.bench.show import Display
from xmesh.errors import XmeshError, explain
from xmesh.mpiexec import run_ranks

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = _ROOT / "examples"
_TIMEOUT_S = 240
#: Steps of the training, which takes about half a minute on two cores.
_STEPS = 60
_TIMELINE = Path("out") / "gpt-step.png"


class Example(NamedTuple):
    """A program that the demo starts.

    Attributes:
        title: what it does.
        ranks: how many.
        words: the program below the examples, and its arguments.
        steps: those that it says it has done, for a bar; 0 for none.
    """

    title: str
    ranks: int
    words: tuple[str, ...]
    steps: int = 0


def _training() -> Example:
    words = ["gpt/train.py", "--tp", "2", "--pp", "2", "--steps", str(_STEPS), "--every", "1"]
    if importlib.util.find_spec("matplotlib") is not None:
        words += ["--timeline", str(_TIMELINE)]
    return Example(
        "A GPT on 2 stages of 2 tensor-parallel ranks learns Python's source",
        4,
        tuple(words),
        _STEPS,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; it starts all ranks itself.

    Returns:
        0; 1 when something came out wrong.

    Raises:
        XmeshError: the ranks could not be started, or failed.
    """
    parser = argparse.ArgumentParser(
        prog="xmesh bench demo",
        description="The paper's cases, a coupled solver, a GPT in training; two minutes.",
    )
    parser.parse_args(argv)
    say("Nine reshardings from mesh to mesh, on up to 20 ranks of this machine\n")
    status = paper.main(["--timeout", str(_TIMEOUT_S)])
    heat = Example("A heat solver on 4 ranks, its analysis on 2", 6, ("coupled_heat.py",))
    for example in (heat, _training()):
        program = _EXAMPLES / example.words[0]
        if not program.is_file():
            say(f"\n{example.words[0]} is in examples/ of the source distribution.")
            continue
        words = [str(program), *example.words[1:]]
        shown = " ".join([str(_short(program)), *words[1:]])
        say(f"\n{example.title}: mpiexec -n {example.ranks} python {shown}\n")
        _run(example, words)
    return status


def _run(example: Example, words: Sequence[str]) -> None:
    with Display() as display:
        on_line = _counting(display, example) if example.steps else say
        ended = run_ranks(
            example.ranks, words, on_line=on_line, timeout_s=_TIMEOUT_S, import_from=_ROOT
        )
    if ended:
        raise XmeshError(
            explain(
                "the example must run to its end",
                values=f"mpiexec ended with status {ended}; what the ranks printed is above",
                remedy="xmesh doctor shows whether MPI works here",
            )
        )


def _counting(display: Display, example: Example) -> Callable[[str], None]:
    """Moves a bar on with every step that a line tells of, and prints every tenth."""

    def on_line(line: str) -> None:
        found = re.match(r"step +(\d+)  (loss \S+)", line)
        if found is None:
            say(line)
            return
        step = int(found[1])
        display.step(step + 1, example.steps, f"step {step}, {found[2]}")
        if step % 10 == 0 or step + 1 == example.steps:
            say(line)

    return on_line


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
