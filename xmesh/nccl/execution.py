"""One rank's part of one call over NCCL: everything is given to streams, which wait for each other.

Chunks that are not one run of memory pass through slots of device memory: they are packed on one
stream, travel on another, and are unpacked on a third, with events in between, so that copies are
hidden under the travel of other chunks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from xmesh.device.gpu import DeviceBytes, Fence, Gpu
from xmesh.device.memory import AwareMemory
from xmesh.execution import view_of
from xmesh.nccl.communicators import Communicator, Group, abort_all
from xmesh.nccl.launcher import Launcher
from xmesh.nccl.program import Launch, NcclProgram, Operation
from xmesh.wait_policy import sleep

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
        lanes: streams that use them besides those of the GPU.
    """

    def __init__(self, gpu: Gpu, nbytes: int, count: int, lanes: Sequence[Any]) -> None:
        self._gpu, self._slot_nbytes, self._count = gpu, nbytes, count
        self._lanes = lanes
        self._slots: list[DeviceBytes] = []
        self._free: list[Fence | None] = []
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
            self._slots.append(self._gpu.device_bytes(self._slot_nbytes, *self._lanes))
            self._free.append(None)

    def take(self, stream: Any) -> int:
        """Index of a slot for a stream to write to, once its last reader has ended."""
        index = self._next
        self._next = (index + 1) % len(self._slots)
        fence = self._free[index]
        if fence is not None:
            stream.wait_event(fence.event)
        return index

    def memory(self, index: int) -> DeviceBytes:
        """The slot itself."""
        return self._slots[index]

    def give(self, index: int, fence: Fence) -> None:
        """It may be written to again after an event."""
        self._free[index] = fence


class NcclExecution:
    """See the module; call ``step`` until it is ``done``.

    Args:
        program: what to do.
        communicators: by group.
        memory: of this rank's GPU.
        slots: for chunks that must be packed; room for two at least where there are any.
        launcher: does the launching, in a thread that may block in NCCL.
        sources: device arrays, one for each box held.
        destinations: device arrays, one for each box needed. All of them can be used at once.
    """

    def __init__(
        self,
        program: NcclProgram,
        communicators: Mapping[Group, Communicator],
        memory: AwareMemory,
        slots: Slots,
        launcher: Launcher,
        sources: Sequence[Any],
        destinations: Sequence[Any],
    ) -> None:
        self._program, self._communicators = program, communicators
        self._memory, self._slots, self._gpu = memory, slots, memory.gpu
        self._sources, self._destinations = sources, destinations
        self._launcher, self._lanes = launcher, launcher.lanes(memory.gpu)
        #: Launches under way, as (event after it, its index); the thread adds to them.
        self._under_way: deque[tuple[Fence, int]] = deque()
        self._launched = 0
        #: What must end besides them, once all is launched.
        self._fences: list[Fence] = []
        self._given_up = False
        self._ended = False
        self._last_check_s = 0.0
        self._job = launcher.submit(self._gpu, self._launch_all)

    @property
    def launched(self) -> bool:
        """Everything has been given to the streams."""
        return self._job.over and self._job.error is None

    @property
    def done(self) -> bool:
        """Everything has ended, and well."""
        return self._ended

    @property
    def fences(self) -> list[Fence]:
        """Of what has not ended; of all that, once it is launched."""
        return [fence for fence, _ in self._under_way] + self._fences

    def step(self) -> bool:
        """Look what has ended, without waiting; True when anything happened.

        Raises:
            Exception: what NCCL or CUDA raised, or a communicator was aborted: nothing is known of
                the output, and the communicators must be aborted.
        """
        if self._job.error is not None:
            raise self._job.error
        moved = False
        while self._under_way and self._under_way[0][0].done:
            self._under_way.popleft()
            moved = True
        now_s = time.monotonic()
        ended = self.launched and not self._under_way and all(f.done for f in self._fences)
        # Kernels end early when their communicator is aborted: what ended may not have ended well.
        if ended or now_s - self._last_check_s > _CHECK_S:
            self._last_check_s = now_s
            for communicator in self._communicators.values():
                communicator.check()
        self._ended = ended
        return moved or ended

    def outstanding(self) -> tuple[int, Launch | None]:
        """Bytes of what has not ended, and the first launch of it."""
        under_way = tuple(self._under_way)
        first = under_way[0][1] if under_way else self._launched
        left = self._program.launches[first:]
        nbytes = sum(op.nbytes for launch in left for op in launch.operations)
        return nbytes, left[0] if left else None

    def abandon(self, why: str) -> tuple[Any, ...]:
        """Give up: kernels that wait for others end only by an abort of their communicators.

        Returns:
            What must be kept alive: the GPU may still read and write it.
        """
        if self._ended:
            return ()
        self._given_up = self._ended = True
        abort_all(self._communicators.values(), why)
        self._launcher.leave_behind(self._job)
        return (self._sources, self._destinations, self._slots, self._gpu, self._under_way)

    def _launch_all(self) -> None:
        """In the launcher's thread."""
        if self._program.copies:
            self._memory.copy(
                (view_of(source, self._sources), view_of(destination, self._destinations))
                for source, destination in self._program.copies
            )
        ahead: deque[Fence] = deque()
        for index, launch in enumerate(self._program.launches):
            idle = 0
            while len(ahead) >= _LAUNCHES_AHEAD and not self._given_up:
                if ahead[0].done:
                    ahead.popleft()
                    idle = 0
                else:
                    idle += 1
                    sleep(idle)
            if self._given_up:
                return
            ahead.append(self._launch(launch, index))
            self._launched = index + 1
        self._fences = [self._gpu.fence(self._gpu.incoming)]

    def _launch(self, launch: Launch, index: int) -> Fence:
        gpu = self._gpu
        communicator = self._communicators[self._program.groups[launch.group]]
        lane = self._lanes[launch.lane]
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
        fence = gpu.fence(lane)
        self._under_way.append((fence, index))
        for slot in packed:
            self._slots.give(slot, fence)
        for slot, operation in unpacked:
            gpu.incoming.wait_event(fence.event)
            views = [view_of(region, self._destinations) for region in operation.regions]
            self._slots.give(slot, self._memory.unpack(self._slots.memory(slot), views))
        return fence

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
        lane.wait_event(self._memory.pack(views, memory).event)
        return memory.pointer
