"""Sums over ranks, by messages of MPI from host memory."""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from gpt.layers import Array, array_module, on_host

#: A rank that waits looks this often at once, then sleeps between looks.
_LOOKS = 200
_SLEEP_S = 50e-6
_TIMEOUT_S = 120


def wait(request: MPI.Request, what: str) -> None:
    """Wait; the core goes to others after a while, as ranks may be more than cores.

    Raises:
        TimeoutError: the other ranks did not come. One of them may have failed in a callback: this
            rank must then leave the sum, so that the driver can tell all ranks.
    """
    deadline_s = time.monotonic() + _TIMEOUT_S
    looks = 0
    while not request.Test():
        looks += 1
        if looks > _LOOKS:
            time.sleep(_SLEEP_S)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what}: other ranks are missing after {_TIMEOUT_S} s")


def all_reduce(comm: MPI.Intracomm | None, array: Array, op: MPI.Op = MPI.SUM) -> Array:
    """Combine an array over ranks, in place.

    Args:
        comm: of these ranks; None for one rank alone.
        array: C-contiguous, of one shape on all of them.
        op: how.

    Returns:
        The array.
    """
    if comm is None or comm.size == 1:
        return array
    xp = array_module(array)
    host = on_host(array)
    wait(comm.Iallreduce(MPI.IN_PLACE, host, op), "all-reduce")
    if xp is not np:
        array[...] = xp.asarray(host)
    return array


def all_reduce_together(comm: MPI.Intracomm | None, arrays: list[Array]) -> None:
    """Sum many arrays over ranks in place, by one message for all: most of them are small."""
    if comm is None or comm.size == 1 or not arrays:
        return
    xp = array_module(arrays[0])
    flat = all_reduce(comm, xp.concatenate([array.reshape(-1) for array in arrays]))
    start = 0
    for array in arrays:
        array[...] = flat[start : start + array.size].reshape(array.shape)
        start += array.size
