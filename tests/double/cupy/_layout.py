"""Where the elements of an array lie, and the views of it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from cupy import _engine


@dataclasses.dataclass(frozen=True)
class Flags:
    c_contiguous: bool
    f_contiguous: bool
    owndata: bool

    def __getitem__(self, name: str) -> bool:
        if name not in ("C_CONTIGUOUS", "F_CONTIGUOUS", "OWNDATA"):
            raise KeyError(f"{name} is not defined for cupy.ndarray.flags")
        return bool(getattr(self, name.lower()))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Elements in device memory; it keeps no memory alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def host_view(self, device: int) -> np.ndarray:
        """The elements as NumPy sees them; raises unless they lie in memory of the device."""
        if self.size == 0:
            return np.empty(self.shape, self.dtype)
        reaches = [(size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)]
        low = sum(reach for reach in reaches if reach < 0)
        high = sum(reach for reach in reaches if reach > 0) + self.dtype.itemsize
        memory = _engine.host_view(self.pointer + low, high - low, device)
        return np.ndarray(self.shape, self.dtype, memory, -low, self.strides)

    def apply(self, function) -> Layout:
        """The layout of a view, as NumPy makes it of an array that nobody reads."""
        view = function(np.asarray(_Unread(self)).view(self.dtype))
        return Layout(
            view.__array_interface__["data"][0] if self.size else self.pointer,
            view.shape,
            view.strides,
            view.dtype,
        )

    def index(self, key) -> Layout:
        keys = key if isinstance(key, tuple) else (key,)
        for each in keys:
            if isinstance(each, bool) or not (
                each is None or each is ... or isinstance(each, (int, np.integer, slice))
            ):
                raise NotImplementedError(f"the double has basic indexing alone, not {each!r}")
        if not any(each is ... for each in keys):
            keys = (*keys, ...)  # a view also where one element is left
        return self.apply(lambda array: array[keys])

    def reshape(self, shape) -> Layout | None:
        """The layout of another shape, or None where it takes a copy."""
        dummy = Layout(self.pointer, self.shape, self.strides, self.dtype)
        np.broadcast_to(np.zeros((), np.uint8), self.shape).reshape(shape)  # raises if impossible
        try:
            return dummy.apply(lambda array: _reshape_in_place(array, shape))
        except (ValueError, AttributeError):
            return None

    def contiguous(self) -> tuple[bool, bool]:
        """Whether the order of the elements is that of C, and of Fortran."""
        flags = np.asarray(_Unread(self)).flags
        return flags.c_contiguous, flags.f_contiguous


def _reshape_in_place(array: np.ndarray, shape) -> np.ndarray:
    try:
        return np.reshape(array, shape, copy=False)  # never reads
    except TypeError:  # before NumPy 2.1
        view = array.view()
        view.shape = shape
        return view


class _Unread:
    """What NumPy takes for an array of raw items at the device's address."""

    def __init__(self, layout: Layout) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|V{layout.dtype.itemsize}",
            "data": (layout.pointer, False),
        }
