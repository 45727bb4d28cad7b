"""What every rank must hold, element by element, from the layouts alone; and arrays to try it with.

Nothing here uses how xmesh moves or slices arrays: an element is found by its flat index in the
whole array. Everything is compared byte by byte, so any dtype will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmesh import Box, Layout

#: How an array may lie in memory; each is surrounded by guard elements.
MEMORY = ("C", "F", "strided", "reversed", "swapped")
_GUARD = 0xA5
_AROUND = 3


def whole(shape: Sequence[int], dtype: Any, seed: int = 0) -> NDArray[Any]:
    """An array whose elements differ, as far as their size allows, and are seldom zero."""
    dtype = np.dtype(dtype)
    volume = int(np.prod(shape, dtype=np.int64))
    width = -(-dtype.itemsize // 8)
    index = np.arange(volume * width, dtype=np.uint64) + np.uint64(1 + seed * 1_000_003)
    words = index * np.uint64(0x9E3779B97F4A7C15)  # odd, so the product is distinct modulo 2**64
    words ^= words >> np.uint64(29)
    rows: NDArray[Any] = words.reshape(volume, width).view(np.uint8)[:, : dtype.itemsize]
    if dtype == np.bool_:
        rows = rows & 1
    elements: NDArray[Any] = np.ascontiguousarray(rows).reshape(-1).view(dtype)
    return elements.reshape(tuple(shape))


def plain(array: NDArray[Any]) -> NDArray[Any]:
    """Elements as mere bytes: structured ones would be copied without their padding."""
    return array.view(np.dtype((np.void, array.dtype.itemsize)))


def part(array: NDArray[Any], box: Box) -> NDArray[Any]:
    """The elements of a box, each looked up by its flat index in the whole array."""
    flat = np.zeros(box.shape, np.int64)
    stride = 1
    for d in reversed(range(box.ndim)):
        along = np.arange(box.start[d], box.stop[d], dtype=np.int64) * stride
        flat += along.reshape([-1 if e == d else 1 for e in range(box.ndim)])
        stride *= array.shape[d]
    return plain(array).reshape(-1)[flat.reshape(-1)].reshape(box.shape).view(array.dtype)


def held(array: NDArray[Any], layout: Layout, rank: int) -> list[NDArray[Any]]:
    """What a rank must hold: one array for each of its boxes."""
    return [part(array, box) for box in layout.boxes(rank)]


def as_argument(arrays: Sequence[Any]) -> Any:
    """Arrays of a rank in the form that a call takes and gives."""
    if not arrays:
        return None
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def as_arrays(result: Any) -> list[Any]:
    """Inverse of ``as_argument``."""
    if result is None:
        return []
    return list(result) if isinstance(result, tuple) else [result]


@dataclass
class Guarded:
    """An array that is a view inside a bigger buffer.

    Attributes:
        buffer: the buffer.
        view: the array.
        find: the same view of any buffer of that shape.
        before: the bytes of the buffer as they were.
    """

    buffer: NDArray[Any]
    view: NDArray[Any]
    find: Callable[[NDArray[Any]], NDArray[Any]]
    before: NDArray[Any]

    def intact(self) -> bool:
        """No element of the buffer outside the view has changed."""
        now, before = plain(self.buffer).copy(), plain(self.before)
        self.find(now)[...] = self.find(before)
        return now.tobytes() == before.tobytes()


def guarded(shape: Sequence[int], dtype: Any, memory: str = "C") -> Guarded:
    """An array of guard elements inside a buffer of guard elements.

    Args:
        shape: of the array.
        dtype: element type.
        memory: one of MEMORY.
    """
    dtype, shape = np.dtype(dtype), tuple(shape)
    find: Callable[[NDArray[Any]], NDArray[Any]]
    volume = int(np.prod(shape, dtype=np.int64))
    if memory in ("C", "F") or not shape:
        extents: tuple[int, ...] = (volume + 2 * _AROUND,)
        order: Any = "F" if memory == "F" else "C"

        def find(buffer: NDArray[Any]) -> NDArray[Any]:
            return buffer[_AROUND : _AROUND + volume].reshape(shape, order=order)
    else:
        step = 1 if memory == "swapped" else 2
        wanted = shape[::-1] if memory == "swapped" else shape
        extents = tuple(n * step + 2 * _AROUND for n in wanted)
        inner = tuple(slice(_AROUND, _AROUND + n * step, step) for n in wanted)

        def find(buffer: NDArray[Any]) -> NDArray[Any]:
            view = buffer[inner]
            if memory == "swapped":
                return view.T
            return view[(slice(None, None, -1),) * view.ndim] if memory == "reversed" else view

    nbytes = int(np.prod(extents, dtype=np.int64)) * dtype.itemsize
    buffer = np.full(nbytes, _GUARD, np.uint8).view(dtype).reshape(extents)
    view = find(buffer)
    if volume and not np.shares_memory(view, buffer):
        raise AssertionError("the array must be a view of the buffer")
    return Guarded(buffer, view, find, plain(buffer).copy())


def guarded_copy(array: NDArray[Any], memory: str = "C") -> Guarded:
    """The elements of an array, inside a buffer of guard elements."""
    made = guarded(array.shape, array.dtype, memory)
    plain(made.view)[...] = plain(array)
    made.before = plain(made.buffer).copy()
    return made


def difference(results: Sequence[Any], wanted: Sequence[NDArray[Any]]) -> str:
    """What is wrong with the arrays that a rank got; "" when nothing is."""
    if len(results) != len(wanted):
        return f"{len(results)} arrays, {len(wanted)} wanted"
    for i, (got, want) in enumerate(zip(results, wanted, strict=True)):
        if not isinstance(got, np.ndarray) or (got.shape, got.dtype) != (want.shape, want.dtype):
            return f"array {i}: {getattr(got, 'dtype', got)} {getattr(got, 'shape', '')}"
        if plain(got).tobytes() != plain(want).tobytes():
            pairs = zip(plain(got).reshape(-1), plain(want).reshape(-1), strict=True)
            wrong = [k for k, (a, b) in enumerate(pairs) if a.tobytes() != b.tobytes()]
            place = tuple(int(k) for k in np.unravel_index(wrong[0], want.shape))
            return f"array {i}: {len(wrong)} of {want.size} elements differ, first at {place}"
    return ""
