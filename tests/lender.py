"""A library that lends arrays by DLPack alone: structures packed by hand, as in dlpack.h.

It has no array behind: what it says of device, dtype, version and flags may be anything.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from numpy.typing import NDArray

_NEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_NAMES = {True: b"dltensor_versioned", False: b"dltensor"}

#: DLPack's type codes, by NumPy's kinds and by names of ml_dtypes.
CODES = {
    **{"i": 0, "u": 1, "f": 2, "c": 5, "b": 6},
    **{"bfloat16": 4, "float8_e3m4": 7, "float8_e4m3": 8, "float8_e4m3b11fnuz": 9},
    **{"float8_e4m3fn": 10, "float8_e4m3fnuz": 11, "float8_e5m2": 12, "float8_e5m2fnuz": 13},
    "float8_e8m0fnu": 14,
}


class Lender:
    """An array that can be had by DLPack alone.

    Args:
        array: the memory, shape, strides and (unless ``dtype`` is given) element type.
        dtype: code, bits and lanes.
        device: type and ordinal.
        versioned: lends as of DLPack 1.0, and not as before.
        version: major and minor, where versioned.
        read_only: flag, where versioned.
        in_c_order: gives no strides.
        byte_offset: how far the first element is from the address given.
        null: gives no address.
        has_deleter: is told when its loan ends.
    """

    def __init__(
        self,
        array: NDArray[Any],
        *,
        dtype: tuple[int, int, int] | None = None,
        device: tuple[int, int] = (1, 0),
        versioned: bool = True,
        version: tuple[int, int] = (1, 0),
        read_only: bool = False,
        in_c_order: bool = False,
        byte_offset: int = 0,
        null: bool = False,
        has_deleter: bool = True,
    ) -> None:
        self.array = array
        own = array.dtype
        code = CODES.get(own.name, CODES.get(own.kind, 3))
        self._dtype = dtype or (code, own.itemsize * 8, 1)
        self._device = device
        self._versioned, self._version, self._read_only = versioned, version, read_only
        self._byte_offset, self._null = byte_offset, null
        extents = [*array.shape, *(stride // own.itemsize for stride in array.strides)]
        self._extents = (ctypes.c_int64 * len(extents))(*extents)
        self._in_c_order = in_c_order
        self._has_deleter = has_deleter
        #: Options of each call of ``__dlpack__``.
        self.asked: list[dict[str, Any]] = []
        #: How often a loan was given back.
        self.given_back = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **options: Any) -> Any:
        if not self._versioned and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.asked.append(options)
        data = self.array.ctypes.data - self._byte_offset
        shape = ctypes.addressof(self._extents) if self.array.ndim else 0
        strides = 0 if self._in_c_order else shape + 8 * self.array.ndim
        tensor = struct.pack(
            "@QiiiBBHQQQ",
            0 if self._null else data,
            *self._device,
            self.array.ndim,
            *self._dtype,
            shape,
            strides,
            self._byte_offset,
        )
        deleter = ctypes.cast(_take_back, ctypes.c_void_p).value if self._has_deleter else 0
        owner = struct.pack("@QQ", 0, deleter)
        if self._versioned:
            head = struct.pack("@II", *self._version)
            packed = head + owner + struct.pack("@Q", int(self._read_only)) + tensor
        else:
            packed = tensor + owner
        room = ctypes.create_string_buffer(packed, len(packed))
        address = ctypes.addressof(room)
        _LENT[address] = self, room
        return _NEW(address, _NAMES[self._versioned], None)


#: What is lent lives until it is given back, whoever has forgotten the lender.
_LENT: dict[int, tuple[Lender, Any]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _take_back(address: int) -> None:
    lender, _ = _LENT.pop(address)
    lender.given_back += 1


class OnlyDLPack:
    """An array of another library, of which only its own DLPack is to be seen."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)
