"""Memory: how regions of arrays get into messages and out of them, by where the arrays lie.

What takes time on its own, such as a copy on a GPU, gives a fence; memory of the host gives none,
as its copies are done when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from xmesh.arrays import Buffer, contiguous_bytes, pack, raw, unpack
from xmesh.staging import Staging


class Fence(Protocol):
    """Work under way."""

    @property
    def done(self) -> bool:
        """It has ended."""


class Memory(Protocol):
    """Memory of one kind, with a pool for chunks that cannot be sent from where they lie.

    A view is an array of this memory, or a region of one.
    """

    @property
    def staging(self) -> Staging:
        """Where chunks are packed."""

    @property
    def loads_ahead(self) -> int:
        """Chunks that may be on their way into staging memory, beyond those being sent."""

    def ready(self, arrays: Sequence[Any]) -> Sequence[Fence]:
        """What must end before these arrays are read or written by a transport, or here."""

    def in_place(self, view: Any) -> Buffer | None:
        """The bytes of a view for a message, or None where they must be packed."""

    def pack(self, views: Sequence[Any], buffer: Buffer) -> Fence | None:
        """Copy views, one after the other in C order, into bytes that they fill exactly."""

    def unpack(self, buffer: Buffer, views: Sequence[Any]) -> Fence | None:
        """Inverse of ``pack``."""

    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> Fence | None:
        """Copy each first view to the second, both in this memory."""


class HostMemory:
    """Memory that the host reads and writes; views are NumPy arrays."""

    loads_ahead = 0

    def __init__(self, staging: Staging) -> None:
        self.staging = staging

    def ready(self, arrays: Sequence[Any]) -> Sequence[Fence]:
        """Nothing: what the host wrote is there."""
        return ()

    def in_place(self, view: Any) -> Buffer | None:
        """The bytes of a view that is one run of memory in C order."""
        return contiguous_bytes(view)

    def pack(self, views: Sequence[Any], buffer: Any) -> None:
        """See ``Memory``; done on return."""
        pack(views, buffer)

    def unpack(self, buffer: Any, views: Sequence[Any]) -> None:
        """See ``Memory``; done on return."""
        unpack(buffer, views)

    def copy(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """See ``Memory``; done on return."""
        for source, destination in pairs:
            np.copyto(raw(destination), raw(source))
