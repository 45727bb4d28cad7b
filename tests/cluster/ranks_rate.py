"""Rank program: megabits per second, all together, of pairs (from, to) that send at one time.

    ranks_rate.py MEBIBYTES '[[[0, 1]], [[0, 1], [1, 0]]]'

Rank 0 prints the rate of each list of pairs: the best of three.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
nbytes = int(sys.argv[1]) << 20
sent = np.ones(nbytes, np.uint8)
received = [np.empty(nbytes, np.uint8) for _ in range(4)]
rates = []
for pairs in json.loads(sys.argv[2]):
    # Connections first: TCP's slow start and MPI's set-up are not what is measured.
    times = []
    for size in (1 << 20, nbytes, nbytes, nbytes):
        comm.Barrier()
        began = time.perf_counter()
        mine = [pair for pair in pairs if pair[1] == comm.rank]
        requests = [
            comm.Irecv([buffer, size, MPI.BYTE], source)
            for (source, _), buffer in zip(mine, received, strict=False)
        ]
        requests += [
            comm.Isend([sent, size, MPI.BYTE], target)
            for source, target in pairs
            if source == comm.rank
        ]
        MPI.Request.Waitall(requests)
        times.append(comm.allreduce(time.perf_counter() - began, MPI.MAX))
    rates.append(nbytes * 8 * len(pairs) / min(times[1:]) / 1e6)
if comm.rank == 0:
    print("RESULT " + json.dumps(rates), flush=True)
