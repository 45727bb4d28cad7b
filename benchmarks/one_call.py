"""Time of one call between two ranks of a host, beside a plain Isend and Irecv of the same bytes.

mpiexec -n 2 python benchmarks/one_call.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import xmesh


def timed_s(comm: MPI.Intracomm, call: Callable[[], Any], repeats: int) -> float:
    """Median over the repeats of the time between two barriers, on rank 0."""
    times_s = []
    for _ in range(repeats + 1):
        comm.Barrier()
        began_s = time.perf_counter()
        call()
        comm.Barrier()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s[1:])  # the first call sets up connections


def measure(comm: MPI.Intracomm, nbytes: int, strided: bool, repeats: int) -> tuple[float, float]:
    """Seconds of the plain pair, which packs a strided array as a whole first, and of a call."""
    shape = (-(-nbytes // 1024), min(nbytes, 1024))
    whole = np.ones((shape[0], 2 * shape[1]), np.uint8)
    local = whole[:, : shape[1]] if strided else np.ones(shape, np.uint8)
    out = np.zeros(shape, np.uint8)
    src = xmesh.Layout(xmesh.DeviceMesh([0]), "RR", shape)
    dst = xmesh.Layout(xmesh.DeviceMesh([1]), "RR", shape)
    plan = xmesh.plan(src, dst, "uint8", xmesh.Topology.uniform(comm.size, comm.size))

    def plain() -> None:
        if comm.rank == 0:
            comm.Isend([np.ascontiguousarray(local), MPI.BYTE], 1).Wait()
        elif comm.rank == 1:
            comm.Irecv([out, MPI.BYTE], 0).Wait()

    with xmesh.Resharder(plan, comm) as reshard:
        arguments = {0: (local, None), 1: (None, out)}.get(comm.rank, (None, None))
        return timed_s(comm, plain, repeats), timed_s(comm, lambda: reshard(*arguments), repeats)


def main() -> int:
    """Print a table."""
    comm = MPI.COMM_WORLD
    if comm.size != 2:
        print("start it on two ranks: mpiexec -n 2 python benchmarks/one_call.py")
        return 2
    if comm.rank == 0:
        print(f"{'bytes':>10} {'source':<10} {'plain, us':>12} {'xmesh, us':>12} {'ratio':>6}")
    for nbytes in (2**10, 2**16, 2**20, 2**26):
        for strided in (False, True):
            plain_s, call_s = measure(comm, nbytes, strided, 10 if nbytes > 2**20 else 200)
            if comm.rank == 0:
                kind = "strided" if strided else "contiguous"
                figures = f"{plain_s * 1e6:12.1f} {call_s * 1e6:12.1f} {call_s / plain_s:6.2f}"
                print(f"{nbytes:>10} {kind:<10} {figures}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
