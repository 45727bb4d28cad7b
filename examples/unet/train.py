"""A U-shaped network with attention learns to denoise images, in two stages on different layouts.

    mpiexec -n 4 python examples/unet/train.py --steps 20 --check
    mpiexec -n 5 python examples/unet/train.py --ranks 2,3 --schedule zb-h1
    python examples/unet/train.py                  # a plain loop, without a pipeline

The first half of the layers is the first stage, the second half the second; each layer feeds its
mirror image, so several arrays cross from stage to stage with each micro-batch, and as many
gradients come back. ``--ranks 2x1,1x2`` cuts the images over two ranks in the first stage, and in
the second stage heads and hidden channels, where both ranks have all images.

The loss is how much of the noise is left in images that were not seen before; 1 is all of it.
``--check`` trains a second time in one process, and compares losses and all gradients of each step.
README.md in this folder says the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Ranks share the cores: a BLAS that takes all of them in every rank makes this many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is package unet
import xmesh
from unet import checkpoint
from unet.alone import Alone
from unet.layers import Array
from unet.model import Network
from unet.pipelined import Pipelined
from unet.settings import Settings
from xmesh.pipeline import SCHEDULES

#: Largest relative difference that --check takes for rounding.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A U-Net in two pipeline stages.")
    add = parser.add_argument
    add("--steps", type=int, default=100, help="training steps (100)")
    add("--images", type=int, default=32, help="images of a step (32)")
    add("--microbatches", type=int, default=4, help="micro-batches of a step (4)")
    training = [name for name in SCHEDULES if name != "inference"]
    add("--schedule", choices=training, default="eager-1f1b", help="(eager-1f1b)")
    add("--weight-delay", action="store_true", help="send gradients before those of weights")
    add("--ranks", help="of each stage group: images x channels, such as 2x1,1x2 or 2,3")
    add("--chunks", type=int, help="stages of each group (2 for interleaved-1f1b, else 1)")
    for name, default in (("side", 16), ("width", 16), ("layers", 6), ("heads", 4)):
        add(f"--{name}", type=int, default=default, help=f"of the network ({default})")
    add("--rate", type=float, default=2e-3, help="learning rate (0.002)")
    add("--dtype", choices=("float32", "float64"), default="float32", help="(float32)")
    add("--seed", type=int, default=0, help="of weights and images (0)")
    add("--checkpoint", type=Path, metavar="DIR", help="write the state there at the end")
    add("--checkpoint-every", type=int, default=0, metavar="STEPS", help="and so often")
    add("--resume", type=Path, metavar="DIR", help="go on from the last state there")
    add("--check", action="store_true", help="compare each step with one process")
    return parser.parse_args(argv)


def groups_of(text: str | None, size: int) -> list[tuple[int, int]]:
    """(data-parallel, tensor-parallel) ranks of each stage group."""
    if text is None:
        return [(size // 2, 1), (1, size - size // 2)]
    found = [re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", word) for word in text.split(",")]
    groups = [(int(match[1]), int(match[2] or 1)) for match in found if match]
    if len(groups) < len(found):
        raise ValueError(f"--ranks {text} is not written as 2x1,1x2 or 2,3")
    if sum(a * b for a, b in groups) != size:
        raise ValueError(f"--ranks {text} does not make {size} ranks")
    return groups


@contextlib.contextmanager
def trainer_of(
    args: argparse.Namespace, settings: Settings, comm: MPI.Intracomm
) -> Iterator[Alone | Pipelined]:
    """What computes the steps."""
    if comm.size == 1:
        yield Alone(settings)
        return
    chunks = args.chunks or (2 if args.schedule == "interleaved-1f1b" else 1)
    with (
        xmesh.World(comm) as world,
        Pipelined(
            settings,
            world,
            groups_of(args.ranks, comm.size),
            args.schedule,
            args.microbatches,
            args.weight_delay,
            chunks,
        ) as trainer,
    ):
        yield trainer


def difference(found: dict[str, Array], wanted: dict[str, Array]) -> float:
    """Largest difference of an array from what it should be, relative to its largest element."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(
        float(np.abs(found[name] - wanted[name]).max() / max(np.abs(wanted[name]).max(), 1e-30))
        for name in wanted
    )


class Check:
    """The same training in one process, on rank 0, side by side.

    Args:
        settings: the training run.
        state: where it begins.
    """

    def __init__(self, settings: Settings, state: dict[str, Array]) -> None:
        self._alone = Alone(settings)
        self._alone.restore(state)
        self.worst_loss = 0.0
        self.worst_gradient = 0.0

    def step(self, step: int, loss: float, gradients: dict[str, Array]) -> None:
        """Train one step, and compare."""
        wanted = self._alone.step(step)
        self.worst_loss = max(self.worst_loss, abs(loss - wanted) / wanted)
        found = difference(gradients, self._alone.gradients())
        self.worst_gradient = max(self.worst_gradient, found)

    def report(self, dtype: str) -> bool:
        """Say how far apart they were; whether that is rounding."""
        right = max(self.worst_loss, self.worst_gradient) < TOLERANCES[dtype]
        say(
            f"largest relative difference to one process: losses {self.worst_loss:.1e}, "
            f"gradients {self.worst_gradient:.1e}: {'equal' if right else 'WRONG'}"
        )
        return right


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def resume(folder: Path, comm: MPI.Intracomm, trainer: Alone | Pipelined) -> int:
    """Go on from the last checkpoint of a folder, which rank 0 reads; steps that were done."""
    found: Any = None
    if comm.rank == 0:
        try:
            found = checkpoint.load(folder, trainer.settings.network)
        except Exception as error:
            found = error  # told to all ranks, which would otherwise wait for this one
    found = comm.bcast(found)
    if isinstance(found, Exception):
        raise found
    steps, state = found
    trainer.restore(state)
    return int(steps)


def train(
    args: argparse.Namespace, comm: MPI.Intracomm, trainer: Alone | Pipelined, first: int
) -> bool:
    """The loop; False where a check failed."""
    check = None
    if args.check:
        state = trainer.state()
        check = Check(trainer.settings, state) if comm.rank == 0 else None
    with bar(args.steps, first, comm.rank == 0) as advance:
        for step in range(first, args.steps):
            loss = trainer.step(step)
            gradients = trainer.gradients() if args.check else {}
            if check is not None:
                check.step(step, loss, gradients)
            advance(step, loss)
            done = step + 1
            every = args.checkpoint_every
            due = done == args.steps or (every > 0 and done % every == 0)
            if args.checkpoint is not None and due:
                state = trainer.state()
                if comm.rank == 0:
                    checkpoint.save(args.checkpoint, done, state)
    return check is None or check.report(args.dtype)


@contextlib.contextmanager
def bar(steps: int, first: int, shown: bool) -> Iterator[Callable[[int, float], None]]:
    """A progress bar with the loss; where there is no terminal, lines."""
    console = Console(highlight=False, soft_wrap=True, quiet=not shown)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps, completed=first)

        def advance(step: int, loss: float) -> None:
            progress.update(task, advance=1, description=f"loss {loss:.4f}")
            if step in (first, steps - 1) or (step + 1) % max(1, steps // 10) == 0:
                console.print(f"step {step + 1:4d} of {steps}: loss {loss:.6f}")

        yield advance


def main() -> int:
    args = arguments()
    comm = MPI.COMM_WORLD
    with contextlib.ExitStack() as stack:
        try:
            network = Network(args.side, args.width, args.layers, args.heads)
            settings = Settings(network, args.images, args.dtype, args.rate, args.seed)
            trainer = stack.enter_context(trainer_of(args, settings, comm))
            first = 0 if args.resume is None else resume(args.resume, comm, trainer)
        except (ValueError, FileNotFoundError, xmesh.errors.XmeshError) as error:
            # All ranks have the same one: of arguments, or of a checkpoint.
            if comm.rank == 0:
                say(str(error))
            return 2
        right = train(args, comm, trainer, first)
    return 0 if comm.bcast(right) else 1


if __name__ == "__main__":
    sys.exit(main())
