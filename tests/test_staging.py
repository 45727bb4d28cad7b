"""Staging: a pool of slots within a limit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmesh.staging import Staging


@pytest.mark.parametrize(
    ("slot_nbytes", "limit_nbytes", "slots"),
    [(100, 1000, 10), (100, 1099, 10), (100, 0, 4), (100, 399, 4), (100, 500, 5), (1, 7, 7)],
)
def test_slots_that_a_limit_allows(slot_nbytes, limit_nbytes, slots):
    staging = Staging(slot_nbytes, limit_nbytes)
    assert staging.nbytes == 0
    taken = [staging.take(slot_nbytes) for _ in range(slots)]
    assert all(buffer is not None and len(buffer) == slot_nbytes for buffer in taken)
    assert staging.take(1) is None
    assert staging.nbytes == slots * slot_nbytes <= max(limit_nbytes, 4 * slot_nbytes)


def test_slots_are_made_when_needed_and_used_again():
    staging = Staging(64, 1 << 20)
    first = staging.take(64)
    assert first is not None
    assert staging.nbytes == 64
    staging.give(first)
    again = staging.take(10)
    assert again is not None
    assert len(again) == 10
    assert again.base is first.base
    assert staging.nbytes == 64


def test_one_slot_past_the_limit_for_who_must_have_it():
    staging = Staging(8, 0)
    taken = [staging.take(8) for _ in range(4)]
    extra = staging.take(8, must=True)
    assert extra is not None
    assert staging.nbytes == 5 * 8
    staging.give(extra)
    assert staging.nbytes == 4 * 8
    assert staging.take(8) is None
    for buffer in taken:
        assert buffer is not None
        staging.give(buffer)
    assert staging.nbytes == 4 * 8


def test_nothing_to_stage():
    staging = Staging(0, 1 << 20)
    assert staging.nbytes == 0


@given(
    st.lists(st.tuples(st.integers(1, 16), st.booleans(), st.integers(0, 30)), max_size=80),
    st.integers(0, 200),
)
def test_buffers_never_overlap_and_the_pool_shrinks_back(steps, limit_nbytes):
    staging = Staging(16, limit_nbytes)
    taken: list[tuple[Any, int]] = []
    for nbytes, must, index in steps:
        if index < len(taken):
            staging.give(taken.pop(index)[0])
            continue
        buffer = staging.take(nbytes, must=must)
        assert buffer is not None or not must
        if buffer is not None:
            mark = len(taken) + 1
            buffer[...] = mark
            taken.append((buffer, mark))
        assert staging.nbytes >= 16 * len(taken)
    for buffer, mark in taken:
        assert (buffer == mark).all()
    while taken:
        staging.give(taken.pop()[0])
    assert staging.nbytes <= max(limit_nbytes, 4 * 16)
