"""Strided copies in words: the same bytes as NumPy's, with as few dimensions as can be."""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from xmesh.device import copy_kernel, regions
from xmesh.device.array import DeviceArray, address_of
from xmesh.device.copy_kernel import COPIES_PER_LAUNCH, launches_of
from xmesh.device.regions import Copy, Kind, Pair, c_strides, copies_of


def pair_of(source: NDArray[Any], destination: NDArray[Any]) -> Pair:
    return Pair(
        address_of(source),
        address_of(destination),
        source.shape,
        source.strides,
        destination.strides,
        source.itemsize,
    )


def make(word: int, copy: Copy) -> None:
    """One copy, word by word."""
    for index in itertools.product(*map(range, copy.shape)):
        source = copy.source + sum(map(math.prod, zip(index, copy.source_strides, strict=True)))
        target = copy.destination + sum(
            map(math.prod, zip(index, copy.destination_strides, strict=True))
        )
        assert source % word == target % word == 0
        ctypes.memmove(target, source, word)


@st.composite
def views(draw, shape, itemsize):
    """A view of some array, in any order of dimensions, with steps, offsets and directions."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3, -1, -2])) for _ in shape]
    pads = [draw(st.sampled_from([0, 0, 1, 3])) for _ in shape]
    extents = [max(1, n * abs(step)) + pad for n, step, pad in zip(shape, steps, pads, strict=True)]
    offset = draw(st.sampled_from([0, 0, 8, itemsize]))
    memory = np.zeros(offset + math.prod(extents) * itemsize, np.uint8)
    whole = memory[offset:].view(np.dtype((np.void, itemsize)))
    whole = whole.reshape([extents[d] for d in order]).transpose(np.argsort(order))
    cut = tuple(
        slice(pad, pad + n * abs(step)) for n, step, pad in zip(shape, steps, pads, strict=True)
    )
    for index in (cut, tuple(slice(None, None, step) for step in steps)):
        # The ellipsis keeps what has no dimensions an array.
        where: Any = (*index, ...)
        whole = whole[where]
    return whole


@given(st.data())
def test_copies_equal_numpys(data):
    itemsize = data.draw(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24]))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    source = data.draw(views(shape, itemsize))
    destination = data.draw(views(shape, itemsize))
    random = np.random.default_rng(source.size)
    noise = np.frombuffer(random.bytes((1 + source.size) * itemsize), source.dtype)
    source[...] = noise[1:].reshape(shape)
    expected = np.array(source)
    for kind, copies in copies_of([pair_of(source, destination)]).items():
        for copy in copies:
            make(kind.word_nbytes, copy)
    assert destination.tobytes() == expected.tobytes()
    assert source.tobytes() == expected.tobytes()


def test_what_follows_in_memory_is_one_dimension():
    array = np.zeros((4, 6, 8), np.float32)
    (((word, turned), (copy,)),) = copies_of([pair_of(array, np.empty_like(array))]).items()
    assert (word, turned) == (16, False)
    assert copy.shape == (4 * 6 * 8 * 4 // 16,)
    columns = array[:, :, 2:6]
    (((word, turned), (copy,)),) = copies_of(
        [pair_of(columns, np.zeros((4, 6, 4), np.float32))]
    ).items()
    assert (word, turned, copy.shape) == (8, False, (24, 2))
    assert copy.source_strides == (32, 8)
    assert copy.destination_strides == (16, 8)


def test_an_odd_address_takes_narrow_words():
    memory = np.zeros(65, np.uint8)
    (((word, turned), (copy,)),) = copies_of([pair_of(memory[1:], np.zeros(64, np.uint8))]).items()
    assert (word, turned, copy.words) == (1, False, 64)


def test_memory_of_one_order_is_copied_in_that_order():
    """Also where it is not that of C; and from the inside of an array to that of another."""
    one, other = (np.zeros((4, 6, 8), np.float32, order="F") for _ in range(2))
    (((word, turned), (copy,)),) = copies_of([pair_of(one, other)]).items()
    assert (word, turned, copy.shape) == (16, False, (one.nbytes // 16,))
    inside = (slice(0, 2), slice(1, 5), slice(2, 7))
    (((word, turned), (copy,)),) = copies_of([pair_of(one[inside], other[inside])]).items()
    assert (word, turned, copy.shape) == (8, False, (5, 4))


@pytest.mark.parametrize(
    ("source", "destination", "shape"),
    [
        (np.zeros((30, 40), "f4"), np.zeros((40, 30), "f4").T, (40, 30)),
        # Pictures, from channels last to channels first: rows follow the channels.
        (np.zeros((20, 30, 3), "f4").transpose(2, 0, 1), np.zeros((3, 20, 30), "f4"), (3, 600)),
        # Of four dimensions only the nearest of each side matter.
        (
            np.zeros((5, 6, 7, 8), "f8").transpose(1, 3, 0, 2),
            np.zeros((6, 8, 5, 7), "f8"),
            (6, 5, 8, 7),
        ),
    ],
)
def test_another_order_is_turned(source, destination, shape):
    (((word, turned), (copy,)),) = copies_of([pair_of(source, destination)]).items()
    assert (word, turned, copy.shape) == (source.itemsize, True, shape)
    assert abs(copy.source_strides[-2]) == abs(copy.destination_strides[-1]) == word


def test_what_is_repeated_or_comes_in_long_runs_is_not_turned():
    repeated = np.broadcast_to(np.zeros((40, 1), "f4"), (40, 30))
    columns = np.zeros((40, 30, 16), "f4").transpose(1, 0, 2)
    for source in (repeated, columns):
        ((kind, _),) = copies_of([pair_of(source, np.zeros(source.shape, "f4"))]).items()
        assert not kind.turned


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_division_by_multiplication(divisor, number):
    magic, shift = copy_kernel._division(divisor)
    assert magic < 2**32
    for n in (number, number // divisor * divisor, max(0, number // divisor * divisor - 1)):
        assert n // divisor == n * magic >> shift


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([10, 12]))
def test_tiles_fit_and_are_full_where_they_can_be(rows, columns, bits):
    row_bits, column_bits = copy_kernel._sides(bits, rows, columns)
    assert 1 <= row_bits <= 8
    assert 1 <= column_bits <= 8
    assert row_bits + column_bits <= bits
    if row_bits + column_bits < bits:  # a longer one would be no better
        assert 1 << row_bits >= min(rows, 256)
        assert 1 << column_bits >= min(columns, 256)


@pytest.mark.parametrize("turned", [False, True])
def test_planes_farther_apart_than_offsets_reach(turned):
    """Two planes 3 GiB apart: in two copies, whose table has no stride of that size."""
    far, shape = 3 << 30, (2, 40, 30)
    one, other = (far, 120, 4), (far, 4, 160) if turned else (far, 128, 4)
    for strides in ((one, other), (other, one)):
        found = copies_of([Pair(0, 1 << 40, shape, *strides, 4)])
        ((kind, copies),) = found.items()
        assert kind == Kind(4 if turned else 8, turned)
        assert [(copy.source, copy.destination) for copy in copies] == [
            (0, 1 << 40),
            (far, (1 << 40) + far),
        ]
        (launch,) = launches_of(kind, copies)
        assert launch.grid[1] == 2


def test_short_runs_from_the_host_are_read_in_its_order():
    packed = np.zeros((40, 30, 3), "f4")
    there = np.zeros((30, 40, 3), "f4").transpose(1, 0, 2)
    ((_, (copy,)),) = copies_of([pair_of(packed, there)], from_host=True).items()
    assert copy.source_strides == (360, 12, 4)
    ((_, (copy,)),) = copies_of([pair_of(packed, there)]).items()
    assert copy.destination_strides == (480, 12, 4)


@pytest.fixture
def no_forms_kept():
    """Forms are kept with whether they are within the limits, which a test changes."""
    regions._form.cache_clear()
    yield
    regions._form.cache_clear()


@pytest.mark.usefixtures("no_forms_kept")
def test_a_copy_past_the_limits_is_cut(monkeypatch):
    monkeypatch.setattr(regions, "MAX_WORDS", 10)
    monkeypatch.setattr(regions, "MAX_REACH_NBYTES", 300)
    monkeypatch.setattr(regions, "MAX_DIMS", 2)
    source = np.arange(3 * 4 * 5 * 6, dtype=np.int32).reshape(3, 4, 5, 6)[:, ::2, :, ::2]
    destination = np.zeros(source.shape, np.int32)
    found = copies_of([pair_of(source, destination)])
    assert sum(map(len, found.values())) > 6
    for kind, copies in found.items():
        for copy in copies:
            assert copy.words <= 10
            assert copy.within_limits
            assert all(
                sum((n - 1) * abs(stride) for n, stride in zip(copy.shape, side, strict=True))
                <= 300
                for side in (copy.source_strides, copy.destination_strides)
            )
            assert len(copy.shape) <= 2
            make(kind.word_nbytes, copy)
    assert np.array_equal(source, destination)


def test_many_copies_are_few_launches():
    copies = [Copy(64 * i, 4096 + 64 * i, (4,), (16,), (16,)) for i in range(40)]
    launches = list(launches_of(Kind(16, False), copies))
    assert [launch.grid[1] for launch in launches] == [16, 16, 8]
    assert len(launches) == -(-40 // COPIES_PER_LAUNCH)
    # By value, in the 4 KiB that a kernel's arguments may take.
    assert all(launch.table.size == 1 and launch.table.nbytes <= 4096 for launch in launches)


@pytest.mark.parametrize(
    ("words", "count", "host", "blocks"),
    [
        (100, 1, False, 1),
        (1 << 16, 1, False, 256),  # a word for each thread: else there were 64 blocks
        (1 << 16, 16, False, 64),
        (1 << 20, 1, False, 1024),
        (1 << 30, 1, False, 16384),
        (1 << 20, 1, True, 32),  # enough for the link, and few for the GPU
        (1 << 20, 16, True, 2),
    ],
)
def test_blocks(words, count, host, blocks):
    copy = Copy(0, 1 << 40, (words,), (32,), (16,))
    (launch,) = launches_of(Kind(16, False), [copy] * count, host)
    assert launch.grid == (blocks, count)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 3), (2, 0)])
@pytest.mark.parametrize("itemsize", [1, 2, 16])
def test_c_strides(shape, itemsize):
    found = c_strides(shape, itemsize)
    expected = np.empty(shape, np.dtype((np.void, itemsize))).strides
    assert len(found) == len(shape)
    assert 0 in shape or found == expected


def test_an_array_described_by_its_address_is_never_read():
    """An address that no memory has: only arithmetic happens."""
    base = 0x2000_0000_0000_0000
    array = DeviceArray.at(base, (4, 6), None, np.dtype("f4"), device=0, writable=True)
    part = array[1:3, 2:4, ...]
    assert part.pointer == base + 4 * (6 + 2)
    assert part.shape == (2, 2)
    assert part.addresses.strides == (24, 4)
    assert part.nbytes == 16
    assert not np.shares_memory(array[:, 0:1].addresses, array[:, 1:2].addresses)
    empty = DeviceArray.at(0, (0, 5), None, np.dtype("f4"), device=0, writable=True)
    assert (empty.pointer, empty.shape, empty.nbytes) == (0, (0, 5), 0)
