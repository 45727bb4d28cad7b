"""Device arrays as the executor sees them: addresses, shape and strides, with no library behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmesh.arrays import at_address


@dataclass(frozen=True, eq=False, repr=False)  # whose own would print what is in the memory
class DeviceArray:
    """A strided array in the memory of a GPU.

    Attributes:
        addresses: an ndarray over the device's addresses. It serves for shapes, strides and
            overlaps, and is never read or written: the host has no access to that memory.
        device: ordinal of the GPU, as CUDA numbers them in this process; -1 where the array's
            library does not say, and for managed memory, which is of no GPU.
        writable: it may be written to.
        stream: the CUDA stream that wrote it last, where its library says so; else None. 0 and 1
            are the legacy default stream, 2 the default stream of the thread.
        owner: keeps the memory alive.
    """

    addresses: NDArray[Any]
    device: int
    writable: bool
    stream: int | None
    owner: Any

    def __repr__(self) -> str:
        return (
            f"DeviceArray(pointer={self.pointer:#x}, shape={self.shape}, dtype={self.dtype}, "
            f"device={self.device})"
        )

    @classmethod
    def at(
        cls,
        pointer: int,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dtype: np.dtype[Any],
        *,
        device: int,
        writable: bool,
        stream: int | None = None,
        owner: Any = None,
    ) -> DeviceArray:
        """An array at an address.

        Args:
            pointer: address of its first element; anything where it has no elements.
            shape: its extents.
            strides: in bytes; None for C order.
            dtype: element type.
            device: see the class.
            writable: see the class.
            stream: see the class.
            owner: see the class.
        """
        addresses = at_address(pointer, shape, strides, dtype)
        return cls(addresses, device, writable, stream, owner)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self.addresses.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self.addresses.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.addresses.nbytes

    @property
    def pointer(self) -> int:
        """Address of the first element; 0 where there is none."""
        return address_of(self.addresses)

    def __getitem__(self, index: tuple[Any, ...]) -> DeviceArray:
        """A region: slices, and an ellipsis."""
        return replace(self, addresses=self.addresses[index])


def address_of(array: NDArray[Any]) -> int:
    """Address of the first element of an array; 0 where there is none."""
    return int(array.__array_interface__["data"][0]) if array.size else 0
