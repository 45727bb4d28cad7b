"""How much of a transfer is hidden under a callback: one edge, forward and back, between two hosts.

sudo launch/emulate run --hosts 2 --rate 200mbit --ranks-per-host 2 -- python benchmarks/overlap.py

The overlap is 100 * (t_transfer + t_compute - t_both) / min(t_transfer, t_compute) per cent.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from xmesh import DeviceMesh, World
from xmesh.bench.waiting import quiet_barrier
from xmesh.pipeline import Backward, Driver, Edge, Forward, Pipeline, PipelineSchedule

SHAPE = (2, 2**20)  # 2 MiB, each half to both ranks of the other host
REPEATS = 7
#: Two micro-batches: the second one's transfer can go on while the first one is computed.
SCHEDULE = "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"


class Callbacks:
    """Stage 1 computes for a while; the rest takes no time."""

    def __init__(self, compute_s: float, busy: bool) -> None:
        self.compute_s, self.busy = compute_s, busy
        self.array = np.zeros((1, SHAPE[1]), np.uint8)

    def forward(self, stage: int, microbatch: int, inputs: dict[str, Any], data: Any) -> Forward:
        """F."""
        if stage == 1 and microbatch == 0:
            end_s = time.perf_counter() + self.compute_s
            if not self.busy:
                time.sleep(self.compute_s)
            while time.perf_counter() < end_s:
                pass  # holds the interpreter, as a loop in Python does
        return Forward({"hidden": self.array} if stage == 0 else {})

    def backward(
        self, stage: int, microbatch: int, gradients: dict[str, Any], saved: Any
    ) -> Backward:
        """B."""
        return Backward({"hidden": self.array} if stage else {})


def step_s(world: World, compute_s: float, moving: bool, busy: bool, progress: str) -> float:
    """Median seconds until stage 1 has computed and all has arrived."""
    shape = SHAPE if moving else (2, 1)
    edge = Edge("hidden", 0, 1, src="S0 R", dst="S0 R", shape=shape, dtype="uint8")
    # Each stage is one host, its two ranks cut the array in halves.
    meshes = [DeviceMesh([0, 1]), DeviceMesh([2, 3])]
    pipe = Pipeline(meshes, [edge], PipelineSchedule.parse(SCHEDULE))
    callbacks = Callbacks(compute_s, busy)
    callbacks.array = callbacks.array[:, : shape[1]]
    times_s: list[float] = []
    with Driver(pipe, world, callbacks, progress=progress) as driver:
        for _ in range(REPEATS + 1):
            quiet_barrier(world.comm)
            began_s = time.perf_counter()
            driver.step()
            times_s.append(world.comm.allreduce(time.perf_counter() - began_s, op=MPI.MAX))
    return statistics.median(times_s[1:])


def main() -> int:
    """Print a table."""
    comm = MPI.COMM_WORLD
    if comm.size != 4:
        print(__doc__)
        return 2
    with World(comm) as world:
        if comm.rank == 0:
            print(f"2 x {SHAPE[0] * SHAPE[1] / 2**20:g} MiB each way; ms, medians of {REPEATS}")
            print(f"{'callback':<18}{'progress':<10}{'transfer':>10}{'compute':>9}{'both':>8}")
        for busy in (False, True):
            for progress in ("poll", "thread"):
                moved_s = step_s(world, 0.0, True, busy, progress)
                # What can be hidden under this callback is the second micro-batch, a quarter.
                compute_s = 0.4 * moved_s
                computed_s = step_s(world, compute_s, False, busy, progress)
                both_s = step_s(world, compute_s, True, busy, progress)
                hidden_s = moved_s / 4
                overlap = (moved_s + computed_s - both_s) / hidden_s
                if comm.rank == 0:
                    print(
                        f"{'keeps the core' if busy else 'leaves the core':<18}{progress:<10}"
                        f"{moved_s * 1e3:>10.1f}{computed_s * 1e3:>9.1f}{both_s * 1e3:>8.1f}"
                        f"   overlap {100 * overlap:.0f} % of {hidden_s * 1e3:.1f} ms",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
