"""Exchange of arrays by DLPack (https://dmlc.github.io/dlpack/latest/)."""

from __future__ import annotations

import ctypes
import warnings

import numpy as np

from cupy import _engine

CUDA = 2  # the type of device
_KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_VERSION = (1, 0)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_NAMES = {_Managed: b"dltensor", _Versioned: b"dltensor_versioned"}
_USED = {_Managed: b"used_dltensor", _Versioned: b"used_dltensor_versioned"}

_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_new = _api.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_is_valid = _api.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = _api.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_rename = _api.PyCapsule_SetName
_rename.restype, _rename.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
# The same functions for a capsule that is being destroyed: it must not be referred to again.
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

_exported: dict[int, tuple] = {}  # by address: the structure and what it needs


@_Deleter
def _delete(address):
    _exported.pop(address, None)


@_Destructor
def _destroy(capsule):
    try:
        _forget_unused(capsule)
    except SystemError:  # what a first call raises where the consumer has just raised something
        _forget_unused(capsule)


def _forget_unused(capsule) -> None:
    for name in _NAMES.values():  # a capsule that was used has another name
        if _dying_is_valid(capsule, name):
            _exported.pop(_dying_pointer(capsule, name), None)


def export(array, stream, max_version, dl_device, copy):
    """A capsule for a consumer that works on a stream."""
    if dl_device not in (None, array.__dlpack_device__()) or copy:
        raise BufferError("the double exports to the array's own device, without a copy")
    if array.dtype.kind not in _KINDS:
        raise BufferError(f"DLPack has no dtype {array.dtype}")
    _order(stream)
    kind = _Versioned if max_version is not None and max_version[0] >= 1 else _Managed
    managed = kind()
    managed.deleter = _delete
    shape = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
    strides = (ctypes.c_int64 * max(1, array.ndim))(
        *(step // array.itemsize for step in array.strides)
    )
    managed.tensor = _Tensor(
        array.data.ptr,
        CUDA,
        array.data.device_id,
        array.ndim,
        _KINDS[array.dtype.kind],
        8 * array.itemsize,
        1,
        shape,
        strides,
        0,
    )
    if kind is _Versioned:
        managed.major, managed.minor = _VERSION
    address = ctypes.addressof(managed)
    _exported[address] = (managed, array, shape, strides)
    return _new(address, _NAMES[kind], _destroy)


def _order(stream) -> None:
    """Make the consumer's stream wait for the current one."""
    from cupy.cuda.stream import get_current_stream

    if stream is None:
        stream = 1
    if not isinstance(stream, int) or stream < -1:
        raise ValueError(f"a stream of DLPack is -1, 1, 2 or larger, not {stream!r}")
    if stream == 0:
        warnings.warn("DLPack has no stream 0; the default stream is 1", stacklevel=3)
    mine = get_current_stream()
    if stream != -1 and (stream or 1) != (mine.ptr or 1):
        marker = _engine.Marker()
        _engine.enqueue(mine.ptr, marker)
        _engine.enqueue(stream, _engine.WaitFor(marker))


class _Owner:
    """Calls the producer's deleter when nobody needs the memory any more."""

    def __init__(self, managed) -> None:
        self._managed = managed

    def __del__(self):
        if self._managed.deleter:
            self._managed.deleter(ctypes.addressof(self._managed))


def from_dlpack(array):
    """An array of the double in the memory of another one."""
    from cupy._array import ndarray
    from cupy.cuda.device import Device
    from cupy.cuda.memory import MemoryPointer, UnownedMemory
    from cupy.cuda.stream import get_current_stream

    device_type, device = array.__dlpack_device__()
    if device_type != CUDA:
        raise RuntimeError("the DLPack tensor is not of a CUDA device")
    with Device(device):
        stream = get_current_stream().ptr or 1
        try:
            capsule = array.__dlpack__(stream=stream, max_version=_VERSION)
        except TypeError:  # a producer of an older standard
            capsule = array.__dlpack__(stream=stream)
    kinds = [kind for kind, name in _NAMES.items() if _is_valid(capsule, name)]
    if not kinds:
        raise ValueError("not a capsule of DLPack, or used before")
    kind, name = kinds[0], _NAMES[kinds[0]]
    managed = kind.from_address(_pointer(capsule, name))
    _rename(capsule, _USED[kind])
    owner = _Owner(managed)
    tensor = managed.tensor
    code = {number: letter for letter, number in _KINDS.items()}[tensor.code]
    dtype = np.dtype(f"{code}{tensor.bits // 8}")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = None
    if tensor.strides:
        strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    memory = UnownedMemory((tensor.data or 0) + tensor.byte_offset, 0, owner, tensor.device_id)
    return ndarray(shape, dtype, MemoryPointer(memory, 0), strides)
