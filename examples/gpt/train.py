"""Train a small GPT on the source of Python's standard library.

    python examples/gpt/train.py
    mpiexec -n 8 python examples/gpt/train.py --dp 2 --tp 2 --pp 2 --schedule eager-1f1b

README.md in this folder says the rest.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# This folder is the package `gpt`, wherever the program is started from.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpi4py import MPI
from rich.console import Console
from rich.progress import Progress

import xmesh
from gpt import checkpoint
from gpt.check import Check
from gpt.model import Config
from gpt.parallel import Grid
from gpt.text import Text, standard_library
from gpt.trainer import Trainer
from xmesh.pipeline import SCHEDULES
from xmesh.pipeline.timeline import draw, text_timeline

#: Largest relative difference to one process that `--check` lets pass.
TOLERANCE = {"float64": 1e-5, "float32": 2e-2}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the source of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--gpu", action="store_true", help="by CuPy, each rank on its current GPU")
    grid = parser.add_argument_group("ranks, dp * tp * pp in all")
    grid.add_argument("--dp", type=int, default=1, help="data parallel: share the rows")
    grid.add_argument("--tp", type=int, default=1, help="tensor parallel: share heads, features")
    grid.add_argument("--pp", type=int, default=1, help="pipeline parallel: share the layers")
    grid.add_argument("--chunks", type=int, help="stages of each group, for interleaved-1f1b")
    grid.add_argument(
        "--schedule",
        default="eager-1f1b",
        choices=[name for name in SCHEDULES if name != "inference"],
        help="what stages compute in which order",
    )
    grid.add_argument("--weight-delay", action="store_true", help="weight gradients come later")
    grid.add_argument("--microbatches", type=int, default=4, help="of each batch")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=Config.layers, help="blocks")
    model.add_argument("--hidden", type=int, default=Config.hidden, help="features of a token")
    model.add_argument("--heads", type=int, default=Config.heads, help="of attention")
    model.add_argument("--sequence", type=int, default=Config.sequence, help="tokens of a row")
    model.add_argument("--untied", action="store_true", help="the head has a table of its own")
    model.add_argument("--dtype", default=Config.dtype, choices=list(TOLERANCE), help="of it all")
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=int, default=200, help="after which it ends")
    train.add_argument("--rows", type=int, default=Grid.rows, help="of a batch")
    train.add_argument("--rate", type=float, default=3e-3, help="length of Adam's steps")
    train.add_argument("--seed", type=int, default=0, help="of parameters and rows")
    train.add_argument("--every", type=int, default=10, help="steps from one line to the next")
    train.add_argument("--checkpoint", type=Path, metavar="DIR", help="write one at the end")
    train.add_argument("--save-every", type=int, metavar="STEPS", help="and after so many steps")
    train.add_argument("--resume", type=Path, metavar="DIR", help="go on from one, on any grid")
    train.add_argument("--timeline", metavar="FILE", help="draw what one step did, .png or .svg")
    train.add_argument("--check", action="store_true", help="compare each step with one process")
    return parser


@contextmanager
def report(rank: int, total: int, first: int) -> Iterator[Progress]:
    """A bar on a terminal, on rank 0; lines go above it."""
    console = Console(highlight=False, soft_wrap=True, quiet=rank != 0)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        progress.add_task("steps", total=total, completed=first)
        yield progress


def train(args: argparse.Namespace, config: Config, grid: Grid, world: xmesh.World) -> bool:
    """Train; False when `--check` found a difference."""
    text = Text(standard_library(), config.sequence, args.seed)
    right = True
    record = args.timeline is not None
    xp = importlib.import_module("cupy" if args.gpu else "numpy")
    with Trainer(config, grid, text, world, args.rate, record, xp) as trainer:
        first = checkpoint.load(args.resume, trainer) if args.resume else 0
        check = Check(trainer, text, args.rate, first) if args.check else None
        with report(world.comm.rank, args.steps, first) as progress:
            began_s = time.perf_counter()
            for step in range(first, args.steps):
                loss = trainer.step(step)
                done = step + 1
                line = f"step {step:4d}  loss {loss:.6f}"
                if check is not None:
                    errors = check(step, loss)
                    right &= max(errors.loss, errors.gradient) < TOLERANCE[config.dtype]
                    line += (
                        f"  differs from one process: loss {errors.loss:.1e}, "
                        f"gradients {errors.gradient:.1e} ({errors.name})"
                    )
                if step % args.every == 0 or done == args.steps:
                    progress.console.print(line)
                save = done == args.steps or (args.save_every and done % args.save_every == 0)
                if args.checkpoint and save:
                    checkpoint.save(args.checkpoint, done, trainer)
                progress.advance(progress.task_ids[0])
            if args.steps > first:
                each_s = (time.perf_counter() - began_s) / (args.steps - first)
                progress.console.print(
                    f"{each_s * 1e3:.0f} ms a step, {grid.rows * config.sequence / each_s:.0f} "
                    f"tokens a second, {grid.num_ranks} ranks, {trainer.driver.pipe.schedule.name}"
                )
            if record:
                show_step(trainer, args.timeline, progress.console)
    return right


def show_step(trainer: Trainer, path: str, console: Console) -> None:
    """Print and draw the last step; all ranks call it."""
    measured = trainer.driver.measured()
    if measured is None:
        return
    step = measured.timeline()
    console.print(*text_timeline(step, min(console.width, 120)), sep="\n")
    console.print(f"{step.overlap:.0%} of the transfers' time was hidden under computation")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    draw(step, path, "measured")
    console.print(f"wrote {path}")


def main() -> int:
    args = options().parse_args()
    comm = MPI.COMM_WORLD
    config = Config(
        sequence=args.sequence,
        hidden=args.hidden,
        heads=args.heads,
        layers=args.layers,
        tied=not args.untied,
        dtype=args.dtype,
        seed=args.seed,
    )
    chunks = args.chunks or (2 if args.schedule == "interleaved-1f1b" else 1)
    grid = Grid(
        dp=args.dp,
        tp=args.tp,
        pp=args.pp,
        chunks=chunks,
        rows=args.rows,
        microbatches=args.microbatches,
        schedule=args.schedule,
        weight_delay=args.weight_delay,
    )
    problem = grid.problem(config)
    if grid.num_ranks != comm.size:
        problem = (
            f"dp * tp * pp is {grid.num_ranks}, and there are {comm.size} ranks: "
            f"mpiexec -n {grid.num_ranks} python examples/gpt/train.py ..."
        )
    if problem:
        if comm.rank == 0:
            print(problem, file=sys.stderr)
        return 2
    try:
        with xmesh.World(comm) as world:
            right = train(args, config, grid, world)
    except checkpoint.CheckpointError as error:  # on all ranks alike
        if comm.rank == 0:
            print(error, file=sys.stderr)
        return 1
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
