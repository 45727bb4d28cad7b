"""Outputs in the caller's kind of array: made by NumPy or CuPy, taken over by other libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmesh.device.array import DeviceArray
from xmesh.device.gpu import current_device, load_cupy
from xmesh.errors import ArrayError, explain
from xmesh.interop import AnyArray, as_memory

#: Host memory that starts at a multiple of this is taken over by XLA as it is; other is copied.
_ALIGNMENT_NBYTES = 64
#: NumPy's characters of the types that CuPy has, too.
_CUPY_TYPES = "?bhilqBHILQefdFD"


class Kind:
    """A kind of array: a library, and the memory that its arrays lie in. This one is NumPy's.

    Attributes:
        device: ordinal of the GPU whose memory it is; None for that of the host.
    """

    device: int | None = None

    def empty(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[AnyArray]:
        """New memory to write to, for one output of each shape.

        Raises:
            ArrayError: the library that makes it is not there, or fails.
            MemoryError: there is no room.
        """
        return [np.empty(shape, dtype) for shape in shapes]

    def result(self, memory: AnyArray, dtype: np.dtype[Any]) -> Any:
        """The array of the caller's library over memory from ``empty``, which must be written.

        Args:
            memory: from ``empty``.
            dtype: its element type.

        Raises:
            ArrayError: the library does not take it.
        """
        return memory


NUMPY = Kind()


def kind_of(like: Any, memory: AnyArray | None = None) -> Kind:
    """The kind that is meant by a library, or by one of its arrays.

    Args:
        like: a module: ``numpy``, ``cupy`` (on its current device), or another one with
            ``from_dlpack`` (in host memory); or an array, whose library and device count. None,
            and an array of no library that takes DLPack (a ``bytearray``, for example), means
            NumPy in host memory and CuPy on a GPU.
        memory: of the array, where it was read already.

    Raises:
        ArrayError: it is no such thing.
        TransportError: it means a GPU, and CuPy or the GPU is not there.
    """
    if like is None or isinstance(like, np.ndarray) or like is np:
        return NUMPY
    if isinstance(like, str):
        raise ArrayError(
            explain(
                "like must be the module of a library, or one of its arrays, and not its name",
                values=f"{like!r}",
                remedy=f"import it, and pass like={like.partition('.')[0]}",
            )
        )
    if isinstance(like, ModuleType):
        if like.__name__ == "cupy":
            return _CuPy(None)
        take = _from_dlpack(like)
        if take is None:
            raise ArrayError(
                explain(
                    "like must be an array, or a module with from_dlpack",
                    values=f"module {like.__name__}",
                    remedy="pass the module of an array library, such as numpy, or an array of it",
                )
            )
        return _Other(like, take, None)
    if memory is None:
        memory = as_memory(like, "like")
    device = memory.device if isinstance(memory, DeviceArray) else None
    if hasattr(like, "__dlpack__"):
        for library in _libraries(like):
            take = _from_dlpack(library)
            if take is not None and library.__name__ not in ("cupy", "numpy"):
                cupy = None if device is None else _CuPy(device)
                return _Other(library, take, cupy, memory.dtype)
    return NUMPY if device is None else _CuPy(device)


def _libraries(array: Any) -> Iterator[ModuleType]:
    """Modules that may make arrays of this kind."""
    if hasattr(array, "__array_namespace__"):
        yield array.__array_namespace__()
    for base in type(array).__mro__:
        module = sys.modules.get(base.__module__.partition(".")[0])
        if module is not None:
            yield module


def _from_dlpack(module: ModuleType) -> Callable[[Any], Any] | None:
    for place in (module, getattr(module, "dlpack", None)):
        take: Callable[[Any], Any] | None = getattr(place, "from_dlpack", None)
        if callable(take):
            return take
    return None


class _CuPy(Kind):
    """Arrays of CuPy on one GPU.

    Args:
        device: its ordinal; None or -1 for the current one.
    """

    def __init__(self, device: int | None) -> None:
        self._cupy: Any = load_cupy()
        known = device is not None and device >= 0
        self.device = device if known else current_device(self._cupy)

    def empty(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[AnyArray]:
        """See ``Kind``."""
        try:
            with self._cupy.cuda.Device(self.device):
                arrays = [self._empty(shape, dtype) for shape in shapes]
                return [as_memory(array, "an output", writable=True) for array in arrays]
        except (ArrayError, MemoryError):
            raise
        except Exception as error:
            raise _refused("cupy", error) from error

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        if dtype.isbuiltin == 1 and dtype.char in _CUPY_TYPES and dtype.isnative:
            return self._cupy.empty(shape, dtype)
        # CuPy makes arrays of few types, and views of any.
        volume = int(np.prod(shape, dtype=np.int64))
        return self._cupy.empty(volume * dtype.itemsize, np.uint8).view(dtype).reshape(shape)

    def result(self, memory: AnyArray, dtype: np.dtype[Any]) -> Any:
        """See ``Kind``."""
        assert isinstance(memory, DeviceArray)
        return memory.owner


class _Other(Kind):
    """Arrays of a library that takes over memory by DLPack.

    Args:
        library: its module.
        take: its ``from_dlpack``.
        cupy: makes the memory; None for memory of the host.
        dtype: one that the library is known to have.
    """

    def __init__(
        self,
        library: ModuleType,
        take: Callable[[Any], Any],
        cupy: _CuPy | None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        self._library, self._take, self._cupy = library, take, cupy
        self._taken = [] if dtype is None else [dtype]
        self.device = None if cupy is None else cupy.device

    def empty(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[AnyArray]:
        """See ``Kind``."""
        if dtype not in self._taken:
            # So that what it does not take is refused before anything moves.
            (one,) = self._empty([(1,)], dtype)
            if not isinstance(one, DeviceArray):
                one.view(np.uint8)[:] = 0  # a number, for those that convert it
            self.result(one, dtype)
            self._taken.append(dtype)
        return self._empty(shapes, dtype)

    def _empty(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[AnyArray]:
        if self._cupy is not None:
            return self._cupy.empty(shapes, dtype)
        return [_aligned(shape, dtype) for shape in shapes]

    def result(self, memory: AnyArray, dtype: np.dtype[Any]) -> Any:
        """See ``Kind``."""
        array = memory.owner if isinstance(memory, DeviceArray) else memory
        try:
            if _in_dlpack(dtype):
                made = self._take(array)
            else:
                # By integers, which all libraries take: few take these by their DLPack names.
                integers = array.view(np.dtype(f"i{dtype.itemsize}"))
                made = self._take(integers).view(self._own_dtype(dtype))
            found = as_memory(made, "an output")
        except ArrayError:
            raise
        except Exception as error:
            raise _refused(self._library.__name__, error) from error
        if (found.dtype, found.shape) != (dtype, memory.shape):
            # Some have no 64-bit elements, unless told to, and convert in silence.
            raise ArrayError(
                explain(
                    "the library of the outputs must take them as they are",
                    values=f"{self._library.__name__} made {found.dtype} {found.shape} of "
                    f"{dtype} {memory.shape}",
                    remedy=_REMEDY,
                )
            )
        return made

    def _own_dtype(self, dtype: np.dtype[Any]) -> Any:
        """What the library calls bfloat16 or a float8."""
        own = getattr(self._library, dtype.name, None)
        if own is None:
            raise ArrayError(
                explain(
                    "the library of the outputs must have their dtype",
                    values=f"{self._library.__name__} has no {dtype.name}",
                    remedy=_REMEDY,
                )
            )
        return own


_REMEDY = "pass out=, or like=numpy and convert what comes"


def _in_dlpack(dtype: np.dtype[Any]) -> bool:
    """NumPy and CuPy export it; whether the library takes it is then for the library to say."""
    return dtype.type.__module__ == "numpy"


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    room = np.empty(nbytes + _ALIGNMENT_NBYTES, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT_NBYTES
    return room[start : start + nbytes].view(dtype).reshape(shape)


def _refused(library: str, error: Exception) -> ArrayError:
    return ArrayError(
        explain(
            "outputs must be arrays that their library can make",
            values=f"{library}: {type(error).__name__}: {error}",
            remedy=_REMEDY,
        )
    )
