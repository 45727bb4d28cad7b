"""What ``cupy.cuda`` has of the names that the double provides."""

from __future__ import annotations

from cupy.cuda import device, memory, pinned_memory, runtime, stream
from cupy.cuda.device import Device, get_device_id
from cupy.cuda.memory import MemoryPointer, UnownedMemory, alloc
from cupy.cuda.pinned_memory import PinnedMemoryPointer, alloc_pinned_memory
from cupy.cuda.stream import Event, ExternalStream, Stream, get_current_stream, get_elapsed_time

__all__ = [
    "Device",
    "Event",
    "ExternalStream",
    "MemoryPointer",
    "PinnedMemoryPointer",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "device",
    "get_current_stream",
    "get_device_id",
    "get_elapsed_time",
    "memory",
    "pinned_memory",
    "runtime",
    "stream",
]
