"""The harness itself: any number of ranks, one collective, guard elements around the result."""

from __future__ import annotations

import numpy as np

GUARD = -7


def test_allreduce_leaves_its_surroundings_alone(comm):
    padded = np.full(2 + 5 + 2, GUARD, dtype=np.int64)
    comm.Allreduce(np.full(5, comm.rank + 1, dtype=np.int64), padded[2:-2])
    assert padded[2:-2].tolist() == [comm.size * (comm.size + 1) // 2] * 5
    assert padded[:2].tolist() == padded[-2:].tolist() == [GUARD, GUARD]
