"""GPU memory for the executor: staged through pinned host memory, or handed to MPI as it is.

Staged, chunks are copied to pinned memory while others are on the network, and the other way round
on the receiving side. A chunk that is not one run of memory is packed by a kernel which writes to
the pinned memory itself, so there is no second copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from xmesh.arrays import Buffer
from xmesh.device.array import DeviceArray, address_of
from xmesh.device.gpu import DeviceBytes, Fence, Gpu
from xmesh.device.regions import Pair, c_strides
from xmesh.staging import Staging


class DeviceMemory(ABC):
    """See ``xmesh.memory.Memory``; what both ways have in common.

    Args:
        gpu: where the arrays lie.
        staging: a pool of memory of the kind that messages take.
    """

    loads_ahead = 2
    #: Buffers for messages are memory of the host.
    _through_host: bool

    def __init__(self, gpu: Gpu, staging: Staging) -> None:
        self.gpu = gpu
        self.staging = staging
        gpu.compile()

    @abstractmethod
    def ready(self, arrays: Sequence[DeviceArray]) -> Sequence[Fence]:
        """See ``Memory``."""

    @abstractmethod
    def in_place(self, view: DeviceArray) -> Buffer | None:
        """See ``Memory``."""

    def pack(self, views: Sequence[DeviceArray], buffer: Buffer) -> Fence:
        """See ``Memory``."""
        pairs = _packing(views, _address(buffer))
        self.gpu.copy(pairs, self.gpu.outgoing, to_host=self._through_host)
        return self.gpu.fence(self.gpu.outgoing)

    def unpack(self, buffer: Buffer, views: Sequence[DeviceArray]) -> Fence:
        """See ``Memory``."""
        pairs = map(_reversed, _packing(views, _address(buffer)))
        self.gpu.copy(pairs, self.gpu.incoming, from_host=self._through_host)
        return self.gpu.fence(self.gpu.incoming)

    def copy(self, pairs: Iterable[tuple[DeviceArray, DeviceArray]]) -> Fence:
        """See ``Memory``."""
        self.gpu.copy(
            (
                Pair(
                    source.pointer,
                    destination.pointer,
                    source.shape,
                    source.addresses.strides,
                    destination.addresses.strides,
                    source.dtype.itemsize,
                )
                for source, destination in pairs
            ),
            self.gpu.incoming,
        )
        return self.gpu.fence(self.gpu.incoming)

    def _after_producers(self, arrays: Sequence[DeviceArray]) -> list[Fence]:
        """Let both streams wait for what arrays depend on; the fences of that."""
        fences = self.gpu.producers(arrays)
        for stream in (self.gpu.outgoing, self.gpu.incoming):
            self.gpu.let_wait(stream, fences)
        return fences


class StagedMemory(DeviceMemory):
    """Chunks go through pinned host memory: for an MPI that does not know GPU memory.

    Args:
        gpu: where the arrays lie.
        slot_nbytes: see Staging.
        limit_nbytes: see Staging.
    """

    _through_host = True

    def __init__(self, gpu: Gpu, slot_nbytes: int, limit_nbytes: int) -> None:
        super().__init__(gpu, Staging(slot_nbytes, limit_nbytes, gpu.pinned_bytes))

    def ready(self, arrays: Sequence[DeviceArray]) -> Sequence[Fence]:
        """Our streams wait for the caller's; the host need not."""
        self._after_producers(arrays)
        return ()

    def in_place(self, view: DeviceArray) -> Buffer | None:
        """None: nothing is sent from where it lies."""
        return None


class AwareMemory(DeviceMemory):
    """An MPI that knows GPU memory takes chunks from where they lie, if each is one run of memory.

    Args:
        gpu: where the arrays lie.
        slot_nbytes: see Staging.
        limit_nbytes: see Staging.
    """

    _through_host = False

    def __init__(self, gpu: Gpu, slot_nbytes: int, limit_nbytes: int) -> None:
        super().__init__(gpu, Staging(slot_nbytes, limit_nbytes, gpu.device_bytes))

    def ready(self, arrays: Sequence[DeviceArray]) -> Sequence[Fence]:
        """MPI knows no streams: the host sees to it that the caller's have come so far."""
        return self._after_producers(arrays)

    def in_place(self, view: DeviceArray) -> Buffer | None:
        """The bytes of a view that is one run of memory in C order."""
        if not view.addresses.flags.c_contiguous:
            return None
        return DeviceBytes(view.pointer, view.nbytes, view)


def _packing(views: Sequence[DeviceArray], at: int) -> Iterator[Pair]:
    """Views, one after the other, to an address."""
    for view in views:
        addresses = view.addresses
        shape, itemsize = addresses.shape, addresses.itemsize
        yield Pair(view.pointer, at, shape, addresses.strides, c_strides(shape, itemsize), itemsize)
        at += addresses.nbytes


def _reversed(pair: Pair) -> Pair:
    return pair._replace(
        source=pair.destination,
        destination=pair.source,
        source_strides=pair.destination_strides,
        destination_strides=pair.source_strides,
    )


def _address(buffer: Buffer) -> int:
    return buffer.pointer if isinstance(buffer, DeviceBytes) else address_of(buffer)
