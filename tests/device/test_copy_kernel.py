"""Packing and unpacking on a device equal NumPy's copies, byte by byte, and touch nothing else."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmesh.device import copy_kernel, gpu, regions
from xmesh.device.array import DeviceArray
from xmesh.device.gpu import DeviceBytes, Gpu
from xmesh.device.memory import AwareMemory, StagedMemory

pytestmark = pytest.mark.double_only
engine: Any = getattr(cupy, "_engine", None)

GUARD = 0x5B
AROUND = 64


@pytest.fixture(scope="module")
def device():
    return Gpu()


class Buffer:
    """Bytes on the device between guards, and what they ought to be."""

    def __init__(self, nbytes: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.wanted = np.full(nbytes + 2 * AROUND, GUARD, np.uint8)
        self.inner = self.wanted[AROUND : AROUND + nbytes]
        self.inner[:] = random.integers(0, 256, nbytes)
        self._bytes = cupy.asarray(self.wanted)
        cupy.cuda.Stream.null.synchronize()

    def at(self, offset: int) -> int:
        return int(self._bytes.data.ptr) + AROUND + offset

    def check(self) -> None:
        found = self._bytes.get()
        wrong = np.flatnonzero(found != self.wanted)
        assert not wrong.size, f"{wrong.size} bytes, the first at {wrong[0] - AROUND}"


class View:
    """A strided array in a buffer, as NumPy sees it and as a device array."""

    def __init__(self, buffer: Buffer, offset: int, shape, strides, dtype) -> None:
        dtype = np.dtype(dtype)
        self.host = np.ndarray(shape, dtype, buffer.inner, offset, strides)
        self.there = DeviceArray.at(
            buffer.at(offset), shape, strides, dtype, device=0, writable=True, owner=buffer
        )


@st.composite
def memories(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int):
    """(bytes, offset, strides): dimensions in any order, with gaps, forwards or backwards."""
    strides = [0] * len(shape)
    reach, step = 0, itemsize
    lead = draw(st.integers(0, 17))
    first = lead
    for d in draw(st.permutations(range(len(shape)))):
        step += draw(st.sampled_from((0, 0, 0, 1, itemsize, 2 * itemsize, 7)))
        strides[d] = step if draw(st.booleans()) else -step
        if strides[d] < 0:
            first += step * max(0, shape[d] - 1)
        step *= max(1, shape[d])
        reach = step
    return lead + reach + itemsize + draw(st.integers(0, 9)), first, tuple(strides)


ITEMS = {1: "u1", 2: "<u2", 3: "V3", 4: "<f4", 8: "<f8", 12: "V12", 16: "<c16"}


@st.composite
def pairs(draw: st.DrawFn):
    ndim = draw(st.integers(0, 7))
    extents = st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 3 if ndim > 4 else 6)
    shape = tuple(draw(extents) for _ in range(ndim))
    itemsize = draw(st.sampled_from(sorted(ITEMS)))
    memory = memories(shape, itemsize)
    return shape, itemsize, draw(memory), draw(memory)


@settings(max_examples=150)
@given(items=st.lists(pairs(), min_size=1, max_size=4), seed=st.integers(0, 1 << 20))
def test_copies_equal_those_of_numpy(device, items, seed):
    kept, todo = [], []
    for i, (shape, itemsize, source, destination) in enumerate(items):
        both = (source, destination)
        buffers = [Buffer(nbytes, seed + 2 * i + j) for j, (nbytes, _, _) in enumerate(both)]
        one, other = (
            View(buffer, offset, shape, strides, ITEMS[itemsize])
            for buffer, (_, offset, strides) in zip(buffers, both, strict=True)
        )
        other.host[...] = one.host
        kept += buffers
        todo.append((one.there, other.there))
    memory = AwareMemory(device, 1, 0)
    memory.copy(todo)
    device.incoming.synchronize()
    for buffer in kept:
        buffer.check()


@settings(max_examples=60)
@given(
    items=st.lists(pairs(), min_size=1, max_size=20),
    odd=st.integers(0, 16),
    staged=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_packing_and_unpacking_equal_numpy(device, items, odd, staged, seed):
    """Regions of one chunk have one item size in truth; here they are mixed, which is harder."""
    sources: list[View] = []
    targets: list[View] = []
    kept: list[Buffer] = []
    for i, (shape, itemsize, source, target) in enumerate(items):
        for views, (nbytes, offset, strides) in ((sources, source), (targets, target)):
            buffer = Buffer(nbytes, seed + 2 * i + (views is targets))
            kept.append(buffer)
            views.append(View(buffer, offset, shape, strides, ITEMS[itemsize]))
    wanted = b"".join(view.host.tobytes() for view in sources)
    whole = device.pinned_bytes(len(wanted) + odd + AROUND)
    whole[:] = GUARD
    if staged:
        memory: Any = StagedMemory(device, 1, 0)
        chunk = whole[odd : odd + len(wanted)]
    else:
        memory = AwareMemory(device, 1, 0)
        buffer = Buffer(len(wanted) + odd, seed)
        kept.append(buffer)
        buffer.inner[odd:] = np.frombuffer(wanted, np.uint8)
        chunk = DeviceBytes(buffer.at(odd), len(wanted), buffer)
    memory.pack([view.there for view in sources], chunk)
    device.order(device.outgoing, device.incoming)
    memory.unpack(chunk, [view.there for view in targets])
    device.incoming.synchronize()
    for one, other in zip(sources, targets, strict=True):
        other.host[...] = one.host
    for buffer in kept:
        buffer.check()
    if staged:
        assert chunk.tobytes() == wanted
        assert (whole[:odd] == GUARD).all()
        assert (whole[odd + len(wanted) :] == GUARD).all()


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((70, 45), (1, 0)),
        ((64, 128), (1, 0)),
        ((3, 1500), (1, 0)),
        ((1500, 3), (1, 0)),
        ((3, 33, 34), (2, 1, 0)),
        ((2, 3, 40, 5), (1, 3, 0, 2)),
    ],
)
def test_turned_copies_go_by_tiles(device, shape, order, itemsize, monkeypatch):
    """Into memory of another order; more tiles than blocks, and backwards along a dimension.

    But for elements of several words, which are copied one by one.
    """
    monkeypatch.setattr(copy_kernel, "_MOST_BLOCKS", 2)
    names = []
    launches_of = copy_kernel.launches_of

    def look(*args):
        for launch in launches_of(*args):
            names.append(launch.kernel)
            yield launch

    monkeypatch.setattr(gpu, "launches_of", look)
    nbytes = int(np.prod(shape)) * itemsize
    dtype = np.dtype(ITEMS[itemsize])
    source, target = Buffer(nbytes, 1), Buffer(nbytes + 16, 2)
    host = np.ndarray(shape, dtype, source.inner)
    one = View(source, nbytes - itemsize, shape, tuple(-s for s in host.strides), dtype)
    turned = np.ndarray(tuple(shape[d] for d in order), dtype, target.inner, 16)
    other = View(target, 16, shape, turned.transpose(np.argsort(order)).strides, dtype)
    other.host[...] = one.host
    launched = engine.counters["launch"]
    AwareMemory(device, 1, 0).copy([(one.there, other.there)])
    device.incoming.synchronize()
    assert engine.counters["launch"] == launched + 1
    (name,) = names
    assert name.startswith("copy_4_" if itemsize == 12 else f"turn_{itemsize}_")
    source.check()
    target.check()


def rows(count: int, itemsize: int = 4, length: int = 3):
    """Regions of one word size that are no runs of memory, with the buffer that they lie in."""
    step = itemsize * (2 * length)
    buffer = Buffer(count * 2 * step + 64, 1)
    views = [
        View(buffer, 2 * step * i, (2, length), (step, 2 * itemsize), ITEMS[itemsize])
        for i in range(count)
    ]
    return buffer, views


@pytest.mark.parametrize(("count", "launches"), [(1, 1), (2, 1), (16, 1), (17, 2), (40, 3)])
def test_regions_share_launches(device, count, launches):
    """Derived types make a copy per row; here up to 16 regions are one launch."""
    assert copy_kernel.COPIES_PER_LAUNCH == 16
    buffer, views = rows(count)
    target = device.pinned_bytes(sum(view.host.nbytes for view in views))
    memory = StagedMemory(device, 1, 0)
    engine.counters.clear()
    memory.pack([view.there for view in views], target)
    assert engine.counters["launch"] == launches
    assert engine.counters["memcpyAsync"] == 0
    device.outgoing.synchronize()
    assert target.tobytes() == b"".join(view.host.tobytes() for view in views)
    buffer.check()


def test_each_word_size_has_a_launch_of_its_own(device):
    pieces = [rows(3, itemsize) for itemsize in (1, 2, 4, 8, 16)]
    views = [view for _, found in pieces for view in found]
    target = device.pinned_bytes(sum(view.host.nbytes for view in views))
    engine.counters.clear()
    # The widest first: so each piece begins where its words may.
    StagedMemory(device, 1, 0).pack([view.there for view in views[::-1]], target)
    assert engine.counters["launch"] == 5
    device.outgoing.synchronize()
    assert target.tobytes() == b"".join(view.host.tobytes() for view in views[::-1])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 2)])
def test_nothing_is_launched_for_no_elements(device, shape):
    empty = DeviceArray.at(0, shape, None, np.dtype("f4"), device=0, writable=True)
    engine.counters.clear()
    memory = AwareMemory(device, 1, 0)
    memory.copy([(empty, empty)])
    memory.pack([empty], device.pinned_bytes(0))
    assert engine.counters["launch"] + engine.counters["memcpyAsync"] == 0


def test_long_runs_go_to_the_copy_engines(device, monkeypatch):
    monkeypatch.setattr(gpu, "_ENGINE_NBYTES", 256)
    source, target = Buffer(1000, 1), Buffer(1000, 2)
    engine.counters.clear()
    for offset, nbytes in ((0, 240), (240, 512)):
        one = View(source, offset, (nbytes,), (1,), "u1")
        other = View(target, offset, (nbytes,), (1,), "u1")
        other.host[...] = one.host
        AwareMemory(device, 1, 0).copy([(one.there, other.there)])
    device.incoming.synchronize()
    assert (engine.counters["launch"], engine.counters["memcpyAsync"]) == (1, 1)
    target.check()


def test_a_copy_of_more_words_than_an_index_has_is_cut(device, monkeypatch):
    regions._form.cache_clear()  # it keeps whether forms are within the limits
    monkeypatch.setattr(regions, "MAX_WORDS", 50)
    for shape, strides in (((13, 11), (22, 2)), ((1, 1, 120), (0, 0, 3)), ((120,), (2,))):
        source, target = Buffer(400, 1), Buffer(400, 2)
        one, other = (View(buffer, 5, shape, strides, "u1") for buffer in (source, target))
        other.host[...] = one.host
        AwareMemory(device, 1, 0).copy([(one.there, other.there)])
        device.incoming.synchronize()
        target.check()
    regions._form.cache_clear()


def test_more_words_than_threads(device, monkeypatch):
    """Each thread goes on with a stride."""
    monkeypatch.setattr(copy_kernel, "_MOST_BLOCKS", 2)
    source, target = Buffer(40_000, 1), Buffer(40_000, 2)
    one, other = (View(buffer, 1, (9_999,), (3,), "u1") for buffer in (source, target))
    other.host[...] = one.host
    AwareMemory(device, 1, 0).copy([(one.there, other.there)])
    device.incoming.synchronize()
    target.check()
