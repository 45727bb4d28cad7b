"""One rank's part of one call over NCCL: everything is given to streams, and nothing waits.

Chunks that are not one run of memory pass through slots of device memory: they are packed on one
stream, travel on another, and are unpacked on a third, with events in between, so that copies are
hidden under the travel of other chunks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from xmesh.device.gpu import DeviceBytes, Gpu
from xmesh.device.memory import AwareMemory
from xmesh.execution import view_of
from xmesh.nccl.communicators import Communicator, Group
from xmesh.nccl.program import Launch, NcclProgram, Operation

#: Launches given to the GPU ahead; a full queue of CUDA would block the host.
_LAUNCHES_AHEAD = 64
#: Seconds between looks for errors that NCCL met on its own.
_CHECK_S = 5e-3


class Slots:
    """A ring of device memory; each slot is used again when events say so.

    Args:
        gpu: where.
        nbytes: of one slot.
        count: slots at the most; they are made when first needed.
    """

    def __init__(self, gpu: Gpu, nbytes: int, count: int) -> None:
        self._gpu, self._slot_nbytes, self._count = gpu, nbytes, count
        self._slots: list[DeviceBytes] = []
        self._free: list[Any] = []
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Memory that the ring holds now."""
        return len(self._slots) * self._slot_nbytes

    def prepare(self, count: int) -> None:
        """Make slots now: ``count`` of them, and no more than there may be.

        Raises:
            MemoryError: the GPU has no more memory.
        """
        while len(self._slots) < min(count, self._count):
            self._slots.append(self._gpu.device_bytes(self._slot_nbytes))
            self._free.append(None)

    def take(self, stream: Any) -> int:
        """Index of a slot for a stream to write to, once its last reader has ended."""
        index = self._next
        self._next = (index + 1) % len(self._slots)
        if self._free[index] is not None:
            stream.wait_event(self._free[index])
        return index

    def memory(self, index: int) -> DeviceBytes:
        """The slot itself."""
        return self._slots[index]

    def give(self, index: int, fence: Any) -> None:
        """It may be written to again after an event."""
        self._free[index] = fence


class NcclExecution:
    """See the module; call ``step`` until it is ``done``.

    Args:
        program: what to do.
        communicators: by group.
        memory: of this rank's GPU.
        slots: for chunks that must be packed; room for two at least where there are any.
        sources: device arrays, one for each box held.
        destinations: device arrays, one for each box needed. All of them can be used at once.
    """

    def __init__(
        self,
        program: NcclProgram,
        communicators: Mapping[Group, Communicator],
        memory: AwareMemory,
        slots: Slots,
        sources: Sequence[Any],
        destinations: Sequence[Any],
    ) -> None:
        self._program, self._communicators = program, communicators
        self._memory, self._slots, self._gpu = memory, slots, memory.gpu
        self._sources, self._destinations = sources, destinations
        self._begun = False
        self._next = 0
        #: Launches under way, as (event after it, its index), and what must end besides them.
        self._under_way: deque[tuple[Any, int]] = deque()
        self._fences: list[Any] = []
        self._last_check_s = 0.0

    @property
    def launched(self) -> bool:
        """Everything has been given to the streams."""
        return self._begun and self._next == len(self._program.launches)

    @property
    def done(self) -> bool:
        """Everything has ended."""
        return self.launched and not self._under_way and not self._fences

    def step(self) -> bool:
        """Launch and look, without waiting; True when anything happened.

        Raises:
            Exception: what NCCL or CUDA raised; the communicators must be aborted then.
        """
        moved = self._look()
        if not self._begun:
            self._begin()
            moved = True
        launches = self._program.launches
        while self._next < len(launches) and len(self._under_way) < _LAUNCHES_AHEAD:
            self._launch(launches[self._next], self._next)
            self._next += 1
            moved = True
            if self.launched:
                self._fences.append(self._gpu.fence(self._gpu.incoming))
        return moved

    def outstanding(self) -> tuple[int, Launch | None]:
        """Bytes of what has not ended, and the first launch of it."""
        first = self._under_way[0][1] if self._under_way else self._next
        left = self._program.launches[first:]
        nbytes = sum(op.nbytes for launch in left for op in launch.operations)
        return nbytes, left[0] if left else None

    def abandon(self, why: str) -> None:
        """Give up: kernels that wait for others end only by an abort of their communicators."""
        if self._begun and not self.done:
            for communicator in self._communicators.values():
                communicator.abort(why)
        self._under_way.clear()
        self._fences.clear()
        self._next = len(self._program.launches)
        self._begun = True

    def _begin(self) -> None:
        self._begun = True
        if self._program.copies:
            self._memory.copy(
                (view_of(source, self._sources), view_of(destination, self._destinations))
                for source, destination in self._program.copies
            )
        if self.launched:
            self._fences.append(self._gpu.fence(self._gpu.incoming))

    def _look(self) -> bool:
        moved = False
        while self._under_way and self._under_way[0][0].done:
            self._under_way.popleft()
            moved = True
        if self._fences and self._fences[0].done:
            self._fences.pop(0)
            moved = True
        now_s = time.monotonic()
        if self._under_way and now_s - self._last_check_s > _CHECK_S:
            self._last_check_s = now_s
            for communicator in self._communicators.values():
                communicator.handle.check_async_error()
        return moved

    def _launch(self, launch: Launch, index: int) -> None:
        gpu = self._gpu
        communicator = self._communicators[self._program.groups[launch.group]]
        lane = gpu.network[launch.lane]
        nccl = gpu.cupy.cuda.nccl
        #: Addresses by regions, as the same ones may go to several receivers; and slots in use.
        pointers: dict[int, int] = {}
        packed: list[int] = []
        unpacked: list[tuple[int, Operation]] = []
        for operation in launch.operations:
            if id(operation.regions) not in pointers:
                pointers[id(operation.regions)] = self._place(operation, lane, packed, unpacked)
        with gpu.here():
            # One broadcast needs no group, and one group holds one communicator only: what a group
            # does with several on one GPU differs between versions.
            if launch.operations[0].kind == "broadcast":
                (operation,) = launch.operations
                pointer = pointers[id(operation.regions)]
                root = communicator.group.index(operation.peer)
                communicator.handle.broadcast(
                    pointer, pointer, operation.nbytes, nccl.NCCL_UINT8, root, lane.ptr
                )
            else:
                nccl.groupStart()
                try:
                    for operation in launch.operations:
                        handle = communicator.handle
                        act = handle.send if operation.kind == "send" else handle.recv
                        peer = communicator.group.index(operation.peer)
                        pointer = pointers[id(operation.regions)]
                        act(pointer, operation.nbytes, nccl.NCCL_UINT8, peer, lane.ptr)
                finally:
                    nccl.groupEnd()
        event = gpu.fence(lane)
        self._under_way.append((event, index))
        for slot in packed:
            self._slots.give(slot, event)
        for slot, operation in unpacked:
            gpu.incoming.wait_event(event)
            views = [view_of(region, self._destinations) for region in operation.regions]
            self._slots.give(slot, self._memory.unpack(self._slots.memory(slot), views))

    def _place(
        self,
        operation: Operation,
        lane: Any,
        packed: list[int],
        unpacked: list[tuple[int, Operation]],
    ) -> int:
        """Address of an operation's bytes: in place, or in a slot."""
        arrays = self._sources if operation.root else self._destinations
        views = [view_of(region, arrays) for region in operation.regions]
        if len(views) == 1:
            found = self._memory.in_place(views[0])
            if found is not None:
                return int(found.pointer)
        if not operation.root:
            slot = self._slots.take(lane)
            unpacked.append((slot, operation))
            return self._slots.memory(slot).pointer
        slot = self._slots.take(self._gpu.outgoing)
        packed.append(slot)
        memory = self._slots.memory(slot)
        lane.wait_event(self._memory.pack(views, memory))
        return memory.pointer
