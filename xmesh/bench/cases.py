"""The cases of the experiments, as data: the paper's nine, more n -> m, and 1 -> m.

The paper's nine are those of its n -> m microbenchmark (REFERENCES, section 1). All cases are made
for hosts of ``RANKS_PER_HOST`` consecutive ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.spec import ShardingSpec

#: Ranks of a host in the paper's cluster.
RANKS_PER_HOST = 4
#: Bytes of an element in the paper.
ITEMSIZE = 4


@dataclass(frozen=True)
class Case:
    """One resharding from a mesh to another.

    Attributes:
        number: as the paper counts, or a name.
        src_spec: how the source mesh holds the array.
        dst_spec: how the destination mesh needs it.
        src_mesh: extents of the source mesh.
        dst_mesh: extents of the destination mesh.
        shape: extents of the largest array: 2 GiB of 4-byte elements in the paper.
        ratio: the proportions of ``shape``, which ``scaled_shape`` keeps; an extent for which it
            is 0 is never scaled.
        src_ranks: ranks of the source mesh, row-major; default those from 0.
        dst_ranks: ranks of the destination mesh; default those after the source's.
    """

    number: int | str
    src_spec: str
    dst_spec: str
    src_mesh: tuple[int, ...] = (2, 4)
    dst_mesh: tuple[int, ...] = (2, 4)
    shape: tuple[int, ...] = (1024, 1024, 512)
    ratio: tuple[int, ...] = (2, 2, 1)
    src_ranks: tuple[int, ...] | None = None
    dst_ranks: tuple[int, ...] | None = None

    @property
    def meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """Source and destination mesh."""
        src = _mesh(self.src_mesh, self.src_ranks, 0)
        return src, _mesh(self.dst_mesh, self.dst_ranks, max(src.ranks) + 1)

    @property
    def num_ranks(self) -> int:
        """Ranks that there must be: one more than the largest of both meshes."""
        return 1 + max(rank for mesh in self.meshes for rank in mesh.ranks)

    @property
    def parts(self) -> tuple[int, ...]:
        """Per dimension, a number of equal parts that both layouts agree with."""
        counts = zip(
            _parts(self.src_spec, self.src_mesh), _parts(self.dst_spec, self.dst_mesh), strict=True
        )
        return tuple(math.lcm(src, dst) for src, dst in counts)

    def layouts(self, shape: tuple[int, ...] | None = None) -> tuple[Layout, Layout]:
        """Source and destination layout, of the largest array or one of another shape."""
        extents = self.shape if shape is None else shape
        src, dst = self.meshes
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

#: Cases of kinds that the paper's table does not have. Their names are for ``--case``.
MORE_CASES = (
    Case("both-axes", "S0S1R", "S1S0R"),
    Case("both-axes-at-once", "S01RR", "RS0S1"),
    Case("3-to-2-hosts", "RS0R", "S0RR", (3, 4), (2, 4), (896, 1344, 448), (2, 3, 1)),
    Case("1-to-4-hosts", "S1RR", "S0RR", (1, 4), (4, 4)),
    Case("1-to-4-hosts-whole", "S1RR", "RRR", (1, 4), (4, 4)),
    # Neighbours in a mesh are on different hosts, and each row is on both.
    Case(
        "interleaved",
        "S0RR",
        "S1RR",
        src_ranks=(0, 4, 1, 5, 2, 6, 3, 7),
        dst_ranks=(8, 12, 9, 13, 10, 14, 11, 15),
    ),
    Case(
        "one-rank-per-host",
        "S0RR",
        "RS0R",
        (2,),
        (3,),
        (896, 1344, 448),
        (2, 3, 1),
        src_ranks=(0, 4),
        dst_ranks=(8, 12, 16),
    ),
    # 7 over 4 ranks is 2, 2, 2, 1, and over 3 ranks 3, 3, 1; a host has a rank too many for a row.
    Case(
        "uneven",
        "RS0S1",
        "S0RS1",
        (2, 4),
        (2, 3),
        (8755, 8755, 7),
        (1, 1, 0),
        dst_ranks=(8, 9, 10, 12, 13, 14),
    ),
)

#: Hosts and ranks of each that receive, in the paper's 1 -> m microbenchmark.
RECEIVERS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2))


def multicast_case(hosts: Sequence[Sequence[int]], num_hosts: int, ranks_per_host: int) -> Case:
    """1 -> m: the first rank of the first host sends all of an array to ranks of other hosts.

    The largest array is the paper's, 1 GiB.

    Args:
        hosts: the ranks of each host, of which the first one is the sender's.
        num_hosts: hosts that receive, the ones after the sender's.
        ranks_per_host: ranks that receive on each, the first ones.
    """
    receivers = tuple(rank for ranks in hosts[1 : 1 + num_hosts] for rank in ranks[:ranks_per_host])
    return Case(
        f"1 to {num_hosts}x{ranks_per_host}",
        "R",
        "R",
        src_mesh=(1,),
        dst_mesh=(num_hosts, ranks_per_host),
        shape=(2**28,),
        ratio=(1,),
        src_ranks=(hosts[0][0],),
        dst_ranks=receivers,
    )


def scaled_shape(case: Case, nbytes: int) -> tuple[int, ...]:
    """The largest shape of at most ``nbytes`` that has the proportions of the case's own.

    Extents that the layouts divide evenly there are divided evenly here too. The paper's cases of
    the same proportions get the same shape. The least shape is (8, 8, 4), or (18, 6, 1) in case 6;
    the paper's own is the largest.

    Args:
        case: which case.
        nbytes: bytes of the whole array, held once.
    """
    if nbytes >= math.prod(case.shape) * ITEMSIZE:
        return case.shape
    step = math.lcm(*(_step(each) for each in (case, *CASES) if each.ratio == case.ratio))
    fixed = math.prod(
        extent for extent, ratio in zip(case.shape, case.ratio, strict=True) if not ratio
    )
    ratios = [ratio for ratio in case.ratio if ratio]

    def nbytes_at(scale: int) -> int:
        return math.prod(ratio * scale for ratio in ratios) * fixed * ITEMSIZE

    # One look instead of a walk; the float may be off by one.
    room = nbytes / max(1, nbytes_at(1))
    scale = max(1, int(room ** (1 / len(ratios)) / step)) * step
    while nbytes_at(scale + step) <= nbytes:
        scale += step
    while scale > step and nbytes_at(scale) > nbytes:
        scale -= step
    return tuple(
        ratio * scale or extent for extent, ratio in zip(case.shape, case.ratio, strict=True)
    )


def _step(case: Case) -> int:
    """The least multiple of a case's proportions that is cut as evenly as its shape is."""
    return math.lcm(
        *(
            parts // math.gcd(parts, ratio)
            for extent, parts, ratio in zip(case.shape, case.parts, case.ratio, strict=True)
            if ratio and extent % parts == 0
        )
    )


def _mesh(extents: tuple[int, ...], ranks: tuple[int, ...] | None, start: int) -> DeviceMesh:
    if ranks is None:
        return DeviceMesh.arange(extents, start=start)
    return DeviceMesh(np.reshape(ranks, extents))


def _parts(spec: str, mesh: tuple[int, ...]) -> list[int]:
    cuts = ShardingSpec.parse(spec).resolve(DeviceMesh.arange(mesh)).axes
    return [math.prod(mesh[int(axis)] for axis in axes) for axes in cuts]
