"""The default pools."""

from __future__ import annotations

from cupy.cuda.memory import MemoryPool
from cupy.cuda.pinned_memory import PinnedMemoryPool

_device = MemoryPool()
_pinned = PinnedMemoryPool()


def get_default_memory_pool():
    return _device


def get_default_pinned_memory_pool():
    return _pinned
