"""Arrays in GPU memory for tests: of any dtype and strides, in guards, and slow work on streams.

All of it works on a real GPU and on the double of CuPy.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import oracle
from numpy.typing import NDArray

from xmesh.device.array import DeviceArray
from xmesh.interop import as_memory

#: tests/gpu/run.py says which CuPy is meant.
ON_DOUBLE = os.environ.get("XMESH_TEST_GPU") == "double"
#: A few tenths of a second at the clock rates of today's GPUs.
SLOW_CYCLES = 400_000_000
#: On the double, where a kernel takes no time, its stream is held up for so long instead.
_HELD_S = 0.05

_SLOW = r"""
#ifndef __CUDACC_RTC__  // the double of CuPy compiles for the host
static inline long long clock64() { static long long now; return now += 1LL << 32; }
#endif
extern "C" __global__ void slow_copy(
    char* to, const char* from, long long nbytes, long long cycles) {
  const long long began = clock64();
  while (clock64() - began < cycles) {}
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < nbytes; i += step)
    to[i] = from[i];
}
"""


@functools.cache
def _slow_kernel() -> Any:
    import cupy

    kernel = cupy.RawKernel(_SLOW, "slow_copy")
    kernel.compile()
    return kernel


def slow_copy(target: Any, source: Any, stream: Any) -> None:
    """Copy one array of CuPy to another, both C-contiguous, by a kernel that spins first."""
    kernel = _slow_kernel()
    if ON_DOUBLE:
        import cupy

        cupy._engine.delay(stream.ptr, _HELD_S)
    sizes = np.int64(source.nbytes), np.int64(SLOW_CYCLES)
    with stream:
        kernel((4,), (256,), (target, source, *sizes))


def new_stream() -> Any:
    """A stream that waits for nothing by itself."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


class Lent:
    """A copy in GPU memory of an array inside guard elements, lent by CUDA's array interface.

    Args:
        made: the array of the host.
    """

    def __init__(self, made: oracle.Guarded) -> None:
        import cupy

        self._made = made
        self._offset = made.view.ctypes.data - made.buffer.ctypes.data
        self.memory = cupy.asarray(np.frombuffer(made.buffer.tobytes(), np.uint8))
        self.dtype = made.view.dtype
        self.device = cupy.cuda.runtime.getDevice()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        import cupy

        view = self._made.view
        return {
            "version": 3,
            "shape": view.shape,
            "strides": view.strides,
            "typestr": self.dtype.str,
            "data": (self.memory.data.ptr + self._offset if view.size else 0, False),
            "stream": cupy.cuda.get_current_stream().ptr or 1,
        }

    def view(self) -> DeviceArray:
        """As xmesh sees it."""
        found = as_memory(self, "a test's array", writable=True)
        assert isinstance(found, DeviceArray)
        return found

    def get(self) -> oracle.Guarded:
        """What is there now, beside what the host had."""
        made = self._made
        now = self.memory.get().view(self.dtype).reshape(made.buffer.shape)
        return oracle.Guarded(now, made.find(now), made.find, made.before)


def to_host(array: Any) -> NDArray[Any]:
    """What an output holds."""
    if isinstance(array, np.ndarray):
        return array
    taken: NDArray[Any] = array.get()
    return taken
