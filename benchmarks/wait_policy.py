"""Time of calls under several ways to wait, on more ranks than there are cores.

mpiexec -n 20 python benchmarks/wait_policy.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from mpi4py import MPI

import xmesh
from xmesh.bench.cases import CASES, scaled_shape
from xmesh.wait_policy import Pause, sleep, spin

REPEATS = 7


def only_yield(idle: int) -> None:
    """Give the core away, never sleep."""
    os.sched_yield()


def sleeping(seconds: float, after: int = 0) -> Pause:
    """Sleep after so many looks, yield before."""

    def pause(idle: int) -> None:
        if idle > after:
            time.sleep(seconds)
        else:
            os.sched_yield()

    return pause


def growing(first_s: float, last_s: float) -> Pause:
    """Sleep longer the longer nothing comes."""

    def pause(idle: int) -> None:
        time.sleep(min(last_s, first_s * idle))

    return pause


POLICIES: dict[str, Pause] = {
    "auto (sleep 20 to 500 us)": sleep,
    "spin": spin,
    "sched_yield alone": only_yield,
    "100 yields, 50 us": sleeping(50e-6, 100),
    "10 yields, 200 us": sleeping(200e-6, 10),
    "sleep 50 us": sleeping(50e-6),
    "sleep 100 us": sleeping(100e-6),
    "sleep 200 us": sleeping(200e-6),
    "sleep 500 us": sleeping(500e-6),
    "sleep 50 to 200 us": growing(50e-6, 200e-6),
}


def quiet_barrier(comm: MPI.Intracomm) -> None:
    """A barrier in which nobody spins."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(50e-6)


def timed_s(comm: MPI.Intracomm, call: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    quiet_barrier(comm)
    began_s = time.perf_counter()
    call()
    elapsed_s = time.perf_counter() - began_s
    quiet_barrier(comm)
    slowest_s: float = comm.allreduce(elapsed_s, MPI.MAX)
    return slowest_s


def main() -> int:
    """Print a table: milliseconds of each policy, and over the best."""
    comm = MPI.COMM_WORLD
    cases = [case for case in CASES if case.number in (4, 6, 7)]
    if comm.size < max(case.num_ranks for case in cases):
        if comm.rank == 0:
            print("start it on 20 ranks: mpiexec -n 20 python benchmarks/wait_policy.py")
        return 2
    rows: dict[str, list[float]] = {name: [] for name in POLICIES}
    titles = []
    for case in cases:
        for nbytes in (2**16, 2**24):
            src, dst = case.layouts(scaled_shape(case, nbytes))
            plan = xmesh.plan(src, dst, "float32", xmesh.Topology.uniform(comm.size, comm.size))
            local = np.ones(src.local_shape(comm.rank), "f4") if comm.rank in src.ranks else None
            out = np.empty(dst.local_shape(comm.rank), "f4") if comm.rank in dst.ranks else None
            titles.append(f"case {case.number}, {nbytes >> 10} KiB")
            with xmesh.Resharder(plan, comm) as reshard:
                reshard(local, out)
                times_s: dict[str, list[float]] = {name: [] for name in POLICIES}
                for _ in range(REPEATS):  # in turns, so that a noisy moment hits them all
                    for name, pause in POLICIES.items():
                        reshard.pause = pause
                        times_s[name].append(timed_s(comm, partial(reshard, local, out)))
            for name, seconds in times_s.items():
                rows[name].append(statistics.median(seconds))
    if comm.rank == 0:
        best = [min(row[i] for row in rows.values()) for i in range(len(titles))]
        print(f"{comm.size} ranks, {os.cpu_count()} cores; ms, and over the best of the column")
        print(f"{'':<26}" + "".join(f"{title:>20}" for title in titles) + f"{'mean ratio':>12}")
        for name, row in rows.items():
            ratios = [seconds / least for seconds, least in zip(row, best, strict=True)]
            cells = (f"{s * 1e3:12.2f} ({r:5.2f})" for s, r in zip(row, ratios, strict=True))
            print(f"{name:<26}" + "".join(cells) + f"{statistics.geometric_mean(ratios):12.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
