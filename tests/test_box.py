from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmesh.box import Box
from xmesh.errors import LayoutError, XmeshError


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    return shape, draw(boxes(shape)), draw(boxes(shape))


def mask(shape: tuple[int, ...], box: Box) -> np.ndarray:
    array = np.zeros(shape, bool)
    array[box.slices()] = True
    return array


@given(box_pairs())
def test_shape_volume_and_empty_are_those_of_the_slice(drawn):
    shape, box, _ = drawn
    part = np.zeros(shape)[box.slices()]
    assert box.shape == part.shape
    assert box.ndim == part.ndim
    assert box.volume == part.size
    assert box.empty == (part.size == 0)


@given(box_pairs())
def test_intersect_and_contains_are_those_of_the_elements(drawn):
    shape, a, b = drawn
    both = mask(shape, a) & mask(shape, b)
    meet = a.intersect(b)
    assert (meet is None) == (not both.any())
    if meet is not None:
        assert np.array_equal(mask(shape, meet), both)
    assert meet == b.intersect(a)
    assert a.contains(b) == bool(np.all(mask(shape, a) >= mask(shape, b)))


@given(box_pairs())
def test_slices_of_an_origin_find_the_same_elements(drawn):
    shape, a, b = drawn
    meet = a.intersect(b)
    if meet is None:
        return
    array = np.arange(int(np.prod(shape))).reshape(shape)
    local = array[a.slices()]
    assert np.array_equal(local[meet.slices(a)], array[meet.slices()])
    assert meet.offset(a.start).shape == meet.shape


@given(st.lists(st.integers(0, 6), max_size=4))
def test_from_shape_is_the_whole_array(shape):
    box = Box.from_shape(shape)
    assert mask(tuple(shape), box).all()
    assert box.shape == tuple(shape)


def test_a_scalar_is_one_element():
    scalar = Box((), ())
    assert scalar.volume == 1
    assert not scalar.empty
    assert scalar.intersect(scalar) == scalar
    assert scalar.slices() == ()


def test_boxes_sort_by_start_and_print_as_slices():
    assert sorted([Box((1, 0), (2, 1)), Box((0, 3), (2, 4))])[0].start == (0, 3)
    assert str(Box((0, 3), (2, 4))) == "[0:2, 3:4]"
    assert len({Box((0,), (1,)), Box((0,), (1,))}) == 1


@pytest.mark.parametrize(
    ("start", "stop"), [((0, 0), (1,)), ((2,), (1,)), ((-1,), (1,)), ((1.5,), (2,))]
)
def test_error_text(start, stop):
    with pytest.raises(LayoutError) as caught:
        Box(start, stop)
    assert str(caught.value) == (
        "a box needs 0 <= start <= stop in every dimension\n"
        f"  values:  start={start} stop={stop}\n"
        "  remedy:  give as many starts as stops, integers, each start at most its stop"
    )
    assert isinstance(caught.value, XmeshError)
