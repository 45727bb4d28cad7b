"""Time of planning: the nine n -> m cases of the paper, and one rank's view of a million tasks.

python benchmarks/planning_time.py [N]

N is the number of repeats (default 5); the table gives the median. The million-task plan is made
once, in an interpreter of its own, so that its peak memory is its own as well.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import Plan, plan
from xmesh.topology import Topology

ROOT = Path(__file__).resolve().parent.parent
RANKS_PER_HOST = 4


class Case(NamedTuple):
    """A resharding of the paper's n -> m experiment (arXiv 2211.05322, microbenchmarks)."""

    src_spec: str
    dst_spec: str
    src_mesh: tuple[int, int]
    dst_mesh: tuple[int, int]
    shape: tuple[int, ...]

    def plan(self, scheduler: str = "auto") -> Plan:
        """The plan for float32, hosts of 4 ranks and broadcast."""
        size = self.src_mesh[0] * self.src_mesh[1]
        src = Layout(DeviceMesh.arange(self.src_mesh), self.src_spec, self.shape)
        dst = Layout(DeviceMesh.arange(self.dst_mesh, start=size), self.dst_spec, self.shape)
        total = size + self.dst_mesh[0] * self.dst_mesh[1]
        return plan(
            src,
            dst,
            "float32",
            Topology.uniform(total, RANKS_PER_HOST),
            strategy="broadcast",
            scheduler=scheduler,
        )


_SHAPE = (1024, 1024, 512)
CASES = {
    1: Case("S0RR", "S0RR", (2, 4), (2, 4), _SHAPE),
    2: Case("RRR", "S0RR", (2, 4), (2, 4), _SHAPE),
    3: Case("RS0R", "S0RR", (2, 4), (2, 4), _SHAPE),
    4: Case("RS01R", "S01RR", (2, 4), (2, 4), _SHAPE),
    5: Case("S1RR", "S0RR", (2, 4), (2, 4), _SHAPE),
    6: Case("S0RR", "S0RR", (2, 4), (3, 4), (3072, 1024, 170)),
    7: Case("S1RR", "RRR", (1, 4), (2, 4), _SHAPE),
    8: Case("S1RR", "S0RR", (1, 4), (2, 4), _SHAPE),
    9: Case("RS0R", "RRS0", (2, 4), (2, 4), _SHAPE),
}


def planning_time_s(case: Case, repeats: int) -> float:
    """Median seconds of one planning, everything from the layouts on."""
    times_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        case.plan()
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s)


def million_tasks() -> None:
    """Print what one sender and one receiver of 1024 -> 1024 ranks need for their operations."""
    before = _peak_MiB()
    start = time.perf_counter()
    shape = (4096, 4096)
    src = Layout(DeviceMesh.arange((32, 32)), "S01 R", shape)
    dst = Layout(DeviceMesh.arange((32, 32), start=1024), "R S01", shape)
    made = plan(src, dst, "float32", Topology.uniform(2048, 8))
    ops = {rank: made.ops(rank) for rank in (5, 1500)}
    seconds = time.perf_counter() - start
    counts = " and ".join(f"{len(mine)} (rank {rank})" for rank, mine in ops.items())
    print(f"S01 R@(32,32) -> R S01@(32,32), 1,048,576 tasks: {seconds:.2f} s for the plan and")
    print(f"the operations of one sender and one receiver, {counts};")
    print(f"peak memory {_peak_MiB():.0f} MiB, of which {before:.0f} MiB before planning")


def _peak_MiB() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    """Print the table, then the million tasks."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"median of {repeats}, strategy broadcast, scheduler auto")
    print(f"{'case':>4}  {'from':<12} {'to':<12} {'tasks':>5} {'plan, ms':>9}")
    for number, case in CASES.items():
        made = case.plan()  # not timed: the first one also reads the code
        seconds = planning_time_s(case, repeats)
        print(
            f"{number:>4}  {made.src.describe():<12} {made.dst.describe():<12} "
            f"{len(made.unit_tasks):>5} {seconds * 1e3:>9.2f}"
        )
    # The module is run by path, so that nothing needs to be installed but its dependencies.
    code = f"import runpy; runpy.run_path({str(__file__)!r})['million_tasks']()"
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
