"""Pinned memory of the host."""

from __future__ import annotations

import ctypes
import functools

from cupy import _devices, _engine, _memory

_UNIT = 512


class PinnedMemory:
    def __init__(self, size, flags=0):
        self.size = size
        self.ptr = 0
        self._block = None
        if size > 0:
            self._block = _memory.pinned_memory.add(size, _devices.current())
            self.ptr = self._block.pointer

    def __int__(self):
        return self.ptr

    def __del__(self):
        if getattr(self, "_block", None) is not None:
            # At once: CuPy's pool hands it out again, whatever still copies from it or into it.
            _engine.later(_memory.pinned_memory.free, self._block)


class PinnedMemoryPointer:
    """A pointer that NumPy can take for a buffer.

    Before Python 3.12 only types of C are buffers, so each object is also an array of ctypes that
    lies in the pinned memory.
    """

    ptr: int
    mem: PinnedMemory

    def __new__(cls, mem, offset):
        return _of_size(mem.size - offset).from_address(mem.ptr + offset)

    def __init__(self, mem, offset):
        self.mem = mem
        self.ptr = mem.ptr + offset

    def __int__(self):
        return self.ptr

    def __add__(self, offset):
        return PinnedMemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__

    def __sub__(self, offset):
        return self + -offset

    def size(self):
        return self.mem.size - (self.ptr - self.mem.ptr)


@functools.cache
def _of_size(nbytes: int) -> type:
    return type("PinnedMemoryPointer", (PinnedMemoryPointer, ctypes.c_byte * nbytes), {})


class PinnedMemoryPool:
    """Freed memory is not kept, but poisoned."""

    def free_all_blocks(self):
        _engine.collect()

    def n_free_blocks(self):
        return 0


def alloc_pinned_memory(size):
    _engine.collect()
    rounded = 1 << (max(size, _UNIT) - 1).bit_length() if size else 0  # as CuPy's pool does
    return PinnedMemoryPointer(PinnedMemory(rounded), 0)
