"""Layout: which boxes of an array each rank holds."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from typing import Any

from xmesh.box import Box
from xmesh.box_index import BoxIndex
from xmesh.errors import LayoutError, XmeshError, explain
from xmesh.mesh import DeviceMesh
from xmesh.spec import ShardingSpec

UNEVEN_RULES = ("ceil", "balanced")


def part_bounds(extent: int, parts: int, index: int, uneven: str = "ceil") -> tuple[int, int]:
    """First and one-past-last index of part ``index`` of ``extent`` elements cut into ``parts``.

    Args:
        extent: number of elements, >= 0.
        parts: number of parts, >= 1.
        index: which part, 0 <= index < parts.
        uneven: ``"ceil"``: parts of ``ceil(extent / parts)``, the last ones short or empty
            (torch.chunk, HPF BLOCK); ``"balanced"``: the first ``extent % parts`` parts get one
            more (numpy.array_split). See DESIGN, "Uneven rule".
    """
    if uneven == "ceil":
        size = -(-extent // parts)
        return min(extent, index * size), min(extent, (index + 1) * size)
    size, longer = divmod(extent, parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """An array of a given shape, spread over ranks: at bottom a map from rank to boxes.

    Two layouts are equal when they are written alike: same mesh, spec, shape and rule, or same
    explicit boxes. For what ranks hold in the end, compare ``holders``.

    Args:
        mesh: the ranks.
        spec: how dimensions are cut: a ShardingSpec, a text such as ``"S01 R"``, or a JAX-style
            tuple, where missing entries at the end are replicated.
        shape: extent of each array dimension in elements, >= 0.
        uneven: ``"ceil"`` or ``"balanced"``, see `part_bounds`. A dimension cut by several axes
            is cut once, by their flattened index, major axis first.

    Raises:
        LayoutError: shape and spec have different numbers of dimensions, an extent is negative or
            no int, or the rule is unknown.
        SpecError: the spec cannot be read, or does not fit the mesh.
    """

    mesh: DeviceMesh | None
    """None for explicit boxes."""
    spec: ShardingSpec | None
    """With axes as indices; None for explicit boxes."""
    shape: tuple[int, ...]
    uneven: str
    explicit: tuple[tuple[int, tuple[Box, ...]], ...] | None
    """The boxes given to `from_boxes`, by ascending rank; None when mesh and spec say it all."""

    def __init__(
        self,
        mesh: DeviceMesh,
        spec: ShardingSpec | str | Iterable[Any],
        shape: Iterable[int],
        uneven: str = "ceil",
    ) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise LayoutError(
                explain(
                    "a layout needs a DeviceMesh",
                    values=f"{mesh!r} of type {type(mesh).__name__}",
                    remedy="build one: xmesh.DeviceMesh([[0, 1], [2, 3]])",
                )
            )
        extents = _checked_shape(shape)
        canonical = ShardingSpec.coerce(spec, ndim=len(extents)).resolve(mesh)
        if canonical.ndim != len(extents):
            raise LayoutError(
                explain(
                    "a spec says, for each dimension of the array, how it is cut",
                    values=f"spec {str(canonical)!r} has {canonical.ndim} dimensions, "
                    f"shape {extents} has {len(extents)}",
                    context=f"mesh {mesh}",
                    remedy="write one R or S per array dimension",
                )
            )
        if uneven not in UNEVEN_RULES:
            raise LayoutError(
                explain(
                    "the rule for uneven extents is one of " + ", ".join(map(repr, UNEVEN_RULES)),
                    values=f"uneven={uneven!r}",
                    remedy="'ceil' cuts as torch.chunk does, 'balanced' as numpy.array_split",
                )
            )
        self._set(mesh, canonical, extents, uneven, None)

    def _set(
        self,
        mesh: DeviceMesh | None,
        spec: ShardingSpec | None,
        shape: tuple[int, ...],
        uneven: str,
        explicit: tuple[tuple[int, tuple[Box, ...]], ...] | None,
    ) -> None:
        values = (mesh, spec, shape, uneven, explicit)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_boxes(cls, boxes: Mapping[int, Iterable[Box]], shape: Iterable[int]) -> Layout:
        """A layout by explicit boxes: block-cyclic, overlapping between ranks, with holes.

        Args:
            boxes: for each rank its boxes, in the order in which the rank keeps them; a rank may
                have none. Boxes of different ranks may overlap.
            shape: extent of each array dimension in elements, >= 0.

        Raises:
            LayoutError: a box with another number of dimensions, outside the shape, or that
                overlaps another of the same rank; a rank that is no int >= 0.
        """
        extents = _checked_shape(shape)
        if not isinstance(boxes, Mapping) or any(isinstance(v, Box) for v in boxes.values()):
            raise LayoutError(
                explain(
                    "explicit boxes are a dict from rank to a list of boxes",
                    values=f"{boxes!r:.80} of type {type(boxes).__name__}",
                    remedy="pass for example {0: [xmesh.Box((0,), (4,))]}",
                )
            )
        for rank in boxes:
            if isinstance(rank, bool) or not hasattr(rank, "__index__") or rank < 0:
                raise LayoutError(
                    explain(
                        "a rank is an int >= 0",
                        values=f"rank {rank!r} of type {type(rank).__name__}",
                        remedy="number the ranks as the communicator does",
                    )
                )
        explicit = tuple((operator.index(rank), tuple(boxes[rank])) for rank in sorted(boxes))
        for rank, held in explicit:
            _check_boxes(rank, held, extents)
        layout = cls.__new__(cls)
        layout._set(None, None, extents, "ceil", explicit)
        return layout

    @property
    def ndim(self) -> int:
        """Number of array dimensions."""
        return len(self.shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of the layout: in mesh order, or ascending for explicit boxes."""
        return self.mesh.ranks if self.mesh is not None else tuple(self._explicit_boxes)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The boxes that ``rank`` holds; ``()`` for a rank that is not in the layout.

        Of a mesh and a spec there is always exactly one, which may be empty.
        """
        if self.mesh is None or self.spec is None:
            return self._explicit_boxes.get(rank, ())
        if rank not in self.mesh:
            return ()
        place = self.mesh.coordinates(rank)
        return (self._box(tuple(_part(place, axes) for axes in self._strides)),)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the one box that ``rank`` holds.

        Raises:
            LayoutError: the rank is not in the layout, or does not hold exactly one box.
        """
        boxes = self.boxes(rank)
        if len(boxes) != 1:
            inside = rank in self.mesh if self.mesh is not None else rank in self._explicit_boxes
            raise LayoutError(
                explain(
                    "only a rank that holds exactly one box has a local shape",
                    values=f"rank {rank} "
                    + (f"holds {len(boxes)} boxes" if inside else "is not in the layout"),
                    context=f"layout {self}",
                    remedy="use layout.boxes(rank), which has any number of boxes",
                )
            )
        return boxes[0].shape

    @cached_property
    def holders(self) -> dict[Box, tuple[int, ...]]:
        """Each distinct box that has elements, with the ranks that hold it.

        Boxes are ordered by start (then stop), ranks ascend. This is all the planner needs.
        """
        if self.mesh is None or self.spec is None:
            held: dict[Box, list[int]] = {}
            for rank, boxes in self._explicit_boxes.items():
                for box in boxes:
                    if not box.empty:
                        held.setdefault(box, []).append(rank)
            return {box: tuple(held[box]) for box in sorted(held)}
        # Ranks are gathered by part numbers, and a box is made once for each: with thousands of
        # ranks this is what keeps it fast. Part numbers order as the starts of their boxes do.
        parts: dict[tuple[int, ...], list[int]] = {}
        places = product(*map(range, self.mesh.shape))
        for rank, place in zip(self.mesh.ranks, places, strict=True):
            parts.setdefault(tuple(_part(place, axes) for axes in self._strides), []).append(rank)
        boxes_of = ((self._box(index), parts[index]) for index in sorted(parts))
        return {box: tuple(sorted(ranks)) for box, ranks in boxes_of if not box.empty}

    def describe(self) -> str:
        """The layout in a word, such as ``S01R@(2,4)``; the rule is added when not ``ceil``."""
        if self.mesh is None:
            return f"{len(self.holders)} boxes@{len(self.ranks)} ranks"
        mesh = ",".join(map(str, self.mesh.shape))
        rule = "" if self.uneven == "ceil" else f" {self.uneven}"
        return f"{self.spec if self.ndim else 'scalar'}@({mesh}){rule}"

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        if self.mesh is None:
            return f"Layout.from_boxes({self._explicit_boxes!r}, shape={self.shape})"
        return f"Layout({self.mesh!r}, {str(self.spec)!r}, {self.shape}, uneven={self.uneven!r})"

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; `from_json` reads it back."""
        if self.mesh is None:
            boxes = [
                [rank, [[list(box.start), list(box.stop)] for box in held]]
                for rank, held in self._explicit_boxes.items()
            ]
            return {"shape": list(self.shape), "boxes": boxes}
        return {
            "mesh": self.mesh.to_json(),
            "spec": str(self.spec),
            "shape": list(self.shape),
            "uneven": self.uneven,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """The layout that `to_json` wrote.

        Raises:
            LayoutError: a part is missing, or what is there is no layout.
            MeshError: the mesh in it is none.
            SpecError: the spec in it is none.
        """
        try:
            if "boxes" in data:
                boxes = {
                    rank: [Box(tuple(start), tuple(stop)) for start, stop in held]
                    for rank, held in data["boxes"]
                }
                return cls.from_boxes(boxes, data["shape"])
            mesh = DeviceMesh.from_json(data["mesh"])
            return cls(mesh, data["spec"], data["shape"], data["uneven"])
        except XmeshError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(
                explain(
                    "the JSON of a layout holds 'shape' and 'boxes', "
                    "or 'mesh', 'spec', 'shape' and 'uneven'",
                    values=repr(data)[:200],
                    remedy="pass what Layout.to_json returned",
                )
            ) from error

    @cached_property
    def _explicit_boxes(self) -> dict[int, tuple[Box, ...]]:
        return dict(self.explicit or ())

    @cached_property
    def _strides(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per dimension, (mesh axis, stride) pairs: what `_part` sums up to a part number."""
        strides = []
        for sizes, axes in self._cuts:
            steps = (math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
            strides.append(tuple(zip(axes, steps, strict=True)))
        return tuple(strides)

    @cached_property
    def _bounds(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per dimension, the (start, stop) of every part: cut once, then looked up."""
        bounds = []
        for extent, (sizes, _) in zip(self.shape, self._cuts, strict=True):
            parts = math.prod(sizes)
            bounds.append(
                tuple(part_bounds(extent, parts, index, self.uneven) for index in range(parts))
            )
        return tuple(bounds)

    @property
    def _cuts(self) -> list[tuple[list[int], list[int]]]:
        """Per dimension, the sizes and the indices of the mesh axes that cut it."""
        if self.mesh is None or self.spec is None:
            return []
        axes = [[self.mesh.axis(axis) for axis in entry] for entry in self.spec.axes]
        return [([self.mesh.shape[axis] for axis in entry], entry) for entry in axes]

    def _box(self, index: tuple[int, ...]) -> Box:
        """The box with part number ``index[d]`` in each dimension ``d``."""
        bounds = [cut[i] for cut, i in zip(self._bounds, index, strict=True)]
        return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))

    def __getstate__(self) -> dict[str, Any]:
        # What is cached can be computed again, so it does not travel.
        return {field.name: self.__dict__[field.name] for field in fields(self)}


def _part(place: tuple[int, ...], strides: tuple[tuple[int, int], ...]) -> int:
    part = 0
    for axis, stride in strides:
        part += place[axis] * stride
    return part


def _checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        extents = tuple(-1 if isinstance(n, bool) else operator.index(n) for n in shape)
    except TypeError:
        extents = (-1,)
    if any(n < 0 for n in extents):
        raise LayoutError(
            explain(
                "a shape is a sequence of ints >= 0",
                values=f"shape={shape!r}",
                remedy="give the extent of each dimension in elements, for example (1024, 512)",
            )
        )
    return extents


def _check_boxes(rank: int, boxes: tuple[Box, ...], shape: tuple[int, ...]) -> None:
    for box in boxes:
        if not isinstance(box, Box):
            raise LayoutError(
                explain(
                    "a rank holds boxes",
                    values=f"{box!r} of type {type(box).__name__}",
                    context=f"rank {rank}",
                    remedy="give xmesh.Box(start, stop)",
                )
            )
        if box.ndim != len(shape) or any(map(operator.gt, box.stop, shape)):
            raise LayoutError(
                explain(
                    "a box must lie inside the array",
                    values=f"box {box} of an array of shape {shape}",
                    context=f"rank {rank}",
                    remedy="give as many dimensions as the array has, and stops within its extents",
                )
            )
    full = [box for box in boxes if not box.empty]
    distinct = list(dict.fromkeys(full))
    index = BoxIndex(distinct)
    for i, box in enumerate(distinct):
        others = [j for j in index.overlapping(box) if j != i]
        if others or len(distinct) < len(full):
            twice = distinct[others[0]] if others else next(b for b in full if full.count(b) > 1)
            raise LayoutError(
                explain(
                    "boxes of one rank must not overlap",
                    values=f"box {box if others else twice} and box {twice}",
                    context=f"rank {rank}",
                    remedy="cut the boxes so that the rank holds each element once",
                )
            )
