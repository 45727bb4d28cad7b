"""Staging: a bounded pool of memory for chunks that are packed on their way."""

from __future__ import annotations

import numpy as np

from xmesh.arrays import Bytes


class Staging:
    """Slots of one size, made when first needed and kept for later calls.

    Args:
        slot_nbytes: size of a slot: the largest chunk.
        limit_nbytes: memory of all slots together; room for at least four slots is always given.
    """

    def __init__(self, slot_nbytes: int, limit_nbytes: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.max_slots = max(4, limit_nbytes // max(1, slot_nbytes))
        self.num_slots = 0
        self._free: list[Bytes] = []

    @property
    def nbytes(self) -> int:
        """Memory that the pool holds now."""
        return self.num_slots * self.slot_nbytes

    def take(self, nbytes: int, must: bool = False) -> Bytes | None:
        """A buffer of ``nbytes``, or None while all slots are in use.

        Args:
            nbytes: at most ``slot_nbytes``.
            must: make one more slot past the limit rather than return None; for the one message
                that others may be waiting for.
        """
        if not self._free:
            if self.num_slots >= self.max_slots and not must:
                return None
            self.num_slots += 1
            self._free.append(np.empty(self.slot_nbytes, np.uint8))
        return self._free.pop()[:nbytes]

    def give(self, buffer: Bytes) -> None:
        """Return a buffer that ``take`` gave."""
        slot = buffer.base
        if isinstance(slot, np.ndarray) and self.num_slots <= self.max_slots:
            self._free.append(slot)
        else:
            self.num_slots -= 1
