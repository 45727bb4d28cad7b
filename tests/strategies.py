"""Hypothesis strategies for meshes, specs and layouts, for tests of what is built on them, too.

Ranks lie below ``RANK_BOUND`` and are permuted, with gaps. Arrays are small enough to be looked at
element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise, product

from hypothesis import strategies as st

from xmesh.box import Box
from xmesh.layout import UNEVEN_RULES, Layout
from xmesh.mesh import DeviceMesh
from xmesh.spec import ShardingSpec

RANK_BOUND = 16
AXIS_NAMES = ("dp", "tp", "pp", "ep", "cp", "sp")


@st.composite
def shapes(draw: st.DrawFn, max_ndim: int = 5, max_extent: int = 7) -> tuple[int, ...]:
    """Array shapes of 0 to ``max_ndim`` dimensions; an extent of 0 in some of them only."""
    # A list by itself would be short in most draws; these take every number of dimensions alike.
    ndim = draw(st.integers(0, max_ndim))
    smallest = draw(st.sampled_from((1, 0, 1)))
    return tuple(draw(st.integers(smallest, max_extent)) for _ in range(ndim))


@st.composite
def meshes(
    draw: st.DrawFn,
    max_axes: int = 4,
    max_ranks: int = RANK_BOUND,
    ranks: Sequence[int] = range(RANK_BOUND),
    named: bool | None = None,
) -> DeviceMesh:
    """A mesh of some of ``ranks``, in any order; ``named``: with axis names, without, or either."""
    left = min(max_ranks, len(ranks))
    shape: list[int] = []
    num_axes = draw(st.integers(1, max_axes))
    for _ in range(num_axes):
        # Of several axes none may eat up all ranks, or hardly a mesh would be more than a row.
        shape.append(draw(st.integers(1, left if num_axes == 1 else min(left, 4))))
        left //= shape[-1]
    order = draw(st.permutations(ranks))
    nested: list[object] = list(order)
    for extent in reversed(shape):
        nested = [nested[i : i + extent] for i in range(0, len(nested) - extent + 1, extent)]
    first = nested[0]
    assert isinstance(first, list)
    names = draw(st.booleans()) if named is None else named
    return DeviceMesh(first, AXIS_NAMES[: len(shape)] if names else None)


@st.composite
def specs(draw: st.DrawFn, mesh: DeviceMesh, ndim: int) -> ShardingSpec:
    """A spec that fits ``mesh``: axes in any order over any dimensions, or left to replicate."""
    axes: list[list[int]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(range(mesh.ndim))):
        dimension = draw(st.integers(-1, ndim - 1))
        if dimension >= 0:
            axes[dimension].append(axis)
    return ShardingSpec(tuple(map(tuple, axes)))


@st.composite
def layouts(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    mesh: DeviceMesh | None = None,
    max_ranks: int = RANK_BOUND,
    ranks: Sequence[int] = range(RANK_BOUND),
) -> Layout:
    """A layout of ``shape`` by a spec, on ``mesh`` or on a mesh of some of ``ranks``."""
    if mesh is None:
        mesh = draw(meshes(max_ranks=max_ranks, ranks=ranks))
    spec = draw(specs(mesh, len(shape)))
    return Layout(mesh, spec, shape, draw(st.sampled_from(UNEVEN_RULES)))


@st.composite
def explicit_layouts(
    draw: st.DrawFn, shape: tuple[int, ...], ranks: Sequence[int] = range(RANK_BOUND)
) -> Layout:
    """Explicit boxes that cover ``shape``: cells of a random grid, each held by one to three ranks.

    A rank may hold several cells (cyclic layouts are among these) or none. Some ranks have a halo
    around their cells, so that boxes of different ranks overlap.
    """
    cuts = []
    for extent in shape:
        inner = draw(st.lists(st.integers(0, extent), max_size=2))
        cuts.append(list(pairwise(sorted({0, *inner, extent}))) or [(0, 0)])
    members = draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=6, unique=True))
    boxes: dict[int, list[Box]] = {rank: [] for rank in members}
    for cell in product(*cuts):
        box = Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))
        for rank in draw(st.sets(st.sampled_from(members), min_size=1, max_size=3)):
            boxes[rank].append(box)
    for rank in draw(st.sets(st.sampled_from(members))):
        grown = [_grown(box, shape, draw(st.integers(0, 2))) for box in boxes[rank]]
        if not any(a.intersect(b) for a, b in combinations(grown, 2)):
            boxes[rank] = grown
    return Layout.from_boxes(boxes, shape)


def _grown(box: Box, shape: tuple[int, ...], width: int) -> Box:
    """The box with a halo, within the array."""
    return Box(
        tuple(max(0, a - width) for a in box.start),
        tuple(min(n, b + width) for b, n in zip(box.stop, shape, strict=True)),
    )


@st.composite
def layout_pairs(
    draw: st.DrawFn, max_ndim: int = 5, max_extent: int = 7, explicit: bool = False
) -> tuple[Layout, Layout]:
    """(source, destination) layouts of one shape.

    Their ranks are disjoint, overlap in some, or the meshes are identical; rules for uneven
    extents are mixed. With ``explicit``, either may be given by explicit boxes.
    """
    shape = draw(shapes(max_ndim, max_extent))
    relation = draw(st.sampled_from(("disjoint", "any", "identical")))
    first: Sequence[int] = range(RANK_BOUND)
    second: Sequence[int] = first
    if relation == "disjoint":
        order = draw(st.permutations(first))
        middle = draw(st.integers(1, RANK_BOUND - 1))
        first, second = order[:middle], order[middle:]
    elif explicit and draw(st.booleans()):
        return draw(explicit_layouts(shape)), draw(explicit_layouts(shape))
    source = draw(layouts(shape, ranks=first))
    if explicit and draw(st.booleans()):
        return source, draw(explicit_layouts(shape, ranks=second))
    mesh = source.mesh if relation == "identical" else None
    return source, draw(layouts(shape, mesh=mesh, ranks=second))
