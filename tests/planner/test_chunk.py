from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import explicit_layouts, shapes

from xmesh.box import Box
from xmesh.planner.chunk import chunks_of, take


@st.composite
def disjoint_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and disjoint boxes in it, none empty, in any order."""
    shape = draw(shapes(max_ndim=4))
    boxes = list(draw(explicit_layouts(shape)).holders)
    return shape, draw(st.permutations(boxes)) if boxes else []


def elements(shape: tuple[int, ...], boxes) -> list[int]:
    """Flat indices of the elements of boxes, box after box, each in C order."""
    flat = np.arange(int(np.prod(shape))).reshape(shape)
    return [int(i) for box in boxes for i in np.atleast_1d(flat[box.slices()]).ravel()]


def volume_of(chunk) -> int:
    return sum(box.volume for box in chunk)


# --- chunks ------------------------------------------------------------------------------------


@given(disjoint_boxes(), st.integers(1, 400))
def test_chunks_hold_every_element_once_in_the_order_of_the_boxes(drawn, volume):
    shape, boxes = drawn
    pieces = [box for chunk in chunks_of(boxes, volume) for box in chunk]
    assert elements(shape, pieces) == elements(shape, boxes)


@given(disjoint_boxes(), st.integers(1, 400))
def test_no_chunk_is_empty_or_too_large(drawn, volume):
    for chunk in chunks_of(drawn[1], volume):
        assert 1 <= volume_of(chunk) <= volume
        assert all(box.volume for box in chunk)


@given(disjoint_boxes(), st.integers(1, 400))
def test_a_chunk_ends_only_where_the_next_piece_does_not_fit_or_it_is_one_large_piece(
    drawn, volume
):
    for chunk, following in pairwise(chunks_of(drawn[1], volume)):
        alone = len(chunk) == 1 and volume_of(chunk) * 2 > volume
        assert alone or volume_of(chunk) + following[0].volume > volume


@given(disjoint_boxes(), st.integers(1, 400))
def test_a_chunk_of_several_pieces_begins_with_a_small_one(drawn, volume):
    for chunk in chunks_of(drawn[1], volume):
        assert len(chunk) == 1 or chunk[0].volume * 2 <= volume


def test_large_boxes_are_cut_evenly_along_the_outermost_dimension_that_will_do():
    assert chunks_of([Box((0, 0), (10, 6))], 24) == (
        (Box((0, 0), (3, 6)),),
        (Box((3, 0), (6, 6)),),
        (Box((6, 0), (10, 6)),),
    )
    # A row is too long: rows are cut, one by one.
    assert chunks_of([Box((2, 0), (4, 6))], 3) == (
        (Box((2, 0), (3, 3)),),
        (Box((2, 3), (3, 6)),),
        (Box((3, 0), (4, 3)),),
        (Box((3, 3), (4, 6)),),
    )


def test_small_boxes_share_a_chunk():
    boxes = [Box((i,), (i + 2,)) for i in range(0, 12, 2)]
    assert [len(chunk) for chunk in chunks_of(boxes, 4)] == [2, 2, 2]
    assert [len(chunk) for chunk in chunks_of(boxes, 3)] == [1] * 6
    assert [len(chunk) for chunk in chunks_of(boxes, 100)] == [6]


def test_a_scalar_is_one_chunk_and_nothing_is_none():
    assert chunks_of([Box((), ())], 1) == ((Box((), ()),),)
    assert chunks_of([], 8) == ()


# --- take --------------------------------------------------------------------------------------


@given(disjoint_boxes(), st.integers(0, 3000))
def test_take_divides_at_exactly_that_element(drawn, volume):
    shape, boxes = drawn
    head, tail = take(boxes, volume)
    every = elements(shape, boxes)
    assert elements(shape, head) == every[:volume]
    assert elements(shape, tail) == every[volume:]


@given(disjoint_boxes(), st.integers(0, 3000))
def test_take_cuts_one_box_at_the_most_and_into_few_pieces(drawn, volume):
    shape, boxes = drawn
    head, tail = take(boxes, volume)
    whole = set(boxes)
    cut = [box for box in boxes if box not in head and box not in tail]
    assert len(cut) <= 1
    for part in (head, tail):
        assert len([box for box in part if box not in whole]) <= len(shape)


def test_take_of_a_box_leaves_a_staircase():
    head, tail = take([Box((0, 0), (3, 4))], 6)
    assert head == (Box((0, 0), (1, 4)), Box((1, 0), (2, 2)))
    assert tail == (Box((1, 2), (2, 4)), Box((2, 0), (3, 4)))
