"""Checkpoints: whole arrays in one file, so that ranks of any number and layout can resume."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from unet.layers import Array
from unet.model import Network

_FILE = re.compile(r"step-(\d{6,})\.npz")


def save(folder: Path, steps: int, arrays: Mapping[str, Array]) -> Path:
    """Write what training changes, after so many steps.

    A file of that name is there as a whole or not at all, whenever the program is ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{steps:06d}.npz"
    with open(path.with_suffix(".part"), "wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".part"), path)
    return path


def load(folder: Path, network: Network) -> tuple[int, dict[str, Array]]:
    """The last checkpoint of a folder.

    Returns:
        Steps that were done, and the arrays.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is of another network.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    found = {int(match[1]): name for name in names if (match := _FILE.fullmatch(name))}
    if not found:
        raise FileNotFoundError(f"no checkpoint step-000000.npz, of any number, in {folder}")
    steps = max(found)
    with np.load(folder / found[steps]) as file:
        arrays = {name: file[name] for name in file.files}
    wanted = {name: weight.shape for name, weight in network.weights().items()}
    # Names are such as "mean/3.conv1"; each weight has as many arrays as the others.
    if {name.rpartition("/")[2]: array.shape for name, array in arrays.items()} != wanted:
        raise ValueError(f"{folder / found[steps]} is of another network than {network}")
    return steps, arrays
