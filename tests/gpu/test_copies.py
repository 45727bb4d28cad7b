"""The kernel that packs and unpacks, and the copy engines: the same bytes as NumPy's."""

from __future__ import annotations

import math

import cupy
import ml_dtypes
import numpy as np
import oracle
import pytest
from on_device import ON_DOUBLE, Lent

from xmesh.device.array import DeviceArray
from xmesh.device.copy_kernel import COPIES_PER_LAUNCH
from xmesh.device.gpu import Gpu
from xmesh.device.memory import AwareMemory, DeviceMemory, StagedMemory

DTYPES = {
    "bool": "?",
    "int8": "i1",
    "float16": "<f2",
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float32": "<f4",
    "big endian": ">f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
    "three bytes": "V3",
    "structured": [("key", "<i8"), ("value", "<f4")],
}
#: Bytes of the large array; more than 2**31, so that 32-bit sizes and offsets would show.
LARGE = 2**20 + 4096 if ON_DOUBLE else 2**31 + 4096
MEMORIES = {"pinned": StagedMemory, "device": AwareMemory}


@pytest.fixture(scope="module")
def gpu():
    return Gpu()


def through(memory: DeviceMemory, sources: list[Lent], targets: list[Lent]) -> np.ndarray:
    """Pack some arrays and unpack them into others; the bytes in between."""
    gpu, views = memory.gpu, [source.view() for source in sources]
    gpu.order(cupy.cuda.get_current_stream(), gpu.outgoing)
    nbytes = sum(view.nbytes for view in views)
    buffer = memory.staging.take(nbytes)
    assert buffer is not None
    memory.pack(views, buffer)
    gpu.outgoing.synchronize()
    if isinstance(memory, StagedMemory):
        packed = np.array(buffer)
    else:
        packed = np.empty(nbytes, np.uint8)
        if nbytes:
            runtime = cupy.cuda.runtime
            runtime.memcpy(packed.ctypes.data, buffer.pointer, nbytes, runtime.memcpyDeviceToHost)
    memory.unpack(buffer, [target.view() for target in targets])
    gpu.incoming.synchronize()
    memory.staging.give(buffer)
    return packed


def check(memory: DeviceMemory, sources: list[oracle.Guarded], targets: list[oracle.Guarded]):
    lent = [Lent(made) for made in targets]
    packed = through(memory, [Lent(made) for made in sources], lent)
    assert packed.tobytes() == b"".join(oracle.plain(made.view).tobytes() for made in sources)
    for source, target in zip(sources, lent, strict=True):
        found = target.get()
        assert oracle.plain(found.view).tobytes() == oracle.plain(source.view).tobytes()
        assert found.intact(), "elements around an array changed"


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_order(gpu, name, kind):
    dtype = np.dtype(DTYPES[name])
    memory = MEMORIES[kind](gpu, 1 << 16, 0)
    array = oracle.whole((5, 6, 7), dtype)
    for there in oracle.MEMORY:
        for back in ("C", "swapped"):
            source = oracle.guarded_copy(array, there)
            check(memory, [source], [oracle.guarded(array.shape, dtype, back)])


@pytest.mark.parametrize("kind", MEMORIES)
def test_shapes(gpu, kind):
    """Of any number of dimensions, of none, and without elements."""
    memory = MEMORIES[kind](gpu, 1 << 20, 0)
    rng = np.random.default_rng(1)
    for seed in range(5 if ON_DOUBLE else 100):
        shape = tuple(rng.integers(0 if seed % 7 == 0 else 1, 5, size=seed % 9).tolist())
        array = oracle.whole(shape, rng.choice(["u1", "<f4", "<c16"]), seed)
        there, back = rng.choice(oracle.MEMORY, size=2)
        check(
            memory,
            [oracle.guarded_copy(array, there)],
            [oracle.guarded(shape, array.dtype, back)],
        )


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("name", ["u1", "<f2", "<f4", "<f8", "V12", "<c16"])
def test_tiles(gpu, kind, name):
    """From one order to the other: several tiles along each dimension, the last ones in part."""
    memory = MEMORIES[kind](gpu, 1 << 23, 0)
    large = (90, 70) if ON_DOUBLE else (311, 299)
    for shape in (large, (3, large[0]), (large[0], 3), (5, *large), (2, 40, 3, 50)):
        array = oracle.whole(shape, name)
        for there, back in (("F", "C"), ("C", "F"), ("swapped", "C"), ("C", "reversed")):
            source = oracle.guarded_copy(array, there)
            check(memory, [source], [oracle.guarded(shape, array.dtype, back)])


@pytest.mark.parametrize("kind", MEMORIES)
def test_more_arrays_than_one_launch_takes(gpu, kind):
    memory = MEMORIES[kind](gpu, 1 << 20, 0)
    arrays = [oracle.whole((3, n), "<f4", n) for n in range(1, 3 * COPIES_PER_LAUNCH)]
    sources = [oracle.guarded_copy(array, "strided") for array in arrays]
    check(memory, sources, [oracle.guarded(a.shape, a.dtype, "reversed") for a in arrays])


@pytest.mark.parametrize("kind", MEMORIES)
def test_what_the_copy_engines_take(gpu, kind):
    """Runs of memory of 64 KiB and more do not go through the kernel."""
    memory = MEMORIES[kind](gpu, 1 << 20, 0)
    for nbytes in (2**16 - 1, 2**16, 2**20):
        array = oracle.whole((nbytes,), "u1", nbytes)
        check(memory, [oracle.guarded_copy(array)], [oracle.guarded((nbytes,), "u1")])


_FILL = r"""
extern "C" __global__ void fill(unsigned char* to, unsigned long long count) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
       i < count; i += step)
    to[i] = (unsigned char)((i * 2654435761ull) >> 24);
}
"""


def pattern(first: int, count: int) -> np.ndarray:
    index = np.arange(first, first + count, dtype=np.uint64)
    return ((index * np.uint64(2654435761)) >> np.uint64(24)).astype(np.uint8)


@pytest.mark.timeout(300)
def test_an_array_of_more_than_2_gib(gpu):
    """Single bytes two apart: more words than 32 bits count, at offsets past 2**32."""
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 3 * LARGE + 2**28:
        pytest.skip(f"needs {3 * LARGE / 2**30:.0f} GiB of GPU memory, {free / 2**30:.1f} are free")
    whole = cupy.empty(2 * LARGE, np.uint8)
    packed = cupy.empty(LARGE, np.uint8)
    fill = cupy.RawKernel(_FILL, "fill")
    fill((4096 if not ON_DOUBLE else 4,), (256,), (whole, np.uint64(2 * LARGE)))

    def lent(array, step):
        return DeviceArray.at(
            array.data.ptr,
            (LARGE,),
            (step,),
            np.dtype("u1"),
            device=gpu.device,
            writable=True,
        )

    memory = AwareMemory(gpu, 0, 0)
    gpu.order(cupy.cuda.get_current_stream(), gpu.incoming)
    memory.copy([(lent(whole, 2), lent(packed, 1))])
    gpu.incoming.synchronize()
    window = 1 << 12
    starts = [0, LARGE // 2, 2**30 - 7, 2**31 - window // 2, LARGE - window]
    starts += np.random.default_rng(2).integers(0, LARGE - window, 200).tolist()
    for start in starts:
        if start + window > LARGE:
            continue  # on the double, whose array is small
        found = packed[start : start + window].get()
        assert (found == pattern(2 * start, 2 * window)[::2]).all(), f"from byte {start} on"
    del packed
    # And back, over elements that it must leave alone.
    ones = cupy.full(LARGE, 1, np.uint8)
    gpu.order(cupy.cuda.get_current_stream(), gpu.incoming)
    memory.copy([(lent(ones, 1), lent(whole, 2))])
    gpu.incoming.synchronize()
    for start in starts:
        if start + window > LARGE:
            continue
        wanted = pattern(2 * start, 2 * window)
        wanted[::2] = 1
        assert (whole[2 * start : 2 * (start + window)].get() == wanted).all(), f"at {2 * start}"


def test_one_copy_of_many_words_per_thread(gpu):
    """More words than a grid has threads: each goes on with a stride."""
    shape = (300, 40) if ON_DOUBLE else (2**15, 2**11)
    array = oracle.whole((math.prod(shape),), "u1").reshape(shape)
    target = cupy.empty(shape, np.uint8)
    source = cupy.asarray(array)
    memory = AwareMemory(gpu, 0, 0)

    def turned(made):
        return DeviceArray.at(
            made.data.ptr,
            shape[::-1],
            (1, shape[1]),
            np.dtype("u1"),
            device=gpu.device,
            writable=True,
        )

    straight = DeviceArray.at(
        target.data.ptr, shape[::-1], None, np.dtype("u1"), device=gpu.device, writable=True
    )
    gpu.order(cupy.cuda.get_current_stream(), gpu.incoming)
    memory.copy([(turned(source), straight)])
    gpu.incoming.synchronize()
    assert (target.get().reshape(shape[::-1]) == array.T).all()
