"""Is a parallel run equal to one in a single process?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from gpt.collectives import all_reduce, wait
from gpt.layers import on_host
from gpt.model import parameters
from gpt.reference import Reference
from gpt.text import Text
from gpt.trainer import Trainer


class Errors(NamedTuple):
    """Largest differences to one process, relative to the largest element of the same array.

    Attributes:
        loss: of the step.
        gradient: of any parameter, on any rank.
        name: of the parameter with that gradient.
    """

    loss: float
    gradient: float
    name: str


class Check:
    """Does every step again, on rank 0 alone; all ranks make it and call it together.

    Args:
        trainer: what to compare.
        text: what it learns.
        rate: of Adam.
        first: steps that were done before, in another run.
    """

    def __init__(self, trainer: Trainer, text: Text, rate: float, first: int = 0) -> None:
        self._trainer = trainer
        self._comm = trainer.world.comm
        self._shapes = {
            name: wanted.shape for name, wanted in parameters(trainer.config, 0, 1).items()
        }
        self._reference: Reference | None = None
        if self._comm.rank == 0:
            self._reference = Reference(trainer.config, text, trainer.grid.rows, rate)
            for step in range(first):
                self._reference.step(step)

    def __call__(self, step: int, loss: float) -> Errors:
        """Compare a step that the trainer has just done."""
        sizes = [int(np.prod(shape)) for shape in self._shapes.values()]
        flat = np.empty(1 + sum(sizes))
        if self._reference is not None:
            flat[0], gradients = self._reference.step(step)
            flat[1:] = np.concatenate([gradients[name].reshape(-1) for name in self._shapes])
        wait(self._comm.Ibcast(flat, root=0), "reference")
        parts = np.split(flat[1:], np.cumsum(sizes)[:-1])
        wanted = {
            name: part.reshape(shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }
        names = list(self._shapes)
        errors = np.zeros(len(names) + 1)
        errors[-1] = abs(loss - flat[0]) / abs(flat[0])
        for index, boxes in self._trainer.shard.boxes.items():
            for name, box in boxes.items():
                found = on_host(self._trainer.driver.gradients[index][name])
                difference = np.abs(found - wanted[name][box.slices()]).max(initial=0)
                place = names.index(name)
                largest = max(np.abs(wanted[name]).max(), np.finfo(float).tiny)
                errors[place] = max(errors[place], difference / largest)
        all_reduce(self._comm, errors, MPI.MAX)
        worst = int(errors[:-1].argmax())
        return Errors(float(errors[-1]), float(errors[worst]), names[worst])
