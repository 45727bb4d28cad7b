"""The memory that the process has taken: of devices, and pinned memory of the host.

All of it is host memory underneath. It is poisoned when it is fresh and when it is freed, and it
lies between guards, so a kernel that writes past its array is found out.
"""

from __future__ import annotations

import bisect
import collections
import threading

import numpy as np

from cupy import _settings
from cupy._errors import CUDARuntimeError, OutOfMemoryError, explained

POISON = 0xA5
ALIGNMENT = 512
_GUARD = 512
#: So many freed blocks are kept before the host's allocator gets them back: a stale pointer meets
#: poison rather than somebody else's data.
_QUARANTINE_NBYTES = 32 << 20
_QUARANTINE_BLOCKS = 256


class Block:
    """Memory between two guards."""

    def __init__(self, nbytes: int, device: int, offset: int) -> None:
        self.nbytes = nbytes
        self.device = device
        #: Nobody holds it any more; work in its stream may still use it.
        self.released = False
        self.freed = False
        whole = np.full(_GUARD + ALIGNMENT + nbytes + _GUARD, POISON, np.uint8)
        first = _GUARD + -(whole.ctypes.data + _GUARD) % ALIGNMENT
        self.bytes = whole[first : first + nbytes]
        self._guards = (whole[first - _GUARD : first], whole[first + nbytes :][:_GUARD])
        self.address = whole.ctypes.data + first
        self.pointer = self.address + offset

    def was_overrun(self) -> bool:
        """Whether somebody has written before or after it since this was last asked."""
        if all(bool((guard == POISON).all()) for guard in self._guards):
            return False
        for guard in self._guards:
            guard.fill(POISON)
        return True


class Table:
    """The live blocks of one kind, found by a pointer into them."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._quarantine: collections.deque[Block] = collections.deque()
        self._quarantine_nbytes = 0

    def add(self, nbytes: int, device: int) -> Block:
        block = Block(nbytes, device, self.offset)
        with self._lock:
            bisect.insort(self._starts, block.pointer)
            self._blocks[block.pointer] = block
        return block

    def free(self, block: Block) -> None:
        with self._lock:
            block.freed = True
            self._starts.remove(block.pointer)
            del self._blocks[block.pointer]
            block.bytes.fill(POISON)
            self._quarantine.append(block)
            self._quarantine_nbytes += block.nbytes
            while (
                self._quarantine_nbytes > _QUARANTINE_NBYTES
                or len(self._quarantine) > _QUARANTINE_BLOCKS
            ):
                self._quarantine_nbytes -= self._quarantine.popleft().nbytes

    def find(self, pointer: int) -> Block | None:
        """The block that a pointer points into, or just behind."""
        with self._lock:
            index = bisect.bisect_right(self._starts, pointer) - 1
            if index < 0:
                return None
            block = self._blocks[self._starts[index]]
            return block if pointer - block.pointer <= block.nbytes else None

    def knew(self, pointer: int) -> bool:
        """Whether the pointer is into a block that was freed a short time ago."""
        with self._lock:
            return any(0 <= pointer - old.pointer < old.nbytes for old in self._quarantine)

    def view(self, pointer: int, nbytes: int, released_too: bool) -> np.ndarray:
        """The bytes at a pointer; raises unless all of them lie in one live block."""
        block = self.find(pointer)
        if block is None or (block.released and not released_too):
            what = "freed memory" if block or self.knew(pointer) else "no allocation"
            raise explained(CUDARuntimeError, 700, f"{what} at {pointer:#x}")
        start = pointer - block.pointer
        if nbytes < 0 or start + nbytes > block.nbytes:
            raise explained(
                CUDARuntimeError,
                700,
                f"bytes {start} to {start + nbytes} of {block.nbytes} at {block.pointer:#x}",
            )
        return block.bytes[start : start + nbytes]


device_memory = Table(_settings.OFFSET)
pinned_memory = Table(0)
_used: collections.Counter[int] = collections.Counter()
_use_lock = threading.Lock()


def rounded(nbytes: int) -> int:
    """What CuPy's pool would take."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def take(nbytes: int, device: int) -> Block:
    """Allocate memory of a device."""
    with _use_lock:
        if _used[device] + rounded(nbytes) > _settings.MEMORY_NBYTES:
            raise OutOfMemoryError(rounded(nbytes), _used[device])
        _used[device] += rounded(nbytes)
    return device_memory.add(nbytes, device)


def release(block: Block) -> None:
    """The pool may hand it out again, in the order of the stream that it was taken in."""
    block.released = True
    with _use_lock:
        _used[block.device] -= rounded(block.nbytes)


def used(device: int) -> int:
    return _used[device]
