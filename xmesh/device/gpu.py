"""A GPU of this process, through CuPy: streams, fences, memory and copies.

Nothing here waits for the device. Work goes to streams of our own, one for what leaves the arrays
and one for what comes in, so that copies in both directions overlap; events tie them to the streams
of the caller.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from xmesh.device.array import DeviceArray
from xmesh.device.copy_kernel import KERNELS, SOURCE, THREADS, launches_of
from xmesh.device.regions import Pair, copies_of
from xmesh.errors import TransportError, explain
from xmesh.wait_policy import sleep

#: Runs of memory from this size on are left to the copy engines.
_ENGINE_NBYTES = 64 * 2**10
#: cudaErrorNotReady
_NOT_READY = 600


def load_cupy() -> Any:
    """The module ``cupy``.

    Raises:
        TransportError: CuPy is not installed, or does not work here.
    """
    try:
        return importlib.import_module("cupy")
    except Exception as error:
        raise TransportError(
            explain(
                "arrays in GPU memory need CuPy",
                values=f"{type(error).__name__}: {error}",
                remedy="pip install 'cupy-cuda12x[ctk]' (or that of your CUDA), see docs/gpu.md",
            )
        ) from error


def current_device(cupy: Any) -> int:
    """Ordinal of the GPU that this thread uses.

    Raises:
        TransportError: there is none.
    """
    try:
        if cupy.cuda.runtime.getDeviceCount() > 0:
            return int(cupy.cuda.runtime.getDevice())
        why = "no device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        why = str(error)
    raise TransportError(
        explain(
            "arrays in GPU memory need a GPU that this process can use",
            values=why,
            remedy="look at nvidia-smi, CUDA_VISIBLE_DEVICES and `xmesh doctor` on this host",
        )
    )


def use_device(device: int) -> None:
    """Make a GPU the current one of this thread, for good."""
    load_cupy().cuda.Device(device).use()


class Fence:
    """An event of CUDA, looked at without waiting.

    CuPy's own ``Event.done`` says no for ever when the GPU has met an error.

    Args:
        runtime: ``cupy.cuda.runtime``.
        event: CuPy's.
    """

    def __init__(self, runtime: Any, event: Any) -> None:
        self._runtime, self.event = runtime, event
        self._done = False

    @property
    def done(self) -> bool:
        """Everything before it has ended.

        Raises:
            CUDARuntimeError: the GPU has met an error.
        """
        if not self._done:
            status = self._runtime.eventQuery(self.event.ptr)
            if status not in (0, _NOT_READY):
                raise self._runtime.CUDARuntimeError(status)
            self._done = status == 0
        return self._done


def wait_for_stream(cupy: Any, timeout_s: float) -> bool:
    """Wait for this thread's current stream, as CuPy's own waits have no end.

    Args:
        cupy: the module.
        timeout_s: seconds.

    Returns:
        False when it has not come to its end in time.
    """
    event = cupy.cuda.Event(disable_timing=True)
    event.record(cupy.cuda.get_current_stream())
    fence, deadline_s, idle = Fence(cupy.cuda.runtime, event), time.monotonic() + timeout_s, 0
    while not fence.done:
        if time.monotonic() > deadline_s:
            return False
        idle += 1
        sleep(idle)
    return True


def met_an_error(error: Exception, where: str) -> TransportError:
    """What a rank tells the others when its GPU has met an error before a call.

    Args:
        error: of CUDA.
        where: the rank, and what it was about to do.
    """
    return TransportError(
        explain(
            "a rank's GPU must come without an error to the end of what it was given before",
            values=f"{type(error).__name__}: {error}",
            context=where,
            remedy="look for a kernel of that rank's that failed before the call; a process whose "
            "GPU has met an error must end",
        )
    )


class DeviceBytes:
    """Bytes in the memory of a GPU, for messages.

    Args:
        pointer: address of the first.
        nbytes: how many.
        owner: keeps the memory alive.
    """

    def __init__(self, pointer: int, nbytes: int, owner: Any) -> None:
        self.pointer, self.nbytes, self.owner = pointer, nbytes, owner

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, stop, _ = part.indices(self.nbytes)
        return DeviceBytes(self.pointer + start, stop - start, self.owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer if self.nbytes else 0, False),
            "strides": None,
            "stream": None,  # whoever sends them has waited for what wrote them
        }


class Gpu:
    """See the module.

    Args:
        device: its ordinal in this process; None for the one that this thread uses.

    Raises:
        TransportError: there is no CuPy, or no GPU.
    """

    def __init__(self, device: int | None = None) -> None:
        self.cupy = cupy = load_cupy()
        self.device = current_device(cupy) if device is None else device
        try:
            with self.here():
                self.outgoing = cupy.cuda.Stream(non_blocking=True)
                self.incoming = cupy.cuda.Stream(non_blocking=True)
                #: The GPU itself, whatever its number in this process: its place on the PCI bus.
                self.bus = str(cupy.cuda.runtime.deviceGetPCIBusId(self.device))
        except Exception as error:
            raise self._unusable(error) from error

    def here(self) -> Any:
        """A context in which this GPU is the thread's current one."""
        # CUDA makes what a process needs on a GPU, some 500 MiB, when that becomes current: also
        # when CuPy's context goes back to one that a thread has by default, and never used.
        if self.cupy.cuda.runtime.getDevice() == self.device:
            return contextlib.nullcontext()
        return self.cupy.cuda.Device(self.device)

    def use(self) -> None:
        """Make this GPU the current one of a thread of ours, for good."""
        use_device(self.device)

    @cached_property
    def _kernels(self) -> dict[str, Any]:
        module = self.cupy.RawModule(code=SOURCE)
        return {name: module.get_function(name) for name in KERNELS}

    def compile(self) -> None:
        """Have the kernels ready before they are needed.

        Raises:
            TransportError: they cannot be made here.
        """
        try:
            with self.here():
                _ = self._kernels
        except Exception as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> TransportError:
        return TransportError(
            explain(
                f"GPU {self.device} must be usable: streams, memory and kernels",
                values=f"{type(error).__name__}: {error}",
                remedy="look at nvidia-smi and `xmesh doctor` on this host; this CuPy may be for "
                "another CUDA",
            )
        )

    # --- Memory -----------------------------------------------------------------------------------

    def pinned_bytes(self, nbytes: int) -> Any:
        """Host memory that the GPU copies to and from by itself.

        Raises:
            MemoryError: there is not enough.
        """
        with self.here():
            try:
                return np.frombuffer(
                    self.cupy.cuda.alloc_pinned_memory(max(1, nbytes)), np.uint8, nbytes
                )
            except self.cupy.cuda.runtime.CUDARuntimeError as error:
                raise MemoryError(f"{nbytes} bytes of pinned host memory: {error}") from error

    def device_bytes(self, nbytes: int, *streams: Any) -> DeviceBytes:
        """Memory of the GPU, ready for work on our streams, and on some more.

        Raises:
            MemoryError: there is not enough.
        """
        # CuPy's pool keeps memory by stream: of the default one others can use it again later.
        stream = self.cupy.cuda.Stream.null
        with self.here(), stream:
            memory = self.cupy.cuda.alloc(max(1, nbytes))
        # It may have been freed there a moment ago.
        self.order(stream, self.outgoing, self.incoming, *streams)
        return DeviceBytes(int(memory.ptr), nbytes, memory)

    # --- Order ------------------------------------------------------------------------------------

    def fence(self, stream: Any) -> Fence:
        """What has ended once all that was given to a stream so far has."""
        with self.here():
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(stream)
            return Fence(self.cupy.cuda.runtime, event)

    def order(self, first: Any, *later: Any) -> None:
        """Let streams wait for all that was given to a first one so far; the host does not."""
        event = self.fence(first).event
        with self.here():
            for stream in later:
                stream.wait_event(event)

    def let_wait(self, stream: Any, fences: Iterable[Fence]) -> None:
        """Make a stream of the caller wait for some fences.

        Args:
            stream: of CuPy; None for the current one of this thread.
            fences: what it waits for.
        """
        with self.here():
            if stream is None:
                stream = self.cupy.cuda.get_current_stream()
            for fence in fences:
                stream.wait_event(fence.event)

    def producers(self, arrays: Sequence[DeviceArray]) -> list[Fence]:
        """Fences after what was given to the streams that arrays are said to depend on."""
        events = []
        with self.here():
            for pointer in dict.fromkeys(a.stream for a in arrays if a.stream is not None):
                # By its number: CuPy 13 and 14 wrap streams of others in different classes.
                event = self.cupy.cuda.Event(disable_timing=True)
                self.cupy.cuda.runtime.eventRecord(event.ptr, pointer)
                events.append(Fence(self.cupy.cuda.runtime, event))
        return events

    # --- Copies -----------------------------------------------------------------------------------

    def copy(
        self,
        pairs: Iterable[Pair],
        stream: Any,
        from_host: bool = False,
        to_host: bool = False,
    ) -> None:
        """Give copies to a stream: of GPU memory, or between it and pinned host memory.

        Args:
            pairs: what to copy.
            stream: of this GPU.
            from_host: the sources are memory of the host.
            to_host: the destinations are.
        """
        runtime = self.cupy.cuda.runtime
        with self.here(), stream:
            for kind, copies in copies_of(pairs, from_host).items():
                strided, step = [], (kind.word_nbytes,)
                for copy in copies:
                    runs = copy.source_strides == copy.destination_strides == step
                    nbytes = copy.words * kind.word_nbytes
                    if runs and nbytes >= _ENGINE_NBYTES:
                        runtime.memcpyAsync(
                            copy.destination,
                            copy.source,
                            nbytes,
                            runtime.memcpyDefault,
                            stream.ptr,
                        )
                    else:
                        strided.append(copy)
                for launch in launches_of(kind, strided, from_host or to_host):
                    self._kernels[launch.kernel](launch.grid, (THREADS,), (launch.table,))
