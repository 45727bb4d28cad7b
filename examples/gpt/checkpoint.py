"""Checkpoints: every shard in a file of its rank, to be resumed on any grid.

An array's key says which part of which parameter it is, so whoever resumes takes from each file
what overlaps with its own part. ``latest.json`` is written last, and names a step whose files are
complete; a run that ends in the middle leaves the one before in force.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import xmesh
from gpt.collectives import all_reduce
from gpt.layers import Array
from gpt.trainer import Trainer


def save(folder: Path, step: int, trainer: Trainer) -> None:
    """Write a checkpoint; all ranks call it.

    Args:
        folder: one that all ranks see; made where it is not there.
        step: steps done.
        trainer: what to write.

    Raises:
        RuntimeError: a rank could not write; on all of them.
    """
    rank, comm = trainer.world.comm.rank, trainer.world.comm
    # Along dp all have the same, so the first row of ranks writes.
    meshes = trainer.driver.pipe.stages
    writers = sorted({rank for mesh in meshes for rank in mesh.ranks[: trainer.grid.tp]})
    problem = ""
    try:
        files = _files(folder, step)
        files.mkdir(parents=True, exist_ok=True)
        if rank in writers:
            arrays = {_key(kind, name, box): array for kind, name, box, array in _arrays(trainer)}
            _replace(files / f"rank{rank}.npz", arrays)
    except OSError as error:
        problem = f"rank {rank} cannot write the checkpoint: {error}"
    if all_reduce(comm, np.array([bool(problem)], np.int32), MPI.MAX)[0]:
        raise RuntimeError(problem or "another rank cannot write the checkpoint")
    if rank == 0:
        latest = folder / "latest.json"
        text = json.dumps({"step": step, "ranks": writers, "model": asdict(trainer.config)})
        latest.with_suffix(".part").write_text(text + "\n")
        os.replace(latest.with_suffix(".part"), latest)


def load(folder: Path, trainer: Trainer) -> int:
    """Put the latest checkpoint of a folder into a trainer, of whatever grid.

    Returns:
        Steps that were done.

    Raises:
        ValueError: it is of another model, or a part of it is missing.
        OSError: there is none.
    """
    latest = json.loads((folder / "latest.json").read_text())
    model = asdict(trainer.config)
    others = [name for name in model if latest["model"].get(name) != model[name]]
    if others:
        was = ", ".join(f"{name}={latest['model'].get(name)!r}" for name in others)
        raise ValueError(f"the checkpoint in {folder} is of another model: {was}")
    step = int(latest["step"])
    wanted = list(_arrays(trainer))
    missing = [np.ones(array.shape, bool) for *_, array in wanted]
    for rank in latest["ranks"]:
        with np.load(_files(folder, step) / f"rank{rank}.npz") as file:
            there = [(key, *_read_key(key)) for key in file.files]
            for (kind, name, box, array), holes in zip(wanted, missing, strict=True):
                for key, of_kind, of_name, part in there:
                    both = box.intersect(part) if (kind, name) == (of_kind, of_name) else None
                    if both is not None:
                        array[both.slices(box)] = file[key][both.slices(part)]
                        holes[both.slices(box)] = False
    lost = [name for (_, name, *_), holes in zip(wanted, missing, strict=True) if holes.any()]
    if lost:
        raise ValueError(f"the checkpoint in {folder} lacks {lost[0]} and {len(lost) - 1} more")
    for adam in trainer.adam.values():
        adam.step = step
    return step


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


def _replace(path: Path, arrays: dict[str, Any]) -> None:
    """Write a file that is either whole or not there."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(part, path)
