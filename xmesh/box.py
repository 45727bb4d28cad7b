"""Box: a half-open N-d region of an array (the paper's *data slice*)."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from xmesh.errors import LayoutError, explain


@dataclass(frozen=True, order=True)
class Box:
    """The elements ``x`` with ``start[d] <= x[d] < stop[d]`` in every dimension ``d``.

    A box with no dimensions holds one element (a scalar); a box with an extent of zero holds none.

    Args:
        start: first index in each dimension, >= 0.
        stop: one past the last index in each dimension, >= start.

    Raises:
        LayoutError: lengths differ, or a stop lies before its start.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "start", tuple(map(operator.index, self.start)))
            object.__setattr__(self, "stop", tuple(map(operator.index, self.stop)))
            whole = True
        except TypeError:
            whole = False
        if (
            not whole
            or len(self.start) != len(self.stop)
            or any(not 0 <= a <= b for a, b in zip(self.start, self.stop, strict=True))
        ):
            raise LayoutError(
                explain(
                    "a box needs 0 <= start <= stop in every dimension",
                    values=f"start={self.start} stop={self.stop}",
                    remedy="give as many starts as stops, integers, each start at most its stop",
                )
            )

    @classmethod
    def from_shape(cls, shape: Iterable[int]) -> Box:
        """The whole of an array of ``shape``."""
        stop = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        return cls((0,) * len(stop), stop)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in each dimension, in elements."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements; 1 with no dimensions."""
        return math.prod(self.shape)

    @property
    def empty(self) -> bool:
        """True when there is no element in it."""
        return any(a == b for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes, or None when there are none.

        Raises:
            LayoutError: the boxes have different numbers of dimensions.
        """
        if len(self.start) != len(other.start):
            raise LayoutError(
                explain(
                    "boxes of one array have the same number of dimensions",
                    values=f"{self} and {other}",
                    remedy="intersect boxes of the same array",
                )
            )
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        for a, b in zip(start, stop, strict=True):
            if a >= b:
                return None
        # Checked by what it came from; plans of a million tasks live on this line.
        common = object.__new__(Box)
        object.__setattr__(common, "start", start)
        object.__setattr__(common, "stop", stop)
        return common

    def contains(self, other: Box) -> bool:
        """True when every element of ``other`` is in this box."""
        return other.empty or self.intersect(other) == other

    def offset(self, origin: Iterable[int]) -> Box:
        """The same region as seen from ``origin``: global indices to those of a local array."""
        origin = tuple(origin)
        return Box(
            tuple(a - o for a, o in zip(self.start, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin, strict=True)),
        )

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """The region as an index into an array that holds ``origin`` (default: the whole array)."""
        box = self if origin is None else self.offset(origin.start)
        return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))

    def __str__(self) -> str:
        ranges = (f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))
        return "[" + ", ".join(ranges) + "]"
