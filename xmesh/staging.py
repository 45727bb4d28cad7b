"""Staging: a bounded pool of memory for chunks that are packed on their way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xmesh.arrays import Buffer


def host_bytes(nbytes: int) -> Buffer:
    """Ordinary memory."""
    return np.empty(nbytes, np.uint8)


class Staging:
    """Slots of one size, made when first needed and kept for later calls.

    Args:
        slot_nbytes: size of a slot: the largest chunk.
        limit_nbytes: memory of all slots together; room for at least four slots is always given.
        allocate: makes a slot of so many bytes.
    """

    def __init__(
        self,
        slot_nbytes: int,
        limit_nbytes: int,
        allocate: Callable[[int], Buffer] = host_bytes,
    ) -> None:
        self.slot_nbytes = slot_nbytes
        self.max_slots = max(4, limit_nbytes // max(1, slot_nbytes))
        self.num_slots = 0
        self._allocate = allocate
        self._free: list[Buffer] = []
        #: Slots in use, by the buffer that stands for each.
        self._taken: dict[int, Buffer] = {}

    @property
    def nbytes(self) -> int:
        """Memory that the pool holds now."""
        return self.num_slots * self.slot_nbytes

    def prepare(self, count: int) -> None:
        """Make slots now rather than on the way, ``count`` of them and no more than the limit."""
        while self.num_slots < min(count, self.max_slots):
            self._free.append(self._allocate(self.slot_nbytes))
            self.num_slots += 1

    def take(self, nbytes: int, must: bool = False) -> Buffer | None:
        """A buffer of ``nbytes``, or None while all slots are in use.

        Args:
            nbytes: at most ``slot_nbytes``.
            must: make one more slot past the limit rather than return None; for the one message
                that others may be waiting for.
        """
        assert nbytes <= self.slot_nbytes, "a slot holds the largest chunk"
        if not self._free:
            if self.num_slots >= self.max_slots and not must:
                return None
            self._free.append(self._allocate(self.slot_nbytes))
            self.num_slots += 1
        slot = self._free.pop()
        buffer = slot[:nbytes]
        self._taken[id(buffer)] = slot
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Return a buffer that ``take`` gave."""
        slot = self._taken.pop(id(buffer))
        if self.num_slots <= self.max_slots:
            self._free.append(slot)
        else:
            self.num_slots -= 1
