"""Arrays as the executor sees them: raw elements, and regions packed to and from bytes.

Elements move as bytes, so an array is viewed through a plain type of the same size: NumPy then
copies bfloat16, float8 or structured elements as fast as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
#: What a message is sent from or received into: ``Bytes``, or bytes in the memory of a GPU.
Buffer = Any

_BYTE = np.dtype(np.uint8)
_PLAIN: dict[int, np.dtype[Any]] = {
    1: _BYTE,
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
}


def at_address(
    pointer: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: np.dtype[Any],
    writable: bool = True,
    owner: Any = None,
) -> NDArray[Any]:
    """An ndarray over memory that is already there, of whatever dtype.

    Args:
        pointer: address of its first element; anything where it has no elements.
        shape: its extents.
        strides: in bytes; None for C order.
        dtype: element type.
        writable: NumPy lets it be written to.
        owner: lives as long as the array.
    """
    if 0 in shape:
        array: NDArray[Any] = np.empty(shape, dtype)
        array.flags.writeable = writable
        return array
    there = _AtAddress(pointer, shape, strides, dtype.itemsize, writable, owner)
    return np.asarray(there).view(dtype)


class _AtAddress:
    """An array for NumPy to look at, wherever it lies."""

    def __init__(
        self,
        pointer: int,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        itemsize: int,
        writable: bool,
        owner: Any,
    ) -> None:
        self.owner = owner
        # A type string that NumPy reads as mere bytes: bfloat16 and float8 have none of their own.
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, not writable),
            "shape": tuple(shape),
            "strides": None if strides is None else tuple(strides),
            "typestr": f"|V{itemsize}",
        }


def raw(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory, shape and strides, with elements of a plain type of the same size."""
    itemsize = array.dtype.itemsize
    plain: np.dtype[Any] = _PLAIN.get(itemsize) or np.dtype((np.void, itemsize))
    return array.view(plain)


def contiguous_bytes(view: NDArray[Any]) -> Bytes | None:
    """The bytes of a region in place, or None when it is not one run of memory in C order."""
    if not view.flags.c_contiguous:
        return None
    flat: Bytes = view.reshape(-1).view(_BYTE)
    return flat


def pack(views: Sequence[NDArray[Any]], buffer: Bytes) -> None:
    """Copy regions, one after the other in C order, into bytes that they fill exactly."""
    at = 0
    for view in map(raw, views):
        np.copyto(_window(buffer, at, view), view)
        at += view.nbytes


def unpack(buffer: Bytes, views: Sequence[NDArray[Any]]) -> None:
    """Inverse of ``pack``."""
    at = 0
    for view in map(raw, views):
        np.copyto(view, _window(buffer, at, view))
        at += view.nbytes


def _window(buffer: Bytes, at: int, view: NDArray[Any]) -> NDArray[Any]:
    return buffer[at : at + view.nbytes].view(view.dtype).reshape(view.shape)
