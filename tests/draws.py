"""Random layouts, plans and arguments from a seeded generator: the same on every MPI rank.

Hypothesis draws for one process; ranks that must draw alike use these.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

import xmesh
from xmesh import Box, DeviceMesh, Layout, Plan, ShardingSpec, Topology
from xmesh.layout import UNEVEN_RULES
from xmesh.planner import STRATEGIES
from xmesh.planner.schedulers import BY_NAME

Rng = np.random.Generator
SCHEDULERS = tuple(BY_NAME)
DTYPES = ("u1", "<i2", "<f4", "<f8", "<c16", "V3", [("a", "<f8"), ("b", "<i4")])


def choice(rng: Rng, values: Sequence[Any]) -> Any:
    """One of some values, as it is (NumPy would turn it into an array element)."""
    return values[int(rng.integers(len(values)))]


def mesh(rng: Rng, ranks: Sequence[int], max_axes: int = 3) -> DeviceMesh:
    """A mesh of some of the ranks, in any order."""
    left = len(ranks)
    shape = []
    for _ in range(int(rng.integers(1, max_axes + 1))):
        shape.append(int(rng.integers(1, left + 1)))
        left //= shape[-1]
    order = rng.permutation(np.asarray(ranks))[: int(np.prod(shape))]
    return DeviceMesh(order.reshape(shape))


def layout(rng: Rng, shape: Sequence[int], ranks: Sequence[int]) -> Layout:
    """A layout by a spec, on a mesh of some of the ranks."""
    grid = mesh(rng, ranks)
    axes: list[list[int]] = [[] for _ in shape]
    for axis in rng.permutation(grid.ndim):
        dimension = int(rng.integers(-1, len(shape)))
        if dimension >= 0:
            axes[dimension].append(int(axis))
    return Layout(grid, ShardingSpec(tuple(map(tuple, axes))), shape, choice(rng, UNEVEN_RULES))


def explicit(rng: Rng, shape: Sequence[int], ranks: Sequence[int]) -> Layout:
    """Explicit boxes: cells of a random grid, each held by one to three of the ranks."""
    cuts = []
    for extent in shape:
        inner = rng.integers(0, extent + 1, size=int(rng.integers(0, 3))).tolist()
        cuts.append(list(pairwise(sorted({0, *inner, extent}))) or [(0, 0)])
    boxes: dict[int, list[Box]] = {int(rank): [] for rank in ranks}
    for cell in product(*cuts):
        box = Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))
        some = rng.choice(np.asarray(ranks), size=min(len(ranks), int(rng.integers(1, 4))))
        for rank in sorted(set(some.tolist())):
            boxes[rank].append(box)
    return Layout.from_boxes(boxes, shape)


def pair(rng: Rng, num_ranks: int, max_extent: int = 6) -> tuple[Layout, Layout]:
    """Source and destination: disjoint ranks, overlapping ones, or the same; sometimes explicit."""
    shape = tuple(rng.integers(0, max_extent + 1, size=int(rng.integers(0, 5))).tolist())
    if 0 in shape and rng.random() < 0.7:
        shape = tuple(max(1, n) for n in shape)
    everyone = list(range(num_ranks))
    first, second = everyone, everyone
    if num_ranks > 1 and rng.random() < 0.4:
        order = rng.permutation(num_ranks).tolist()
        middle = int(rng.integers(1, num_ranks))
        first, second = order[:middle], order[middle:]
    make = [explicit if rng.random() < 0.2 else layout for _ in range(2)]
    return make[0](rng, shape, first), make[1](rng, shape, second)


def topology(rng: Rng, num_ranks: int) -> Topology:
    """Ranks on random hosts, not in blocks."""
    return Topology(rng.integers(0, max(1, num_ranks // 2) + 1, size=num_ranks).tolist())


def plan(
    rng: Rng,
    num_ranks: int,
    dtype: Any = None,
    strategy: str | None = None,
    scheduler: str | None = None,
    **options: Any,
) -> Plan:
    """A plan for a random pair; what is not given is drawn."""
    src, dst = pair(rng, num_ranks)
    dtype = np.dtype(choice(rng, DTYPES) if dtype is None else dtype)
    nbytes = int(np.prod(src.shape, dtype=np.int64)) * dtype.itemsize
    return xmesh.plan(
        src,
        dst,
        dtype,
        topology(rng, num_ranks),
        strategy=strategy or choice(rng, (*STRATEGIES, "auto")),
        scheduler=scheduler or choice(rng, SCHEDULERS),
        chunk_nbytes=choice(rng, (1 << 20, max(1, nbytes // 5), max(1, nbytes // 30))),
        **options,
    )


def together(comm: Any, problem: str) -> None:
    """Fail on all ranks, with every rank's words, when any rank has a problem."""
    problems = comm.allgather(problem)
    texts = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    assert not texts, "\n".join(texts[:4])
