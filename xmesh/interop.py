"""Arrays of any library, taken in place: by the protocols that they offer, in one order.

The CUDA array interface comes first, since it tells read-only arrays and streams apart; then
NumPy's array interface and the buffer protocol; then DLPack, which alone names bfloat16 and float8;
and last ``__array__``, which may copy.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xmesh import dlpack
from xmesh.arrays import at_address
from xmesh.device.array import DeviceArray
from xmesh.dtypes import as_dtype
from xmesh.errors import ArrayError, PlanError, explain

#: An array in host memory, or in that of a GPU.
AnyArray: TypeAlias = NDArray[Any] | DeviceArray


def as_memory(value: Any, what: str, writable: bool = False) -> AnyArray:
    """The memory behind an argument, used in place.

    Args:
        value: a NumPy or CuPy array, or anything with ``__cuda_array_interface__``,
            ``__array_interface__``, the buffer protocol or DLPack. To read from, also what can only
            be copied: a NumPy scalar, an object with ``__array__``, and an array of another
            kind of accelerator whose library lends a copy on the host.
        what: what the argument is called in an error.
        writable: it is written to, so that a copy would lose what is written.

    Returns:
        A view of its memory: of the same shape, strides and dtype, and read-only where the other
        library says so.

    Raises:
        ArrayError: it is none of these, lies on a device that is not supported, or cannot be read.
    """
    if type(value) is np.ndarray or isinstance(value, DeviceArray):
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise _not_an_array(value, what, "a masked array, whose mask would be lost")
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if isinstance(value, np.generic):
        if writable:
            raise _not_an_array(value, what, "a scalar that nothing can be written to")
        return np.asarray(value)
    if isinstance(value, type):  # it has the attributes of its instances
        raise _not_an_array(value, what, "not one of its instances")
    problem: Exception | None = None
    try:
        _require_no_pending_operation(value)
        for read in (_by_cuda_interface, _by_host_protocols, _by_dlpack):
            try:
                found = read(value, writable)
            except ArrayError:
                raise
            except Exception as error:
                # Whatever a foreign object raises: another of its protocols may serve, and if
                # not, this rank must be able to tell the others.
                problem = problem or error
                continue
            if found is not None:
                return found
        if not writable and _on_host(value) and hasattr(value, "__array__"):
            return np.asarray(value)
    except ArrayError as error:
        raise ArrayError(f"{what} cannot be used: {error}") from error
    except Exception as error:
        problem = problem or error
    why = f"{type(problem).__name__}: {problem}" if problem is not None else ""
    raise _not_an_array(value, what, why) from problem


def type_name(value: Any) -> str:
    """Name of an object's type, with its module."""
    return f"{type(value).__module__}.{type(value).__name__}"


def _by_cuda_interface(value: Any, writable: bool) -> DeviceArray | None:
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        return None
    missing = [key for key in ("shape", "typestr", "data") if interface.get(key) is None]
    if missing:
        raise ArrayError(
            explain(
                "a CUDA array interface must have shape, typestr and data",
                values=f"{type_name(value)} without {', '.join(missing)}",
                remedy="report it to the library of the array",
            )
        )
    if interface.get("mask") is not None:
        raise ArrayError(
            explain(
                "an array must have no mask, which would be lost",
                values=f"{type_name(value)} with a mask",
                remedy="pass data and mask as arrays of their own",
            )
        )
    stream = interface.get("stream")
    if "stream" not in interface or interface.get("version", 0) < 3:
        stream = _ordered_before_default(value)
    if stream == 0:
        raise ArrayError(
            explain(
                "the stream of a CUDA array interface must not be 0, which could be two streams",
                values=f"{type_name(value)} with stream 0",
                remedy="report it to the library of the array",
            )
        )
    dtype = _dtype_of(value, interface["typestr"])
    if dtype is None:
        return None
    pointer, read_only = interface["data"]
    shape = tuple(interface["shape"])
    _require_pointer(pointer or 0, shape, value)
    return DeviceArray.at(
        pointer or 0,
        shape,
        interface.get("strides"),
        dtype,
        device=_ordinal(value),
        writable=not read_only,
        stream=stream,
        owner=value,
    )


def _ordered_before_default(value: Any) -> int:
    """The legacy default stream, after what was written to an array whose interface names none.

    So it is with PyTorch's and JAX's: their interface is older than streams, and DLPack has the
    array's own stream waited for.
    """
    if hasattr(value, "__dlpack__"):
        # Of an element type that DLPack lacks, say: then the default stream must do.
        with contextlib.suppress(Exception):
            dlpack.borrow(value, stream=dlpack.LEGACY_STREAM)
    return dlpack.LEGACY_STREAM


def _dtype_of(value: Any, typestr: str) -> np.dtype[Any] | None:
    """Element type by an interface; None where DLPack must tell it."""
    own = getattr(value, "dtype", None)
    try:
        dtype: np.dtype[Any] | None = np.dtype(typestr)
    except TypeError:  # "<f1" of a float8
        dtype = None
    if isinstance(own, np.dtype) and (dtype is None or own.itemsize == dtype.itemsize):
        # The type string does not tell bfloat16 from any two bytes.
        return own
    if dtype is not None and (dtype.kind != "V" or own is None):
        return dtype
    if hasattr(value, "__dlpack__"):
        return None
    named = _by_name(str(own).rpartition(".")[2])
    if named is not None and (dtype is None or named.itemsize == dtype.itemsize):
        return named
    if dtype is None:
        raise ArrayError(
            explain(
                "elements must have a type of NumPy or of ml_dtypes",
                values=f"typestr {typestr!r} of {type_name(value)}",
                remedy="pip install ml_dtypes, or view the array as integers of one byte",
            )
        )
    return dtype


def _by_name(name: str) -> np.dtype[Any] | None:
    try:
        return as_dtype(name)
    except PlanError:
        return None


def _ordinal(value: Any) -> int:
    """Which GPU an array lies on; -1 if it does not say."""
    try:
        # First, as ``device.id`` counts the devices of all processes in some libraries.
        kind, ordinal = value.__dlpack_device__()
        return int(ordinal) if int(kind) == dlpack.CUDA else -1
    except Exception:  # none, or one that this array has no use for
        pass
    device = getattr(value, "device", None)
    for found in (getattr(device, "id", None), getattr(device, "index", None), device):
        if isinstance(found, int):
            return found
    return -1


def _by_host_protocols(value: Any, writable: bool) -> NDArray[Any] | None:
    try:
        buffer = memoryview(value)
    except (TypeError, BufferError):  # none, or none for these elements
        pass
    else:
        return np.asarray(buffer)
    if hasattr(value, "__array_interface__") or hasattr(value, "__array_struct__"):
        array = np.asarray(value)
        if array.dtype.kind != "V" or array.dtype.names is not None:
            return array
        dtype = _dtype_of(value, array.dtype.str)
        return None if dtype is None else array.view(dtype)
    return None


def _by_dlpack(value: Any, writable: bool) -> AnyArray | None:
    if not hasattr(value, "__dlpack__"):
        return None
    device_type, device_id = map(int, value.__dlpack_device__())
    if device_type in (dlpack.CPU, dlpack.CUDA_HOST):
        return _on_the_host(dlpack.borrow(value), value)
    if device_type in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        lent = dlpack.borrow(value, stream=dlpack.LEGACY_STREAM)
        _require_pointer(lent.pointer, lent.shape, value)
        return DeviceArray.at(
            lent.pointer,
            lent.shape,
            lent.strides,
            lent.dtype,
            # Managed memory is of no GPU: DLPack has 0 there, whatever the GPU.
            device=device_id if device_type == dlpack.CUDA else -1,
            writable=lent.writable,
            stream=dlpack.LEGACY_STREAM,
            owner=lent.loan,
        )
    refusal = ArrayError(
        explain(
            "arrays must lie in memory of the host or of a GPU of CUDA",
            values=f"{type_name(value)} on a device of kind {dlpack.device_name(device_type)}",
            remedy="copy it to the host first",
        )
    )
    if writable:
        raise refusal
    try:
        return _on_the_host(dlpack.borrow(value, dl_device=(dlpack.CPU, 0), copy=True), value)
    except Exception as error:
        raise refusal from error


def _on_the_host(lent: dlpack.Lent, value: Any) -> NDArray[Any]:
    _require_pointer(lent.pointer, lent.shape, value)
    return at_address(lent.pointer, lent.shape, lent.strides, lent.dtype, lent.writable, lent.loan)


def _on_host(value: Any) -> bool:
    """No protocol says that an array lies on a device: ``__array__`` would not copy from there."""
    if getattr(value, "__cuda_array_interface__", None) is not None:
        return False
    if not hasattr(value, "__dlpack_device__"):
        return True
    return int(value.__dlpack_device__()[0]) in (dlpack.CPU, dlpack.CUDA_HOST)


def _require_pointer(pointer: int, shape: tuple[int, ...], value: Any) -> None:
    if not pointer and 0 not in shape:
        raise ArrayError(
            explain(
                "an array with elements must have an address",
                values=f"{type_name(value)} of shape {shape} at address 0",
                remedy="pass an array whose memory has been allocated",
            )
        )


def _require_no_pending_operation(value: Any) -> None:
    """Refuse a tensor whose memory holds something else than its elements.

    Some libraries conjugate and negate by a mark on the tensor, which no protocol hands on.
    """
    for mark, operation in (("is_conj", "conjugate"), ("is_neg", "negative")):
        marked = getattr(value, mark, None)
        if callable(marked) and marked() is True:
            raise ArrayError(
                explain(
                    "the memory of an array must hold its elements",
                    values=f"{type_name(value)} that is the {operation} of what its memory holds",
                    remedy=f"call resolve_{mark[3:]}() on it first",
                )
            )


def _not_an_array(value: Any, what: str, why: str) -> ArrayError:
    return ArrayError(
        explain(
            f"{what} must be an array",
            values=f"{type(value).__name__}" + (f", {why}" if why else ""),
            remedy="pass a numpy array, or an object with __array_interface__, a buffer, "
            "__cuda_array_interface__ or __dlpack__",
        )
    )
