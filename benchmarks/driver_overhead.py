"""What the pipeline driver itself costs: empty callbacks on two stages of one rank each.

mpiexec -n 2 python benchmarks/driver_overhead.py
"""

from __future__ import annotations

import resource
import statistics
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from xmesh import DeviceMesh, World
from xmesh.pipeline import Backward, BackwardInput, Driver, Edge, Forward, Pipeline

MICROBATCHES, STEPS = 32, 1000
ARRAY = np.zeros((16, 16), np.float32)


class Empty:
    """Callbacks that do nothing."""

    def forward(self, stage: int, microbatch: int, inputs: dict[str, Any], data: Any) -> Forward:
        """F."""
        return Forward({"hidden": ARRAY} if stage == 0 else {})

    def backward(
        self, stage: int, microbatch: int, gradients: dict[str, Any], saved: Any
    ) -> Backward:
        """B."""
        return Backward({"hidden": ARRAY} if stage else {})

    def backward_input(
        self, stage: int, microbatch: int, gradients: dict[str, Any], saved: Any
    ) -> BackwardInput:
        """I."""
        return BackwardInput({"hidden": ARRAY} if stage else {})

    def backward_weight(self, stage: int, microbatch: int, saved: Any) -> dict[str, Any]:
        """W."""
        return {}


def main() -> int:
    """Print a table."""
    comm = MPI.COMM_WORLD
    if comm.size != 2:
        print("start it on two ranks: mpiexec -n 2 python benchmarks/driver_overhead.py")
        return 2
    edges = [Edge("hidden", 0, 1, src="R R", dst="R R", shape=ARRAY.shape)]
    meshes = [DeviceMesh([0]), DeviceMesh([1])]
    if comm.rank == 0:
        print(f"{MICROBATCHES} micro-batches, {STEPS} steps")
        print(
            f"{'schedule':<16}{'progress':<10}{'us / action':>12}{'first 100, ms':>15}"
            f"{'last 100, ms':>14}{'memory grown, MiB':>19}"
        )
    for name in ("1f1b", "eager-1f1b", "zb-h1"):
        for progress in ("poll", "thread"):
            pipe = Pipeline(meshes, edges, name, MICROBATCHES)
            actions = max(map(len, pipe.program))
            with World(comm) as world, Driver(pipe, world, Empty(), progress=progress) as driver:
                times_s = []
                before = 0
                for step in range(STEPS):
                    began_s = time.perf_counter()
                    driver.step()
                    times_s.append(time.perf_counter() - began_s)
                    if step == 100:
                        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            if comm.rank == 0:
                median_s = statistics.median(times_s)
                first_s, last_s = (statistics.median(t) for t in (times_s[:100], times_s[-100:]))
                print(
                    f"{name:<16}{progress:<10}{median_s / actions * 1e6:>12.1f}"
                    f"{first_s * 1e3:>15.2f}{last_s * 1e3:>14.2f}{grown / 1024:>19.1f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
