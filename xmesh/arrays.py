"""Arrays as the executor sees them: raw elements, and regions packed to and from bytes.

Elements move as bytes, so an array is viewed through a plain type of the same size: NumPy then
copies bfloat16, float8 or structured elements as fast as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmesh.errors import ArrayError, explain

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


def host_array(value: Any, what: str, writable: bool = False) -> NDArray[Any]:
    """The NumPy array behind an argument.

    Args:
        value: an ndarray, or anything with ``__array_interface__`` or the buffer protocol, whose
            memory is used in place; to read from, also a NumPy scalar or an object with
            ``__array__``, which may copy.
        what: what the argument is called in an error.
        writable: it is written to, so that a copy would lose what is written.

    Raises:
        ArrayError: it is none of these, lies in device memory, or cannot be read.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise _not_an_array(value, what, "a masked array, whose mask would be lost")
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    in_place = ("__array_interface__", "__array_struct__", "__buffer__")
    try:
        if hasattr(value, "__cuda_array_interface__"):
            kind = f"{type(value).__module__}.{type(value).__name__}"
            raise ArrayError(
                explain(
                    f"{what} must lie in host memory for this transport",
                    values=f"{kind} in device memory",
                    remedy="copy it to the host first, for example with cupy.asnumpy",
                )
            )
        shares = isinstance(value, (memoryview, bytearray)) or any(
            hasattr(value, name) for name in in_place
        )
        if isinstance(value, np.generic) and writable:
            raise _not_an_array(value, what, "a scalar that nothing can be written to")
        if shares or (not writable and hasattr(value, "__array__")):
            return np.asarray(value)
    except ArrayError:
        raise
    except Exception as error:
        # Whatever a foreign object raises: this rank must be able to tell the others.
        raise _not_an_array(value, what, f"{type(error).__name__}: {error}") from error
    raise _not_an_array(value, what, "")


def _not_an_array(value: Any, what: str, why: str) -> ArrayError:
    return ArrayError(
        explain(
            f"{what} must be an array",
            values=f"{type(value).__name__}" + (f", {why}" if why else ""),
            remedy="pass a numpy array, or an object with __array_interface__ or a buffer",
        )
    )


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
