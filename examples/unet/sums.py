"""Sums over the ranks of a communicator, from inside a callback."""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from unet.layers import Array

#: A rank looks so often without a pause, then sleeps between looks: ranks may be more than cores.
_LOOKS = 200
_SLEEP_S = 50e-6
_TIMEOUT_S = 120.0


class Sum:
    """The sum of what the ranks of a communicator have.

    Args:
        comm: of these ranks, which call it in the same order.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def __call__(self, array: Array) -> Array:
        """Sum arrays of one shape.

        Raises:
            TimeoutError: another rank did not come. Its callback may have raised: then this one
                must raise, too, so that the driver can tell all ranks.
        """
        if self._comm.size == 1:
            return array
        total = np.array(array, order="C")
        request = self._comm.Iallreduce(MPI.IN_PLACE, total)
        deadline_s = time.monotonic() + _TIMEOUT_S
        looks = 0
        while not request.Test():
            looks += 1
            if looks > _LOOKS:
                time.sleep(_SLEEP_S)
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"a sum over ranks did not end in {_TIMEOUT_S:g} s")
        return total
