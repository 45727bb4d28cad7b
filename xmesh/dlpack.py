"""DLPack: the memory of another library's array, from the capsule in which it lends it.

Read field by field as dmlc's dlpack.h lays it out, since neither NumPy's nor CuPy's reader takes
bfloat16 on every device, float8, or says whether what it read may be written to.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmesh.dtypes import as_dtype
from xmesh.errors import ArrayError, PlanError, explain

#: Device types: memory that the host reads, and memory of a GPU of CUDA.
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13

_MAX_VERSION = (1, 0)
_READ_ONLY = 1
#: Read once the arrays are ready on the legacy default stream, which the protocol numbers 1.
LEGACY_STREAM = 1

_DEVICES = {
    1: "CPU",
    2: "CUDA",
    3: "CUDA pinned host",
    4: "OpenCL",
    7: "Vulkan",
    8: "Metal",
    9: "VPI",
    10: "ROCm",
    11: "ROCm pinned host",
    12: "extension",
    13: "CUDA managed",
    14: "oneAPI",
    15: "WebGPU",
    16: "Hexagon",
    17: "MAIA",
    18: "Trainium",
}
_PLAIN = {0: "int", 1: "uint", 2: "float", 5: "complex", 6: "bool"}
_NUMPY = {
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
_ML_DTYPES = {
    (4, 16): "bfloat16",
    (7, 8): "float8_e3m4",
    (8, 8): "float8_e4m3",
    (9, 8): "float8_e4m3b11fnuz",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _Tensor),
    )


# Prototypes of our own: attributes of ctypes.pythonapi are shared with the rest of the process.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
# The interpreter stays locked, as when a capsule that nobody read is dropped.
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

# A capsule keeps the address of its name, so the names must stay where they are.
_NAME, _USED_NAME = b"dltensor", b"used_dltensor"
_VERSIONED_NAME, _USED_VERSIONED_NAME = b"dltensor_versioned", b"used_dltensor_versioned"


class Loan:
    """What a capsule lent; it is given back, once, when nothing refers to this object."""

    def __init__(self, managed: int, deleter: int | None) -> None:
        self._managed = managed
        self._delete = _Deleter(deleter) if deleter else None

    def give_back(self) -> None:
        """Call the lender's deleter, unless that was done; the memory must not be used again."""
        delete, self._delete = self._delete, None
        if delete is not None:
            delete(self._managed)

    def __del__(self) -> None:
        self.give_back()


@dataclass(frozen=True)
class Lent:
    """An array in some memory, as DLPack describes it.

    Attributes:
        pointer: address of its first element; 0 where it has none.
        shape: its extents.
        strides: in bytes; None for C order.
        dtype: element type, of NumPy or of ml_dtypes.
        device_type: DLPack's number of the kind of device.
        device_id: ordinal of the device; DLPack has 0 for host and for managed memory.
        writable: it may be written to. Lenders from before DLPack 1.0 cannot say so, and arrays
            of some never may be: False there, as NumPy has it.
        loan: keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    device_type: int
    device_id: int
    writable: bool
    loan: Loan


def device_name(device_type: int) -> str:
    """What DLPack calls a kind of device."""
    return _DEVICES.get(device_type, f"unknown (type {device_type})")


def borrow(value: Any, **options: Any) -> Lent:
    """Read an array through its ``__dlpack__``.

    Args:
        value: the array.
        options: for its ``__dlpack__``: ``stream`` on a device, or ``dl_device`` and ``copy``.

    Raises:
        ArrayError: elements of a type that neither NumPy nor ml_dtypes has, a version of DLPack
            with other structures, or what is no capsule.
        Exception: whatever the other library raises.
    """
    try:
        capsule = value.__dlpack__(max_version=_MAX_VERSION, **options)
    except TypeError:  # from before DLPack 1.0
        capsule = value.__dlpack__(**options)
    return _read(capsule)


def _read(capsule: Any) -> Lent:
    """Take over what a capsule lends."""
    versioned = bool(_is_valid(capsule, _VERSIONED_NAME))
    if not versioned and not _is_valid(capsule, _NAME):
        raise ArrayError(
            explain(
                "__dlpack__ must return a capsule that was not read before",
                values=f"{capsule!r}",
                remedy="report it to the library of the array",
            )
        )
    address = _get_pointer(capsule, _VERSIONED_NAME if versioned else _NAME)
    # Now it is ours: the capsule would have called the deleter when dropped.
    _set_name(capsule, _USED_VERSIONED_NAME if versioned else _USED_NAME)
    kind: type[_Managed] | type[_ManagedVersioned] = _ManagedVersioned if versioned else _Managed
    managed = kind.from_address(address)
    loan = Loan(address, managed.deleter)
    try:
        writable = False
        if isinstance(managed, _ManagedVersioned):
            if managed.major != _MAX_VERSION[0]:
                raise ArrayError(
                    explain(
                        f"DLPack must have version {_MAX_VERSION[0]}",
                        values=f"version {managed.major}.{managed.minor}",
                        remedy="pass a NumPy or CuPy array of the same memory",
                    )
                )
            writable = not managed.flags & _READ_ONLY
        return _describe(managed.dl_tensor, writable, loan)
    except BaseException:
        # At once: the error's traceback would keep the memory for as long as anyone keeps it.
        loan.give_back()
        raise


def _describe(tensor: Any, writable: bool, loan: Loan) -> Lent:
    dtype = _dtype(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = None
    if tensor.ndim and tensor.strides:
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides[: tensor.ndim])
    pointer = 0 if 0 in shape else (tensor.data or 0) + tensor.byte_offset
    device = tensor.device
    return Lent(
        pointer, shape, strides, dtype, device.device_type, device.device_id, writable, loan
    )


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    name = _ML_DTYPES.get((code, bits), "")
    if code == 6 and bits == 8:
        name = "bool"
    elif code in _PLAIN and f"{_PLAIN[code]}{bits}" in _NUMPY:
        name = f"{_PLAIN[code]}{bits}"
    if not name or lanes != 1:
        raise ArrayError(
            explain(
                "elements must have a type of NumPy or of ml_dtypes, and a whole number of bytes",
                values=f"DLPack type code {code}, {bits} bits, {lanes} lanes",
                remedy="view the array as integers of one byte, in the library that it is from",
            )
        )
    try:
        return as_dtype(name)
    except PlanError as error:
        raise ArrayError(
            explain(
                "bfloat16 and float8 elements need the package ml_dtypes",
                values=f"{name}, which is not there",
                remedy="pip install --upgrade ml_dtypes",
            )
        ) from error
