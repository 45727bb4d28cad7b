"""DeviceMesh: an n-d grid of ranks with optional axis names; it knows no communicator."""

from __future__ import annotations

import difflib
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

from xmesh.errors import MeshError, explain

_SHOWN_RANKS = 64  # a repr with more ranks than this would flood a log


class ArrayLike(Protocol):
    """What a numpy integer array offers, so that numpy need not be imported here."""

    def tolist(self) -> Any:
        """Nested lists of Python numbers."""


@dataclass(frozen=True, init=False, repr=False)
class DeviceMesh:
    """An n-d grid of distinct ranks, in any order (the paper, "Device mesh").

    Stored as a shape and one flat tuple, so that thousands of ranks stay cheap. Two meshes are
    equal when shape, ranks and axis names are.

    Args:
        ranks: nested sequences of ints, or an integer array; a flat sequence is a 1-d mesh.
        axis_names: one name per axis, each an identifier; None when axes go by index only.

    Raises:
        MeshError: no rank, ragged nesting, a rank that is negative, no int, or there twice; names
            that are too few, too many, repeated, or no identifiers.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """All ranks, row-major."""
    axis_names: tuple[str, ...] | None

    def __init__(
        self, ranks: Sequence[Any] | ArrayLike, axis_names: Iterable[str] | None = None
    ) -> None:
        self._set(*_flatten(ranks), axis_names)

    def _set(
        self, shape: tuple[int, ...], ranks: Sequence[Any], axis_names: Iterable[str] | None
    ) -> None:
        """Check and store; the one place that both constructors and `from_json` pass through."""
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "ranks", _checked_ranks(shape, ranks))
        object.__setattr__(self, "axis_names", _checked_names(shape, axis_names))

    @classmethod
    def arange(
        cls, shape: Iterable[int], start: int = 0, axis_names: Iterable[str] | None = None
    ) -> DeviceMesh:
        """The row-major mesh of ranks ``start, start + 1, ...``.

        Args:
            shape: extent of each axis, >= 1.
            start: the first rank, >= 0.
            axis_names: as for the constructor.

        Raises:
            MeshError: as for the constructor.
        """
        extents = _checked_shape(shape)
        (first,) = _checked_ranks((1,), (start,))
        mesh = cls.__new__(cls)
        mesh._set(extents, range(first, first + math.prod(extents)), axis_names)
        return mesh

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def axis(self, name_or_index: str | int) -> int:
        """Index of an axis given by name or by index.

        Raises:
            MeshError: the mesh has no such axis; the text lists those it has.
        """
        if isinstance(name_or_index, str):
            if self.axis_names is not None and name_or_index in self.axis_names:
                return self.axis_names.index(name_or_index)
        elif type(name_or_index) is not bool and name_or_index in range(self.ndim):
            return int(name_or_index)
        raise MeshError(self.unknown_axis_text(name_or_index, f"mesh {self}"))

    def unknown_axis_text(self, axis: object, context: str) -> str:
        """The error text for an axis the mesh does not have, for `axis` and for specs."""
        remedy = f"give an axis index from 0 to {self.ndim - 1}"
        if self.axis_names is not None:
            remedy += " or a name: " + ", ".join(self.axis_names)
            close = difflib.get_close_matches(str(axis), self.axis_names, n=1, cutoff=0.5)
            if close:
                remedy = f"did you mean {close[0]!r}? {remedy}"
        elif isinstance(axis, str):
            remedy += ", or axis_names to the mesh"
        return explain(
            "an axis must be one of the mesh's",
            values=f"axis {axis!r}",
            context=context,
            remedy=remedy,
        )

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` sits in the grid, one index per axis; O(1).

        Raises:
            MeshError: the rank is not in the mesh.
        """
        try:
            return self._coordinates[rank]
        except (KeyError, TypeError):
            raise MeshError(
                explain(
                    "only a rank of the mesh has coordinates in it",
                    values=f"rank {rank!r}",
                    context=f"mesh {self}",
                    remedy="test `rank in mesh` first",
                )
            ) from None

    def axis_groups(self, axis: str | int | Iterable[str | int]) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along ``axis``, or along several axes.

        Args:
            axis: an axis, or several, major first.

        Returns:
            Groups in row-major order of the other axes. Inside a group the ranks run over the
            axes in the order given, so that a rank's place in its group is the index of the part
            it holds of a dimension cut by those axes.

        Raises:
            MeshError: the mesh has no such axis, or one is given twice.
        """
        given = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
        axes = tuple(self.axis(a) for a in given)
        if len(set(axes)) != len(axes):
            raise MeshError(
                explain(
                    "an axis may be given once",
                    values=f"axes {given!r}",
                    context=f"mesh {self}",
                    remedy="drop the repeated axis",
                )
            )
        rest = [a for a in range(self.ndim) if a not in axes]
        groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for rank, place in self._coordinates.items():
            inside = tuple(place[a] for a in axes)
            groups.setdefault(tuple(place[a] for a in rest), []).append((inside, rank))
        return tuple(tuple(rank for _, rank in sorted(group)) for group in groups.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; `from_json` reads it back."""
        names = None if self.axis_names is None else list(self.axis_names)
        return {"shape": list(self.shape), "ranks": list(self.ranks), "axis_names": names}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceMesh:
        """The mesh that `to_json` wrote.

        Raises:
            MeshError: a part is missing, or what is there is no mesh.
        """
        try:
            shape, ranks, names = data["shape"], list(data["ranks"]), data.get("axis_names")
        except (KeyError, TypeError, AttributeError) as error:
            raise MeshError(
                explain(
                    "the JSON of a mesh holds 'shape', 'ranks' and 'axis_names'",
                    values=repr(data)[:200],
                    remedy="pass what DeviceMesh.to_json returned",
                )
            ) from error
        mesh = cls.__new__(cls)
        mesh._set(_checked_shape(shape), ranks, names)
        return mesh

    def __contains__(self, rank: object) -> bool:
        try:
            return rank in self._coordinates
        except TypeError:  # what cannot be hashed is no rank
            return False

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.ranks, itertools.product(*map(range, self.shape)), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        # What is cached can be computed again, so it does not travel.
        return {field.name: self.__dict__[field.name] for field in fields(self)}

    @property
    def _consecutive(self) -> bool:
        return self.ranks == tuple(range(self.ranks[0], self.ranks[0] + self.size))

    def __repr__(self) -> str:
        names = "" if self.axis_names is None else f", axis_names={self.axis_names!r}"
        if self.size <= _SHOWN_RANKS:
            return f"DeviceMesh({_nested(self.shape, self.ranks)}{names})"
        if self._consecutive:
            return f"DeviceMesh.arange({self.shape}, start={self.ranks[0]}{names})"
        return f"<DeviceMesh {self}>"

    def __str__(self) -> str:
        extents = ",".join(map(str, self.shape))
        if self.axis_names is not None:
            extents = ",".join(f"{n}={e}" for n, e in zip(self.axis_names, self.shape, strict=True))
        if self._consecutive and self.size > 2:
            ranks = f"{self.ranks[0]}..{self.ranks[-1]}"
        elif self.size <= _SHOWN_RANKS:
            ranks = ",".join(map(str, self.ranks))
        else:
            ranks = ",".join(map(str, self.ranks[:8])) + f",... ({self.size} in all)"
        return f"({extents}) of ranks {ranks}"


def _flatten(nested: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Shape and row-major leaves of nested sequences, taken apart one level at a time."""
    shape: list[int] = []
    level = [nested]
    while True:
        level = [x.tolist() if hasattr(x, "tolist") else x for x in level]
        # None stands for a leaf: a leaf beside a sequence is as ragged as two unequal lengths.
        lengths = [
            len(x) if isinstance(x, Sequence) and not isinstance(x, (str, bytes)) else None
            for x in level
        ]
        first = lengths[0] if lengths else None
        for i, length in enumerate(lengths):
            if length != first:
                raise MeshError(_ragged(shape, i, first, length))
        if first is None:
            break
        shape.append(first)
        level = [leaf for x in level for leaf in x]
    if not shape:
        raise MeshError(
            explain(
                "a mesh is a grid of ranks with at least one axis",
                values=f"ranks={nested!r}",
                remedy=f"pass a sequence, for example [{nested!r}]",
            )
        )
    return tuple(shape), level


def _ragged(shape: list[int], index: int, first: int | None, other: int | None) -> str:
    def place(flat: int) -> str:
        parts: list[str] = []
        for extent in reversed(shape):
            flat, here = divmod(flat, extent)
            parts.append(f"[{here}]")
        return "ranks" + "".join(reversed(parts))

    def what(length: int | None) -> str:
        return "is one rank" if length is None else f"has {length} entries"

    return explain(
        "every row of a mesh must be as long as the others",
        values=f"{place(0)} {what(first)}, {place(index)} {what(other)}",
        remedy="give a full grid; where ranks are spare, leave them out of the mesh",
    )


def _checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        extents = tuple(operator.index(extent) for extent in shape)
    except TypeError:
        extents = ()
    if not extents or min(extents) < 1:
        raise MeshError(
            explain(
                "a mesh has at least one axis, and each axis at least one rank",
                values=f"shape={shape!r}",
                remedy="give the extents as a sequence of ints >= 1",
            )
        )
    return extents


def _checked_ranks(shape: tuple[int, ...], ranks: Sequence[Any]) -> tuple[int, ...]:
    if math.prod(shape) != len(ranks) or not ranks:
        raise MeshError(
            explain(
                "a mesh holds at least one rank, and one for every place of its grid",
                values=f"shape {shape}, {len(ranks)} ranks",
                remedy="give as many ranks as the product of the extents",
            )
        )
    if isinstance(ranks, range) and ranks[0] >= 0:
        return tuple(ranks)
    for rank in ranks:
        # bool is an int to Python, and a mistake here.
        if isinstance(rank, bool) or not hasattr(rank, "__index__") or rank < 0:
            raise MeshError(
                explain(
                    "a rank is an int >= 0",
                    values=f"rank {rank!r} of type {type(rank).__name__}",
                    remedy="number the ranks as the communicator does",
                )
            )
    checked = tuple(map(operator.index, ranks))
    if len(set(checked)) != len(checked):
        twice = Counter(checked).most_common(1)[0][0]
        places = [i for i, rank in enumerate(checked) if rank == twice]
        raise MeshError(
            explain(
                "a rank may be in a mesh once",
                values=f"rank {twice} at places {places} (row-major) of shape {shape}",
                remedy="give every place of the grid a rank of its own",
            )
        )
    return checked


def _checked_names(shape: tuple[int, ...], names: Iterable[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    # A lone string would fall apart into letters.
    lone = isinstance(names, str) or not isinstance(names, Iterable)
    checked: tuple[Any, ...] = (names,) if lone else tuple(names)
    rule = ""
    if len(checked) != len(shape):
        rule = f"a mesh needs one name for each of its {len(shape)} axes"
    elif not all(isinstance(name, str) and name.isidentifier() for name in checked):
        rule = "an axis name is an identifier: letters, digits and _, not beginning with a digit"
    elif len(set(checked)) != len(checked):
        rule = "axis names must differ"
    if rule:
        raise MeshError(
            explain(
                rule,
                values=f"axis_names={names!r}, shape {shape}",
                remedy='for example axis_names=("dp", "tp") for a 2-d mesh, or None for no names',
            )
        )
    return checked


def _nested(shape: tuple[int, ...], flat: Sequence[int]) -> str:
    if len(shape) == 1:
        return str(list(flat))
    step = len(flat) // shape[0]
    rows = (_nested(shape[1:], flat[i : i + step]) for i in range(0, len(flat), step))
    return "[" + ", ".join(rows) + "]"
