"""Device memory as CuPy hands it out."""

from __future__ import annotations

from cupy import _devices, _engine, _memory
from cupy._errors import OutOfMemoryError
from cupy.cuda import runtime
from cupy.cuda.device import Device
from cupy.cuda.stream import get_current_stream

__all__ = ["OutOfMemoryError"]


class BaseMemory:
    ptr: int
    size: int
    device_id: int

    def __int__(self):
        return self.ptr

    @property
    def device(self):
        return Device(self.device_id)


class Memory(BaseMemory):
    """Memory that lives as long as this object, and until the work before its end is done."""

    def __init__(self, size):
        self.device_id = _devices.current()
        self.size = _memory.rounded(size)
        self.ptr = 0
        self._holding = None
        if size > 0:
            _engine.collect()
            _engine.check(self.device_id)
            stream = _engine.stream_of(get_current_stream().ptr)
            self._holding = (_memory.take(size, self.device_id), stream)
            self.ptr = self._holding[0].pointer

    def __del__(self):
        if getattr(self, "_holding", None) is not None:
            _engine.later(_engine.free, self._holding)


class UnownedMemory(BaseMemory):
    """Memory of somebody else, who is kept alive."""

    def __init__(self, ptr, size, owner, device_id=-1):
        if device_id < 0:
            if ptr == 0:
                raise RuntimeError("for a null pointer UnownedMemory needs device_id")
            device_id = runtime.pointerGetAttributes(ptr).device
        self.ptr = ptr
        self.size = size
        self.device_id = device_id
        self._owner = owner


class MemoryPointer:
    ptr: int
    mem: BaseMemory
    device_id: int

    def __init__(self, mem, offset):
        if mem.ptr == 0 and offset != 0:
            raise AssertionError("an offset to a null pointer")
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    @property
    def device(self):
        return Device(self.device_id)

    def __int__(self):
        return self.ptr

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__

    def __sub__(self, offset):
        return self + -offset


class MemoryPool:
    """What CuPy's default pool would report; freed memory is not kept."""

    def used_bytes(self):
        return _engine.allocated_nbytes(_devices.current())

    def total_bytes(self):
        return _engine.allocated_nbytes(_devices.current())

    def free_all_blocks(self, stream=None):
        _engine.collect()


def alloc(size):
    return MemoryPointer(Memory(size), 0)
