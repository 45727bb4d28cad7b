"""The nine n -> m cases of the paper's microbenchmark, as data (REFERENCES, section 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.spec import ShardingSpec

#: Bytes of an element in the paper.
ITEMSIZE = 4


@dataclass(frozen=True)
class Case:
    """One resharding from a mesh to another one next to it; a row of a mesh is a host.

    Attributes:
        number: as the paper counts.
        src_spec: how the source mesh holds the array.
        dst_spec: how the destination mesh needs it.
        src_mesh: extents of the source mesh, which begins at rank 0.
        dst_mesh: extents of the destination mesh, which begins after the source's last rank.
        shape: extents of the array in the paper, 2 GiB of 4-byte elements.
        ratio: the proportions of ``shape``, which ``scaled_shape`` keeps.
    """

    number: int
    src_spec: str
    dst_spec: str
    src_mesh: tuple[int, int] = (2, 4)
    dst_mesh: tuple[int, int] = (2, 4)
    shape: tuple[int, int, int] = (1024, 1024, 512)
    ratio: tuple[int, int, int] = (2, 2, 1)

    @property
    def num_ranks(self) -> int:
        """Ranks of both meshes."""
        return math.prod(self.src_mesh) + math.prod(self.dst_mesh)

    @property
    def parts(self) -> tuple[int, ...]:
        """Per dimension, a number of equal parts that both layouts agree with."""
        counts = zip(
            _parts(self.src_spec, self.src_mesh), _parts(self.dst_spec, self.dst_mesh), strict=True
        )
        return tuple(math.lcm(src, dst) for src, dst in counts)

    def layouts(self, shape: tuple[int, ...] | None = None) -> tuple[Layout, Layout]:
        """Source and destination layout, of the paper's array or one of another shape."""
        extents = self.shape if shape is None else shape
        src = DeviceMesh.arange(self.src_mesh)
        dst = DeviceMesh.arange(self.dst_mesh, start=src.size)
        return Layout(src, self.src_spec, extents), Layout(dst, self.dst_spec, extents)


CASES = (
    Case(1, "S0RR", "S0RR"),
    Case(2, "RRR", "S0RR"),
    Case(3, "RS0R", "S0RR"),
    Case(4, "RS01R", "S01RR"),
    Case(5, "S1RR", "S0RR"),
    # 512 / 3 is no whole number, so the paper's 170 is 512 * 1024 / 3072 rounded down.
    Case(6, "S0RR", "S0RR", dst_mesh=(3, 4), shape=(3072, 1024, 170), ratio=(18, 6, 1)),
    Case(7, "S1RR", "RRR", src_mesh=(1, 4)),
    Case(8, "S1RR", "S0RR", src_mesh=(1, 4)),
    Case(9, "RS0R", "RRS0"),
)


def scaled_shape(case: Case, nbytes: int) -> tuple[int, ...]:
    """The largest shape of at most ``nbytes`` that has the proportions of the paper's.

    Extents that the layouts divide evenly in the paper are divided evenly here too. Cases of
    the same proportions get the same shape. The least shape is (8, 8, 4), or (18, 6, 1) in case 6;
    the paper's own is the largest.

    Args:
        case: which case.
        nbytes: bytes of the whole array, held once.
    """
    if nbytes >= math.prod(case.shape) * ITEMSIZE:
        return case.shape
    step = math.lcm(*(_step(each) for each in CASES if each.ratio == case.ratio))
    scale = step
    while math.prod(case.ratio) * (scale + step) ** len(case.ratio) * ITEMSIZE <= nbytes:
        scale += step
    return tuple(ratio * scale for ratio in case.ratio)


def _step(case: Case) -> int:
    """The least multiple of a case's proportions that is cut as evenly as its shape is."""
    return math.lcm(
        *(
            parts // math.gcd(parts, ratio)
            for extent, parts, ratio in zip(case.shape, case.parts, case.ratio, strict=True)
            if extent % parts == 0
        )
    )


def _parts(spec: str, mesh: tuple[int, ...]) -> list[int]:
    cuts = ShardingSpec.parse(spec).resolve(DeviceMesh.arange(mesh)).axes
    return [math.prod(mesh[int(axis)] for axis in axes) for axes in cuts]
