"""A call between two ranks on one GPU, beside what its parts take; benchmarks/gpu.py starts it.

    mpiexec -n 2 python benchmarks/gpu_end_to_end.py [--quick]

Prints one line of JSON. The link is the slower of the plain copies from the GPU to pinned memory,
on rank 0, and from there to the GPU, on rank 1.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import xmesh
from xmesh.device.gpu import Gpu


def median_s(comm: MPI.Intracomm, work: Callable[[], Any], repeats: int) -> float:
    """Median of the time between two barriers, on rank 0."""
    times = []
    for _ in range(repeats + 1):
        comm.Barrier()
        began_s = time.perf_counter()
        work()
        comm.Barrier()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])  # the first call makes memory and connections


def row_of(comm: MPI.Intracomm, gpu: Gpu, nbytes: int, strided: bool, repeats: int) -> Any:
    """Times of one size."""
    cupy = gpu.cupy
    shape = (nbytes // 512, 512)
    src = xmesh.Layout(xmesh.DeviceMesh([0]), "R R", shape)
    dst = xmesh.Layout(xmesh.DeviceMesh([1]), "R R", shape)
    plan = xmesh.plan(src, dst, "uint8", xmesh.Topology.uniform(2, 2))
    whole = cupy.ones((shape[0], 1024 if strided else 512), np.uint8)
    array = whole[:, :512]
    local, out = (array, None) if comm.rank == 0 else (None, array)
    pinned = gpu.pinned_bytes(nbytes)
    device = gpu.device_bytes(nbytes)
    runtime = cupy.cuda.runtime
    ends = [device.pointer, int(pinned.ctypes.data)]
    target, source = ends[::-1] if comm.rank == 0 else ends

    def link() -> None:
        with gpu.here():
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, gpu.outgoing.ptr)
            gpu.outgoing.synchronize()

    def over_mpi() -> None:
        data = [pinned, MPI.BYTE]
        (comm.Isend(data, 1) if comm.rank == 0 else comm.Irecv(data, 0)).Wait()

    with xmesh.Resharder(plan, comm, transport="mpi", like=cupy) as reshard:
        return {
            "source": "rows of 512 B" if strided else "contiguous",
            "nbytes": nbytes,
            "call_s": median_s(comm, lambda: reshard(local, out), repeats),
            "link_s": median_s(comm, link, repeats),
            "mpi_s": median_s(comm, over_mpi, repeats),
        }


def main() -> int:
    """Measure; rank 0 prints."""
    comm = MPI.COMM_WORLD
    if comm.size != 2:
        print("start it on two ranks: mpiexec -n 2 python benchmarks/gpu_end_to_end.py")
        return 2
    quick = "--quick" in sys.argv[1:]
    gpu = Gpu()
    sizes = (2**12, 2**16) if quick else (2**16, 2**20, 2**24, 2**28)
    rows = [
        row_of(comm, gpu, nbytes, strided, 1 if quick else 11)
        for nbytes in sizes
        for strided in (False, True)
    ]
    if comm.rank == 0:
        print(json.dumps({"rows": rows}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
