"""The double of CuPy: asynchronous, first in first out, and merciless to mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pytest

DOUBLE = Path(__file__).resolve().parent.parent / "double"
POISON = 0xA5
engine: Any = getattr(cupy, "_engine", None)  # the real CuPy has none
pytestmark = pytest.mark.double_only


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Every test ends with idle streams, and an error of one is none of the next."""
    yield
    if engine is not None:
        engine.forget_error(0)
        cupy.cuda.Device().synchronize()
        engine.counters.clear()


def child(code, **environment):
    """Run code with the double in another process."""
    return subprocess.run(
        [sys.executable, "-c", f"import cupy, numpy as np\nengine = cupy._engine\n{code}"],
        env={**os.environ, "PYTHONPATH": str(DOUBLE), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def passes(code, **environment):
    done = child(code, **environment)
    assert done.returncode == 0, done.stderr


def pinned(array):
    """A copy in pinned memory."""
    memory = cupy.cuda.alloc_pinned_memory(max(1, array.nbytes))
    copy = np.frombuffer(memory, np.uint8, array.nbytes).view(array.dtype)
    copy[:] = array
    return copy


def to_device(target, source, stream):
    cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.ctypes.data, source.nbytes, 1, stream.ptr)


def to_host(target, source, stream):
    cupy.cuda.runtime.memcpyAsync(target.ctypes.data, source.data.ptr, target.nbytes, 2, stream.ptr)


def new_stream():
    return cupy.cuda.Stream(non_blocking=True)


# Streams and events.


def test_a_host_that_does_not_wait_sees_stale_data():
    stream = new_stream()
    device = cupy.zeros(8, "u1")
    cupy.cuda.Stream.null.synchronize()
    result = pinned(np.full(8, 7, "u1"))
    to_host(result, device, stream)
    assert (result == 7).all()
    assert not stream.done
    stream.synchronize()
    assert (result == 0).all()
    assert stream.done


def test_pinned_memory_is_read_when_the_copy_runs():
    stream = new_stream()
    source = pinned(np.zeros(8, "u1"))
    device = cupy.empty(8, "u1")
    engine.delay(stream.ptr, 0.01)
    to_device(device, source, stream)
    source[:] = 3  # too early: the copy has not run
    stream.synchronize()
    assert (device.get() == 3).all()


def test_pageable_memory_is_staged_at_the_call():
    stream = new_stream()
    source = np.zeros(8, "u1")
    device = cupy.empty(8, "u1")
    engine.delay(stream.ptr, 0.01)
    to_device(device, source, stream)
    source[:] = 3
    stream.synchronize()
    assert (device.get() == 0).all()


def test_a_copy_to_pageable_memory_returns_when_it_is_done():
    stream = new_stream()
    device = cupy.ones(8, "u1")
    cupy.cuda.Stream.null.synchronize()
    engine.delay(stream.ptr, 0.01)
    result = np.zeros(8, "u1")
    to_host(result, device, stream)
    assert (result == 1).all()


def test_pinned_memory_that_is_freed_too_early_is_noticed():
    stream = new_stream()
    source = pinned(np.zeros(8, "u1"))
    device = cupy.empty(8, "u1")
    engine.delay(stream.ptr, 0.01)
    to_device(device, source, stream)
    del source
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="freed memory"):
        stream.synchronize()


def test_a_stream_is_first_in_first_out():
    stream, order = new_stream(), []
    engine.delay(stream.ptr, 0.005)
    for number in range(20):
        engine.enqueue(stream.ptr, engine.Call("note", lambda number=number: order.append(number)))
    assert order == []
    stream.synchronize()
    assert order == list(range(20))


def test_streams_advance_independently():
    slow, fast = new_stream(), new_stream()
    engine.delay(slow.ptr, 0.05)
    assert engine.first_in_stream(slow.ptr).label == "delay"
    with fast:
        cupy.ones(4)
    fast.synchronize()
    assert not slow.done
    slow.synchronize()
    assert engine.first_in_stream(slow.ptr) is None


def test_work_is_asked_until_it_is_done():
    class Outside(engine.Work):  # type: ignore[misc]
        label = "something outside"
        asked = 0
        done = False

        def poll(self):
            self.asked += 1
            return self.done

    stream, work = new_stream(), Outside()
    engine.enqueue(stream.ptr, work)
    time.sleep(0.02)
    assert 2 < work.asked < 200  # it is asked, and nobody spins
    assert not stream.done
    work.done = True
    engine.wake()
    stream.synchronize()


def test_an_event_is_a_point_in_a_stream():
    stream = new_stream()
    event = cupy.cuda.Event(disable_timing=True)
    assert event.done  # never recorded
    event.synchronize()
    engine.delay(stream.ptr, 0.005)
    event.record(stream)
    engine.delay(stream.ptr, 0.05)
    assert not event.done
    event.synchronize()
    assert event.done
    assert not stream.done


def test_a_stream_waits_for_the_event_as_it_was_recorded_then():
    first, second = new_stream(), new_stream()
    event = cupy.cuda.Event()
    second.wait_event(event)  # never recorded: no wait
    second.synchronize()
    begin_s = time.monotonic()
    engine.delay(first.ptr, 0.01)
    first.record(event)
    second.wait_event(event)
    engine.delay(first.ptr, 0.1)
    event.record(first)  # replaces the point, but not for the stream
    second.synchronize()
    assert time.monotonic() - begin_s >= 0.01
    assert not event.done


def test_without_the_event_the_other_stream_is_too_early():
    first, second = new_stream(), new_stream()
    array = cupy.zeros(4)
    cupy.cuda.Stream.null.synchronize()
    engine.delay(first.ptr, 0.01)
    with first:
        array.fill(1)
    with second:
        early = array.copy()
        second.wait_event(first.record())
        late = array.copy()
    second.synchronize()
    assert (early.get(second) == 0).all()
    assert (late.get(second) == 1).all()


@pytest.mark.parametrize("non_blocking", [False, True])
def test_the_default_stream_waits_for_blocking_streams_alone(non_blocking):
    stream = cupy.cuda.Stream(non_blocking=non_blocking)
    array = cupy.zeros(4)
    cupy.cuda.Stream.null.synchronize()
    engine.delay(stream.ptr, 0.02)
    with stream:
        array.fill(1)
    seen = array.copy()  # in the default stream
    assert (seen.get() == (0 if non_blocking else 1)).all()
    stream.synchronize()  # before the default stream frees the array


def test_elapsed_time():
    stream = new_stream()
    begin, end = stream.record(), cupy.cuda.Event()
    engine.delay(stream.ptr, 0.01)
    end.record(stream)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorNotReady"):
        cupy.cuda.get_elapsed_time(begin, end)
    end.synchronize()
    assert 10 <= cupy.cuda.get_elapsed_time(begin, end) < 1000


def test_the_current_stream_is_of_a_thread():
    stream, seen = new_stream(), []
    with stream:
        assert cupy.cuda.get_current_stream() == stream
        thread = threading.Thread(target=lambda: seen.append(cupy.cuda.get_current_stream().ptr))
        thread.start()
        thread.join()
        array = cupy.empty(1)
        assert array.__cuda_array_interface__["stream"] == stream.ptr
    assert seen == [0]
    assert cupy.cuda.get_current_stream().ptr == 0
    assert array.__cuda_array_interface__["stream"] == 1


def test_a_destroyed_stream_finishes_and_cannot_be_used():
    stream = new_stream()
    pointer = stream.ptr
    array = cupy.zeros(4)
    cupy.cuda.Stream.null.synchronize()
    with stream:
        array.fill(1)
    event = stream.record()
    del stream
    event.synchronize()
    assert (array.get() == 1).all()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="InvalidResourceHandle"):
        cupy.cuda.runtime.streamSynchronize(pointer)


def test_an_error_of_work_is_one_of_the_device():
    def fail():
        raise KeyError("lost")

    engine.enqueue(0, engine.Call("losing", fail))
    for _ in range(2):  # it stays
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="lost") as caught:
            cupy.cuda.Stream.null.synchronize()
        assert caught.value.status == 719
        assert "losing" in str(caught.value)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="lost"):
        cupy.zeros(4)


# Memory.


def test_fresh_and_freed_memory_is_poison():
    array = cupy.empty(100, "u1")
    assert (array.get() == POISON).all()
    array.fill(0)
    view = engine.host_view(array.data.ptr, 100)
    pointer = array.data.ptr
    before = engine.allocated_nbytes(0)
    del array
    assert before - engine.allocated_nbytes(0) == 512
    cupy.cuda.Stream.null.synchronize()
    assert (view == POISON).all()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="freed memory"):
        engine.host_view(pointer, 1)


def test_host_view_refuses_what_is_not_allocated():
    array = cupy.zeros(10, "u1")
    cupy.cuda.Stream.null.synchronize()
    assert (engine.host_view(array.data.ptr + 4, 6) == 0).all()
    for pointer, nbytes in ((array.data.ptr + 4, 7), (array.data.ptr - 1, 2), (12345, 1)):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="IllegalAddress"):
            engine.host_view(pointer, nbytes)


def test_a_host_that_follows_a_device_pointer_dies():
    done = child(
        "import ctypes\narray = cupy.zeros(4)\nctypes.string_at(array.data.ptr, 4)\nprint('alive')",
        DOUBLE_CUDA_AWARE="0",
    )
    assert done.returncode == -signal.SIGSEGV
    assert "alive" not in done.stdout


def test_where_mpi_understands_device_pointers_the_host_may_follow_them():
    passes(
        """
        import ctypes
        array = cupy.ones(4, "u1")
        cupy.cuda.Stream.null.synchronize()
        assert ctypes.string_at(array.data.ptr, 4) == bytes([1] * 4)
        """.replace("\n        ", "\n"),
        DOUBLE_CUDA_AWARE="1",
    )


def test_memory_is_freed_in_the_order_of_its_stream():
    engine.delay(0, 0.01)
    array = cupy.ones(4)
    copy = array.copy()
    del array  # CuPy's pool allows it: what comes next in this stream comes after the copy
    assert (copy.get() == 1).all()


def test_another_stream_must_keep_memory_alive():
    stream = new_stream()
    array = cupy.ones(4)
    cupy.cuda.Stream.null.synchronize()
    engine.delay(stream.ptr, 0.02)
    with stream:
        copy = array.copy()
    del array
    cupy.cuda.Stream.null.synchronize()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="freed memory"):
        copy.get(stream)


def test_out_of_memory():
    free, total = cupy.cuda.Device().mem_info
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="Out of memory allocating"):
        cupy.cuda.alloc(free + 1)
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)
    assert cupy.get_default_memory_pool().used_bytes() == total - free


def test_empty_arrays_have_a_null_pointer():
    array = cupy.empty((0, 3))
    assert array.data.ptr == 0
    assert array.__cuda_array_interface__["data"] == (0, False)
    assert array.get().shape == (0, 3)
    assert cupy.ones(4)[2:2].__cuda_array_interface__["data"] == (0, False)


def test_pointer_attributes():
    attributes = cupy.cuda.runtime.pointerGetAttributes
    array, host = cupy.zeros(4), np.zeros(4)
    page_locked = pinned(host)
    assert (attributes(array.data.ptr).type, attributes(array.data.ptr).device) == (2, 0)
    assert attributes(page_locked.ctypes.data).type == 1
    assert attributes(host.ctypes.data).type == 0


def test_copies_check_their_kind():
    array, host = cupy.zeros(4), np.zeros(4)
    memcpy = cupy.cuda.runtime.memcpyAsync
    for target, source, kind in (
        (array.data.ptr, host.ctypes.data, 2),
        (array.data.ptr, host.ctypes.data, 3),
        (host.ctypes.data, array.data.ptr, 1),
        (array.data.ptr, array.data.ptr, 0),
    ):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="InvalidMemcpyDirection"):
            memcpy(target, source, 8, kind, 0)
    memcpy(array.data.ptr, host.ctypes.data, 32, 4, 0)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="0 to 33 of 32"):
        memcpy(array.data.ptr, host.ctypes.data, 33, 1, 0)
    assert engine.counters["memcpyAsync"] == 6


def test_unowned_memory_keeps_its_owner():
    owner = cupy.ones(4)
    memory = cupy.cuda.UnownedMemory(owner.data.ptr, owner.nbytes, owner)
    array = cupy.ndarray((4,), memptr=cupy.cuda.MemoryPointer(memory, 0))
    del owner
    assert (array.get() == 1).all()


# Arrays.


def test_arrays_behave_as_numpys():
    host = np.arange(24, dtype="f4").reshape(2, 3, 4)
    array = cupy.asarray(host)
    for key in (
        1,
        ...,
        (slice(None), -1),
        (0, slice(None, None, -1), None),
        (..., slice(3, 0, -2)),
    ):
        assert np.array_equal(array[key].get(), host[key])
        assert array[key].base is array
        assert array[key].strides == host[key].strides
    assert np.array_equal(array.T.get(), host.T)
    assert np.array_equal(array.T.reshape(6, -1).get(), host.T.reshape(6, -1))
    assert np.array_equal(array.view("i4").get(), host.view("i4"))
    assert np.array_equal(array.astype("i8").ravel().get(), host.astype("i8").ravel())
    assert np.array_equal(((array + array) * 2 - 1).get(), (host + host) * 2 - 1)
    assert np.array_equal((1 / (array + 1)).get(), 1 / (host + 1))
    array[:, 1] = array[:, 0]
    host[:, 1] = host[:, 0]
    array[0, 0] = -1
    host[0, 0] = -1
    array /= 2
    host /= 2
    assert np.array_equal(cupy.asnumpy(array), host)
    assert float(array.sum()) == host.sum()
    assert array.max().item() == host.max()
    assert bool((array == array).all())
    assert cupy.zeros((), "i4").item() == 0
    assert cupy.full(2, 3).dtype == np.int64
    assert cupy.empty_like(array.T).strides == array.T.strides
    assert not array[:, ::2].flags.c_contiguous


def test_arrays_meet_no_numpy_arrays():
    array, host = cupy.zeros(4), np.zeros(4)
    with pytest.raises(TypeError, match="Implicit conversion to a NumPy array"):
        np.asarray(array)
    for mix in (lambda: host + array, lambda: array + host, lambda: np.add(host, array)):
        with pytest.raises(TypeError):
            mix()
    with pytest.raises(ValueError, match="non-scalar"):
        array[...] = host
    with pytest.raises(ValueError, match="Unsupported dtype"):
        cupy.empty(4, "M8[s]")


class Producer:
    """Exports by one version of the standard, whatever the consumer asks for."""

    def __init__(self, array, max_version):
        self._array = array
        self._max_version = max_version

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self._array.__dlpack__(stream=stream, max_version=self._max_version)


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_dlpack(max_version):
    array = cupy.arange(12, dtype="u2").reshape(3, 4)[::-1, 1:]
    assert array.__dlpack_device__() == (2, 0)

    producer = Producer(array, max_version)
    other = cupy.from_dlpack(producer)
    assert other.data.ptr == array.data.ptr
    assert np.array_equal(other.get(), array.get())
    before = engine.allocated_nbytes(0)
    array.__dlpack__(max_version=max_version)  # nobody takes it
    del producer, array
    assert engine.allocated_nbytes(0) == before  # the consumer has it
    del other
    assert engine.allocated_nbytes(0) == before - 512


# Kernels.

KERNELS = r"""
struct Move { const uint4 *source; uint4 *target; unsigned int count; };

extern "C" __global__ void __launch_bounds__(256) move(Move move) {
    for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < move.count;
         i += gridDim.x * blockDim.x)
        move.target[i] = move.source[i];
}

static __device__ __forceinline__ float twice(float x) { return 2 * x; }

extern "C" __global__ void axpy(const float *__restrict__ x, float *y, float a, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * twice(__ldg(x + i));
}

extern "C" __global__ void where(uint4 *out) {
    out[(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.z + threadIdx.z] =
        uint4{blockIdx.x, blockIdx.y, threadIdx.z, __umulhi(0x80000000u, 6u)};
}

extern "C" __global__ void misaligned(unsigned int *x) { *(uint4 *)(x + 1) = uint4{1, 2, 3, 4}; }

extern "C" __global__ void beyond(unsigned char *x, int n) { x[n] = 1; }

extern "C" __global__ void turn_round(int *x, int together, int last) {
    __shared__ int there[64];
    for (int part = 0; part < 3; ++part, x += 64) {
        there[threadIdx.x] = x[threadIdx.x];
        if (together && threadIdx.x <= last) __syncthreads();
        x[threadIdx.x] = there[63 - threadIdx.x];
        if (together) __syncthreads();
    }
}
"""


@pytest.fixture(scope="module")
def kernels():
    return cupy.RawModule(code=KERNELS)


def test_a_kernel_equals_numpy(kernels):
    x, y = np.arange(1000, dtype="f4"), np.ones(1000, "f4")
    device_x, device_y = cupy.asarray(x), cupy.asarray(y)
    kernel = cupy.RawKernel(KERNELS, "axpy")
    kernel((4,), (256,), (device_x, device_y.data, np.float32(3), 1000))
    assert np.array_equal(device_y.get(), y + 6 * x)
    assert engine.counters["launch"] == 1


def test_a_struct_with_pointers_is_passed_by_value(kernels):
    source, target = cupy.arange(64, dtype="u4"), cupy.zeros(64, "u4")
    move = np.zeros((), np.dtype([("source", "u8"), ("target", "u8"), ("count", "u4")], align=True))
    move["source"], move["target"], move["count"] = source.data.ptr, target.data.ptr, 15
    kernels.get_function("move")((2,), (4,), (move,))
    assert np.array_equal(target.get(), np.r_[np.arange(60), np.zeros(4)])
    pointer = source.data.ptr
    del source
    with pytest.raises(RuntimeError, match=f"{pointer:#x}, which is not allocated"):
        kernels.get_function("move")((2,), (4,), (move,))


def test_every_thread_of_a_launch_runs_once(kernels):
    out = cupy.zeros((3, 2, 5, 4), "u4")
    kernels.get_function("where")((2, 3), (1, 1, 5), (out,))
    y, x, z = np.mgrid[:3, :2, :5]
    assert np.array_equal(out.get(), np.stack([x, y, z, np.full_like(x, 3)], axis=-1))


def test_a_launch_is_asynchronous_and_in_order(kernels):
    x, y = cupy.ones(4, "f4"), cupy.zeros(4, "f4")
    kernel = kernels.get_function("axpy")
    engine.delay(0, 0.01)
    kernel((1,), (4,), (x, y, np.float32(1), 4))
    kernel((1,), (4,), (y, x, np.float32(1), 4))
    assert not cupy.cuda.Stream.null.done
    assert (x.get() == 5).all()


def test_launches_are_checked(kernels):
    x = cupy.zeros(4, "f4")
    kernel = kernels.get_function("axpy")
    good = (x, x, np.float32(1), 4)
    for grid, block, args, text in (
        ((1,), (1025,), good, "limits"),
        ((1,), (32, 64), good, "block"),
        ((1, 65536), (1,), good, "limits"),
        ((1,), (1,), good[:3], "takes 4 arguments and was given 3"),
        ((1,), (1,), (x, x, 1.0, 4), "argument 2 of axpy has 8 bytes, the parameter 4"),
        ((1,), (1,), (x, 12345, np.float32(1), 4), "0x3039, which is not allocated"),
    ):
        with pytest.raises(RuntimeError, match=text):
            kernel(grid, block, args)
    with pytest.raises(TypeError, match="size one"):
        kernel((1,), (1,), (x, np.zeros(4, "f4"), np.float32(1), 4))
    with pytest.raises(RuntimeError, match="named symbol not found"):
        kernels.get_function("absent")
    with pytest.raises(Exception, match="__shfl_sync"):
        cupy.RawKernel('extern "C" __global__ void f() { __shfl_sync(1, 2, 3); }', "f")(
            (1,), (1,), ()
        )
    with pytest.raises(Exception, match="cstdint"):
        cupy.RawKernel("#include <cstdint>\n" + KERNELS, "axpy")((1,), (1,), good)


def test_threads_of_a_block_wait_for_each_other(kernels):
    """Shared memory: right with barriers, and wrong without, in whatever order threads run."""
    turn_round = kernels.get_function("turn_round")
    numbers = np.arange(192, dtype=np.int32)
    turned = numbers.reshape(3, 64)[:, ::-1].ravel()
    for together in (1, 0) * 5:
        array = cupy.asarray(numbers)
        turn_round((1,), (64,), (array, together, 63))
        assert (array.get() == turned).all() == together


@pytest.mark.parametrize("last", [0, 62])
def test_a_barrier_that_not_all_threads_come_to_is_noticed(kernels, last):
    # All come to the second barrier, but some to the first.
    array = cupy.zeros(192, "i4")
    kernels.get_function("turn_round")((1,), (64,), (array, 1, last))
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="not all threads"):
        array.get()


def test_a_kernel_that_writes_beyond_its_array_is_noticed(kernels):
    array = cupy.zeros(100, "u1")
    kernels.get_function("beyond")((1,), (1,), (array, 100))
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="just outside of the 100"):
        array.get()


def test_a_misaligned_access_is_noticed(kernels):
    array = cupy.zeros(100, "u1")
    kernels.get_function("misaligned")((1,), (1,), (array,))
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="misaligned"):
        array.get()


def test_ranks_share_compiled_kernels(tmp_path):
    code = (
        'k = cupy.RawKernel(\'extern "C" __global__ void f(int *x) { *x = 7; }\', "f")\n'
        'x = cupy.zeros(1, "i4")\nk((1,), (1,), (x,))\nassert x.item() == 7'
    )
    passes(code, DOUBLE_CACHE=str(tmp_path))
    # The kernel, and what runs the threads of all kernels.
    assert len(list(tmp_path.iterdir())) == 2
    passes(code, DOUBLE_CACHE=str(tmp_path), CXX="/nonexistent/g++")


# Devices.


def test_a_machine_without_a_gpu():
    passes(
        """
for use in (
    cupy.cuda.runtime.getDeviceCount,
    cupy.cuda.runtime.getDevice,
    cupy.cuda.Device,
    cupy.cuda.Stream,
    lambda: cupy.empty(3),
):
    try:
        use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        assert error.status == 100
        assert str(error) == "cudaErrorNoDevice: no CUDA-capable device is detected"
    else:
        raise AssertionError(use)
""",
        DOUBLE_DEVICES="0",
    )


def test_memory_and_streams_of_another_device():
    passes(
        """
def fails(use, *texts):
    try:
        use()
    except (RuntimeError, ValueError) as error:
        assert any(text in str(error) for text in texts), error
    else:
        raise AssertionError(use)

here = cupy.ones(4)
with cupy.cuda.Device(1):
    there = cupy.ones(4)
    stream = cupy.cuda.Stream(non_blocking=True)
    assert (there.get() == 1).all()
    fails(lambda: here + 1, "memory of device 0")
    fails(here.copy, "memory of device 0")
assert cupy.cuda.runtime.getDevice() == 0
assert (here.device.id, there.device.id, stream.device_id) == (0, 1, 1)
assert there.device == cupy.cuda.Device(1) != here.device
memcpy = cupy.cuda.runtime.memcpyAsync
fails(lambda: memcpy(here.data.ptr, there.data.ptr, 8, 3, 0), "memory of device 1")
fails(lambda: memcpy(here.data.ptr, np.ones(4).ctypes.data, 8, 1, stream.ptr), "memory of device 0")
fails(stream.__enter__, "current device is 0")
fails(lambda: cupy.cuda.Event().record(stream), "invalid resource handle")
fails(lambda: cupy.cuda.Device(2).use(), "cudaErrorInvalidDevice")
kernel = cupy.RawKernel('extern "C" __global__ void f(double *x) { *x = 7; }', "f")
fails(lambda: kernel((1,), (1,), (there,)), "memory of device 1")
with cupy.cuda.ExternalStream(stream.ptr):
    fails(lambda: kernel((1,), (1,), (here,)), "invalid resource handle")
with cupy.cuda.Device(1):
    kernel((1,), (1,), (there,))
    assert (there.get()[:2] == [7, 1]).all()
assert cupy.cuda.runtime.deviceGetPCIBusId(0) != cupy.cuda.runtime.deviceGetPCIBusId(1)
assert engine.allocated_nbytes(0) == engine.allocated_nbytes(1) == 512
""",
        DOUBLE_DEVICES="2",
    )


def test_what_the_double_lacks_fails():
    for lacking in ("linspace", "RawKernel2", "matmul"):
        assert not hasattr(cupy, lacking)
    assert not hasattr(cupy.ndarray, "std")
    with pytest.raises(AttributeError):
        cupy.cuda.runtime.malloc  # noqa: B018


def test_every_wait_for_the_whole_device_is_counted():
    engine.counters.clear()
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.deviceSynchronize()
    assert engine.counters["deviceSynchronize"] == 2
    assert engine.streams_idle()
