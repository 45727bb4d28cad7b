"""ShardingSpec: which mesh axes cut which array dimension; parsed, printed, canonicalised.

The notation is the paper's ("Sharding spec"). `xmesh.notation` reads and prints it; here it gets
its meaning, and is translated from and to what JAX and DTensor write.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from xmesh.errors import MeshError, SpecError, explain
from xmesh.mesh import DeviceMesh
from xmesh.notation import Axis, caret, format_dimension, parse_dimensions

_PLACEMENT = re.compile(r"S\((-?[0-9]+)\)")


@dataclass(frozen=True)
class ShardingSpec:
    """How each dimension of an array is cut over the axes of a mesh (the paper, "Sharding spec").

    Args:
        axes: one entry per array dimension: ``()`` when the dimension is replicated, else the
            mesh axes that cut it, major first; an axis is an index >= 0 or a name. Mesh axes that
            no dimension names replicate the array.

    Raises:
        SpecError: an entry that is no tuple of axes, or an axis used twice.
    """

    axes: tuple[tuple[Axis, ...], ...]

    def __post_init__(self) -> None:
        try:
            axes = tuple(_checked_entry(entry) for entry in self.axes)
        except TypeError as error:
            raise SpecError(
                explain(
                    "a spec holds, for each array dimension, a tuple of mesh axes",
                    values=f"axes={self.axes!r}: {error}",
                    remedy='for example ((0, 1), ()) for "S01R"; '
                    "ShardingSpec.coerce also reads strings and JAX-style tuples",
                )
            ) from None
        object.__setattr__(self, "axes", axes)
        twice = _used_twice([(axis, d) for d, entry in enumerate(axes) for axis in entry])
        if twice is not None:
            raise SpecError(_twice_text(*twice, values=f"spec {self}"))

    @property
    def ndim(self) -> int:
        """Number of array dimensions."""
        return len(self.axes)

    def __str__(self) -> str:
        """The canonical text, which `parse` reads back."""
        return "".join(format_dimension(entry) for entry in self.axes)

    @classmethod
    def parse(cls, text: str) -> ShardingSpec:
        """Read a text such as ``"S01 R"``, ``"S^{01}R"``, ``"S{dp,tp} R"`` (`xmesh.notation`).

        Args:
            text: one ``R`` or ``S...`` per dimension; ``""`` is the spec of a 0-d array.

        Raises:
            SpecError: the text cannot be read; the error has a caret under the place.
        """
        if not isinstance(text, str):
            raise SpecError(
                explain(
                    "only a string can be parsed as a spec",
                    values=f"{text!r} of type {type(text).__name__}",
                    remedy="ShardingSpec.coerce also takes specs and JAX-style tuples",
                )
            )
        dimensions = list(parse_dimensions(text))
        uses = [(axis, d) for d, entry in enumerate(dimensions) for axis, _ in entry]
        twice = _used_twice(uses)
        if twice is not None:
            places = [place for entry in dimensions for axis, place in entry if axis == twice[0]]
            raise SpecError(_twice_text(*twice, values=caret(text, places[1])))
        return cls(tuple(tuple(axis for axis, _ in entry) for entry in dimensions))

    @classmethod
    def coerce(
        cls, value: ShardingSpec | str | Iterable[Any], ndim: int | None = None
    ) -> ShardingSpec:
        """A spec from a spec, a text (`parse`) or a JAX-style tuple (`from_partition_spec`).

        Args:
            value: what to read.
            ndim: a JAX-style tuple with fewer entries is filled up with replicated dimensions.

        Raises:
            SpecError: it cannot be read.
        """
        if isinstance(value, ShardingSpec):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        spec = cls.from_partition_spec(value)
        return cls(spec.axes + ((),) * ((ndim or 0) - spec.ndim))

    def resolve(self, mesh: DeviceMesh) -> ShardingSpec:
        """The same spec with every axis as an index of ``mesh``.

        Raises:
            SpecError: the mesh has no such axis, or a name and an index mean the same axis.
        """

        def index(axis: Axis) -> int:
            try:
                return mesh.axis(axis)
            except MeshError:
                context = f"spec {self} on mesh {mesh}"
                raise SpecError(mesh.unknown_axis_text(axis, context)) from None

        axes = tuple(tuple(map(index, entry)) for entry in self.axes)
        if axes == self.axes:
            return self
        twice = _used_twice([(axis, d) for d, entry in enumerate(axes) for axis in entry])
        if twice is not None:
            raise SpecError(_twice_text(*twice, values=f"spec {self} on mesh {mesh}"))
        return ShardingSpec(axes)

    # --- JAX -----------------------------------------------------------------------------------

    @classmethod
    def from_partition_spec(cls, entries: Iterable[Any], ndim: int | None = None) -> ShardingSpec:
        """Read a ``jax.sharding.PartitionSpec`` or any tuple of that form.

        Args:
            entries: one per dimension: None (replicated), an axis, or a tuple of axes, major
                first.
            ndim: number of array dimensions; missing entries at the end are replicated.

        Raises:
            SpecError: an entry of another kind (``UNCONSTRAINED`` too), unreduced axes, or more
                entries than dimensions.
        """
        if getattr(entries, "unreduced", None):
            raise SpecError(
                explain(
                    "a layout holds whole values, no partial sums",
                    values=f"{entries!r}",
                    remedy="reduce the array before it is resharded",
                )
            )
        try:
            axes = tuple(_partition_entry(entry) for entry in entries)
        except TypeError as error:
            raise SpecError(
                explain(
                    "a JAX-style spec holds, for each dimension, None, an axis or a tuple of axes",
                    values=f"{entries!r}: {error}",
                    remedy='for example ("dp", None, ("tp", "pp"))',
                )
            ) from None
        if ndim is not None and len(axes) > ndim:
            raise SpecError(
                explain(
                    "a JAX-style spec has at most one entry per array dimension",
                    values=f"{entries!r} has {len(axes)} entries, the array {ndim} dimensions",
                    remedy="drop entries, or give the array's true number of dimensions",
                )
            )
        return cls(axes + ((),) * ((ndim or 0) - len(axes)))

    def to_partition_spec(self) -> tuple[Axis | tuple[Axis, ...] | None, ...]:
        """The arguments of ``jax.sharding.PartitionSpec``: None, an axis or a tuple of axes each.

        JAX knows axes by name only: give it a spec written with names.
        """
        return tuple(
            entry if len(entry) > 1 else entry[0] if entry else None for entry in self.axes
        )

    # --- DTensor -------------------------------------------------------------------------------

    @classmethod
    def from_placements(cls, placements: Sequence[Any], ndim: int) -> ShardingSpec:
        """Read DTensor placements: one per *mesh* axis, where a spec has one per dimension.

        Mesh axes that shard the same dimension cut it from left to right, the first is major.
        DTensor cuts an uneven extent axis by axis and not by the flattened index, so the boxes
        agree only where the extents divide (DESIGN, uneven rules).

        Args:
            placements: each an object like ``torch.distributed.tensor.Shard`` or ``Replicate``,
                or ``("S", dim)``, ``"S(0)"``, a bare int dim, ``"R"`` or None.
            ndim: number of array dimensions, >= 0; a negative dim counts from the end.

        Raises:
            SpecError: a partial or strided placement, another object, or a dim out of range.
        """
        axes: list[tuple[Axis, ...]] = [()] * ndim
        for mesh_axis, placement in enumerate(placements):
            dim = _placement_dim(placement, mesh_axis)
            if dim is None:
                continue
            if not -ndim <= dim < ndim:
                raise SpecError(
                    explain(
                        "a placement must shard a dimension that the array has",
                        values=f"dim {dim} of an array with {ndim} dimensions",
                        context=f"placement {placement!r} of mesh axis {mesh_axis}",
                        remedy=f"give a dim from {-ndim} to {ndim - 1}, or Replicate",
                    )
                )
            axes[dim] += (mesh_axis,)
        return cls(tuple(axes))

    def to_placements(self, mesh_ndim: int) -> tuple[str, ...]:
        """DTensor placements in DTensor's own short form: ``"S(dim)"`` or ``"R"`` per mesh axis.

        Args:
            mesh_ndim: number of mesh axes.

        Raises:
            SpecError: axes by name, an axis the mesh does not have, or axes of one dimension that
                are not ascending, which plain placements cannot say.
        """
        placements = ["R"] * mesh_ndim
        for d, entry in enumerate(self.axes):
            indices = [axis for axis in entry if isinstance(axis, int)]
            if len(indices) < len(entry) or any(axis >= mesh_ndim for axis in indices):
                raise SpecError(
                    explain(
                        "placements need every axis as an index of the mesh",
                        values=f"dimension {d} of spec {self} is cut by {entry}, "
                        f"the mesh has {mesh_ndim} axes",
                        remedy="call spec.resolve(mesh) first, and pass mesh.ndim",
                    )
                )
            if indices != sorted(indices):
                raise SpecError(
                    explain(
                        "DTensor placements cut a dimension by mesh axes in ascending order",
                        values=f"dimension {d} of spec {self} is cut by axes {indices}",
                        remedy="transpose the mesh so that the major axis comes first, "
                        f"or reshard to {format_dimension(tuple(sorted(indices)))} first",
                    )
                )
            for axis in indices:
                placements[axis] = f"S({d})"
        return tuple(placements)


def _checked_entry(entry: Any) -> tuple[Axis, ...]:
    if isinstance(entry, str):
        raise TypeError(f"{entry!r} is no tuple of axes")
    return tuple(map(_checked_axis, entry))


def _checked_axis(axis: Any) -> Axis:
    """A name as it is, an index as an int; TypeError for all else (the caller knows the whole)."""
    if isinstance(axis, str):
        if axis.isidentifier():
            return axis
        raise TypeError(f"axis {axis!r} is no identifier")
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(f"axis {axis!r} is neither an index nor a name")
    index = operator.index(axis)
    if index < 0:
        raise TypeError(f"axis {index} is negative")
    return index


def _used_twice(uses: list[tuple[Axis, int]]) -> tuple[Axis, int, int] | None:
    """The first axis with two uses, and the dimensions of both."""
    first: dict[Axis, int] = {}
    for axis, d in uses:
        if axis in first:
            return axis, first[axis], d
        first[axis] = d
    return None


def _twice_text(axis: Axis, first: int, second: int, *, values: str) -> str:
    where = f"dimension {first} and dimension {second}"
    return explain(
        "a mesh axis may cut an array once",
        values=values,
        context=f"axis {axis!r} cuts "
        + (f"dimension {first} twice" if first == second else f"both {where}"),
        remedy="use each axis once; axes that no dimension names replicate",
    )


def _partition_entry(entry: Any) -> tuple[Axis, ...]:
    if entry is None:
        return ()
    if isinstance(entry, (tuple, list)):
        return tuple(map(_checked_axis, entry))
    return (_checked_axis(entry),)


def _placement_dim(placement: Any, mesh_axis: int) -> int | None:
    """The dimension that a placement shards, None when it replicates."""

    def refuse(rule: str, remedy: str) -> SpecError:
        where = f"placement {placement!r} of mesh axis {mesh_axis}"
        return SpecError(explain(rule, context=where, remedy=remedy))

    # A strided shard also answers is_shard() with True, so it is looked for first.
    if type(placement).__name__ == "_StridedShard" or hasattr(placement, "split_factor"):
        raise refuse(
            "a strided shard is not one of the cuts that a spec can say",
            "redistribute to plain Shard; where it stands for axes in another order (tensor "
            "parallel before FSDP), write that order as a spec: S10",
        )
    if hasattr(placement, "is_shard"):
        if placement.is_shard():
            return int(placement.dim)
        if placement.is_replicate():
            return None
    elif placement is None or placement == "R":
        return None
    elif isinstance(placement, str):
        match = _PLACEMENT.fullmatch(placement.replace(" ", ""))
        if match:
            return int(match[1])
    elif isinstance(placement, (tuple, list)):
        if len(placement) == 2 and placement[0] == "S" and hasattr(placement[1], "__index__"):
            return operator.index(placement[1])
    elif hasattr(placement, "__index__") and not isinstance(placement, bool):
        return operator.index(placement)
    partial = hasattr(placement, "is_partial") and placement.is_partial()
    if partial or (isinstance(placement, str) and re.fullmatch(r"P(\(.*\))?", placement)):
        raise refuse(
            "a layout holds whole values, no partial sums",
            "redistribute Partial to Replicate or Shard before resharding",
        )
    raise refuse(
        "a placement is Shard(dim) or Replicate()",
        'plain forms are ("S", dim), "S(0)", a bare dim, "R" and None',
    )
