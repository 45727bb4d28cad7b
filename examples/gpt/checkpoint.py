"""Checkpoints: every shard in a file of its rank, to be resumed on any grid.

An array's key says which part of which parameter it is, so whoever resumes takes from each file
what overlaps with its own part. ``latest.json`` is written last, and names a step whose files are
complete; a run that ends in the middle leaves the one before in force.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
from mpi4py import MPI

import xmesh
from gpt.layers import Array, array_module, on_host
from gpt.trainer import Trainer


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; raised on all ranks alike."""


def save(folder: Path, step: int, trainer: Trainer) -> None:
    """Write a checkpoint; all ranks call it.

    Args:
        folder: one that all ranks see; made where it is not there.
        step: steps done.
        trainer: what to write.

    Raises:
        CheckpointError: a rank could not write.
    """
    comm = trainer.world.comm
    # Along dp all have the same, so the first row of ranks writes.
    meshes = trainer.driver.pipe.stages
    writers = sorted({rank for mesh in meshes for rank in mesh.ranks[: trainer.grid.tp]})
    with _together(comm):
        files = _files(folder, step)
        files.mkdir(parents=True, exist_ok=True)
        if comm.rank in writers:
            arrays = {
                _key(kind, name, box): on_host(array) for kind, name, box, array in _arrays(trainer)
            }
            part = files / f"rank{comm.rank}.part"
            with part.open("wb") as file:
                np.savez(file, **arrays)
            os.replace(part, part.with_suffix(".npz"))
    with _together(comm):
        if comm.rank == 0:
            about = {"step": step, "ranks": writers, "model": asdict(trainer.config)}
            part = folder / "latest.part"
            part.write_text(json.dumps(about) + "\n")
            os.replace(part, folder / "latest.json")


def load(folder: Path, trainer: Trainer) -> int:
    """Put the latest checkpoint of a folder into a trainer, of whatever grid; all ranks call it.

    Returns:
        Steps that were done.

    Raises:
        CheckpointError: there is none, it is of another model, or a part of it is missing.
    """
    with _together(trainer.world.comm):
        about = json.loads((folder / "latest.json").read_text())
        model, there = asdict(trainer.config), about["model"]
        others = [f"{name}={there.get(name)!r}" for name in model if there.get(name) != model[name]]
        if others:
            raise ValueError(f"the checkpoint in {folder} is of another model: {', '.join(others)}")
        step = int(about["step"])
        _read([_files(folder, step) / f"rank{rank}.npz" for rank in about["ranks"]], trainer)
        for adam in trainer.adam.values():
            adam.step = step
    return step


def _read(paths: list[Path], trainer: Trainer) -> None:
    """Copy from files what overlaps with the parts of this rank.

    Raises:
        ValueError: something is in none of them.
    """
    wanted = list(_arrays(trainer))
    missing = [np.ones(array.shape, bool) for *_, array in wanted]
    for path in paths:
        with np.load(path) as file:
            there = [(key, *_read_key(key)) for key in file.files]
            for (kind, name, box, array), holes in zip(wanted, missing, strict=True):
                for key, of_kind, of_name, part in there:
                    both = box.intersect(part) if (kind, name) == (of_kind, of_name) else None
                    if both is not None:
                        found = array_module(array).asarray(file[key][both.slices(part)])
                        array[both.slices(box)] = found
                        holes[both.slices(box)] = False
    lost = [name for (_, name, *_), holes in zip(wanted, missing, strict=True) if holes.any()]
    if lost:
        raise ValueError(f"{', '.join(map(str, paths))}: no {lost[0]}, and {len(lost) - 1} more")


@contextmanager
def _together(comm: MPI.Intracomm) -> Iterator[None]:
    """Raise on all ranks what the body raises on any: nobody waits for one that gave up."""
    problem = ""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        problem = f"rank {comm.rank}: {error}"
    problems: list[str] = [text for text in comm.allgather(problem) if text]
    if problems:
        raise CheckpointError(problems[0])


def _arrays(trainer: Trainer) -> Iterator[tuple[str, str, xmesh.Box, Array]]:
    """What a rank has to remember: kind, name, part, array."""
    for index, stage in trainer.shard.stages.items():
        adam = trainer.adam[index]
        for kind, arrays in (
            ("value", stage.values),
            ("mean", adam.means),
            ("square", adam.squares),
        ):
            for name, array in arrays.items():
                yield kind, name, trainer.shard.boxes[index][name], array


def _files(folder: Path, step: int) -> Path:
    return folder / f"step{step:06d}"


def _key(kind: str, name: str, box: xmesh.Box) -> str:
    """``value:block0.mlp.up.bias:0-128``; where a dimension ends the next one begins by ``,``."""
    ranges = (f"{start}-{stop}" for start, stop in zip(box.start, box.stop, strict=True))
    return f"{kind}:{name}:{','.join(ranges)}"


def _read_key(key: str) -> tuple[str, str, xmesh.Box]:
    kind, name, text = key.split(":")
    ends = [part.split("-") for part in text.split(",")]
    return kind, name, xmesh.Box(tuple(int(a) for a, _ in ends), tuple(int(b) for _, b in ends))
