from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import layout_pairs

from xmesh.box import Box
from xmesh.box_index import BoxIndex
from xmesh.errors import PlanError
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner.cells import disjoint_cells
from xmesh.planner.unit_task import Streams

PAIRS = layout_pairs(explicit=True)


def owners(layout: Layout) -> np.ndarray:
    """For each element the ranks that have it, as bits."""
    table = np.zeros(layout.shape, dtype=np.int64)
    for rank in layout.ranks:
        for box in layout.boxes(rank):
            table[box.slices()] |= 1 << rank
    return table


def bits(ranks) -> int:
    return sum(1 << rank for rank in ranks)


def cells(layout: Layout) -> list[Box]:
    """Distinct boxes with elements, in order."""
    every = {box for rank in layout.ranks for box in layout.boxes(rank)}
    return sorted(box for box in every if box.volume)


def boxes_1d(*spans) -> list[Box]:
    return [Box((a,), (b,)) for a, b in spans]


# --- unit tasks --------------------------------------------------------------------------------


@given(PAIRS)
def test_unit_tasks_are_what_a_look_at_every_element_finds(pair):
    src, dst = pair
    held, needed = owners(src), owners(dst)
    seen = np.zeros(src.shape, dtype=np.int64)
    for task in Streams(src, dst).unit_tasks():
        at = task.box.slices()
        assert (held[at] == bits(task.senders)).all()
        assert (needed[at] == bits(task.receivers)).all()
        seen[at] += 1
    assert (seen == (needed != 0)).all()


@given(PAIRS)
def test_unit_tasks_are_the_intersections_of_distinct_boxes_in_order(pair):
    src, dst = pair
    assume(not any(a.intersect(b) for side in pair for a, b in combinations(cells(side), 2)))
    expected = [a.intersect(b) for a in cells(src) for b in cells(dst) if a.intersect(b)]
    tasks = list(Streams(src, dst).unit_tasks())
    assert [task.box for task in tasks] == expected
    assert [task.index for task in tasks] == list(range(len(expected)))


@given(PAIRS, st.integers(0, 20))
def test_counting_stops_past_the_limit(pair, limit):
    streams = Streams(*pair)
    total = len(list(streams.unit_tasks()))
    counted = streams.count(limit)
    assert counted == total if total <= limit else limit < counted <= total


# --- streams -----------------------------------------------------------------------------------


@given(PAIRS)
def test_streams_fuse_the_tasks_of_the_same_ranks_and_nothing_else(pair):
    streams = Streams(*pair)
    fused: dict[tuple[tuple[int, ...], ...], list[Box]] = {}
    for task in streams.unit_tasks():
        fused.setdefault((task.senders, task.receivers), []).append(task.box)
    found = list(streams)
    assert len(found) == len(fused)
    for stream in found:
        assert list(stream.boxes) == fused[stream.senders, stream.receivers]
        assert stream.volume == sum(box.volume for box in stream.boxes)


@given(PAIRS)
def test_both_ends_of_a_stream_see_the_same_boxes_in_the_same_order(pair):
    streams = Streams(*pair)
    found = list(streams)
    for stream in found:
        assert stream in streams.of_source(stream.source)
        assert stream in streams.of_destination(stream.destination)
    for rank in {*pair[0].ranks, *pair[1].ranks}:
        mine = [s for s in found if rank in s.senders or rank in s.receivers]
        assert streams.of_rank(rank) == mine


def test_a_block_cyclic_layout_is_few_streams():
    blocks = [Box((i,), (i + 1,)) for i in range(64)]
    src = Layout.from_boxes({r: blocks[r::4] for r in range(4)}, (64,))
    dst = Layout(DeviceMesh([4, 5]), "S0", (64,))
    streams = Streams(src, dst)
    assert len(list(streams.unit_tasks())) == 64
    assert [(s.senders, s.receivers, s.volume) for s in streams] == [
        ((sender,), (receiver,), 8) for sender in range(4) for receiver in (4, 5)
    ]


# --- overlapping boxes --------------------------------------------------------------------------


def test_overlapping_boxes_are_cut_at_each_others_borders():
    holders = {Box((0,), (5,)): (0,), Box((4,), (8,)): (1,), Box((7,), (9,)): (2,)}
    assert disjoint_cells(holders) == {
        Box((0,), (4,)): (0,),
        Box((4,), (5,)): (0, 1),
        Box((5,), (7,)): (1,),
        Box((7,), (8,)): (1, 2),
        Box((8,), (9,)): (2,),
    }


def test_what_two_halos_share_travels_once():
    """The ranks that need an element get it from one stream, however their boxes overlap."""
    src = Layout(DeviceMesh([0]), "R", (8,))
    dst = Layout.from_boxes({1: boxes_1d((0, 6)), 2: boxes_1d((2, 8))}, (8,))
    found = [(s.receivers, s.volume) for s in Streams(src, dst)]
    assert sorted(found) == [((1,), 2), ((1, 2), 4), ((2,), 2)]


@given(layout_pairs(explicit=True))
def test_cells_are_disjoint_and_make_up_the_boxes(pair):
    layout = pair[1]
    found = disjoint_cells(layout.holders)
    seen = np.zeros(layout.shape, dtype=np.int64)
    for cell, ranks in found.items():
        assert (owners(layout)[cell.slices()] == bits(ranks)).all()
        seen[cell.slices()] += 1
    assert (seen == (owners(layout) != 0)).all()


@given(PAIRS)
def test_there_is_one_stream_for_two_sets_of_ranks(pair):
    found = [(stream.senders, stream.receivers) for stream in Streams(*pair)]
    assert len(set(found)) == len(found)


# --- the index ---------------------------------------------------------------------------------


@st.composite
def box_lists(draw: st.DrawFn) -> tuple[list[Box], Box]:
    """Distinct boxes, none empty, that overlap as they like, and a box to look them up by."""
    ndim = draw(st.integers(0, 4))

    def a_box() -> Box:
        starts = [draw(st.integers(0, 6)) for _ in range(ndim)]
        return Box(tuple(starts), tuple(a + draw(st.integers(1, 5)) for a in starts))

    boxes = [a_box() for _ in range(draw(st.integers(0, 12)))]
    return list(dict.fromkeys(boxes)), a_box()


@given(box_lists())
def test_the_index_finds_what_a_scan_finds(drawn):
    boxes, query = drawn
    expected = [i for i, box in enumerate(boxes) if box.intersect(query)]
    assert BoxIndex(boxes).overlapping(query) == expected


@given(PAIRS)
def test_the_index_finds_what_a_scan_finds_in_layouts(pair):
    boxes = cells(pair[0])
    index = BoxIndex(boxes)
    for query in cells(pair[1]):
        assert index.overlapping(query) == [i for i, b in enumerate(boxes) if b.intersect(query)]


def test_the_index_copes_with_nested_scattered_and_crossing_boxes():
    nested = boxes_1d((0, 100), (10, 20), (12, 14), (50, 60), (99, 100))
    index = BoxIndex(nested)
    assert index.overlapping(Box((13,), (14,))) == [0, 1, 2]
    assert index.overlapping(Box((20,), (50,))) == [0]
    cross = [Box((0, 4), (9, 5)), Box((4, 0), (5, 9)), Box((8, 8), (9, 9))]
    assert BoxIndex(cross).overlapping(Box((4, 4), (9, 9))) == [0, 1, 2]
    assert BoxIndex(cross).overlapping(Box((5, 5), (8, 8))) == []


# --- what is refused ---------------------------------------------------------------------------


def refusal(src: Layout, dst: Layout) -> str:
    with pytest.raises(PlanError) as caught:
        Streams(src, dst)
    return str(caught.value)


def test_layouts_of_other_shapes_are_refused():
    mesh = DeviceMesh([0, 1])
    text = refusal(Layout(mesh, "S0 R", (4, 6)), Layout(mesh, "S0 R", (6, 4)))
    assert text.startswith("source and destination must lay out the same array")
    assert "source shape (4, 6), destination shape (6, 4)" in text


def test_a_gap_is_named_with_the_ranks_that_need_it():
    src = Layout.from_boxes({0: boxes_1d((0, 3)), 1: boxes_1d((5, 8))}, (8,))
    text = refusal(src, Layout(DeviceMesh([2, 3, 4, 5]), "S0", (8,)))
    assert "no source rank holds [3:4]" in text
    assert "needed by ranks (3,) as part of [2:4]" in text


def test_a_gap_that_nobody_needs_is_none():
    src = Layout.from_boxes({0: boxes_1d((0, 3)), 1: boxes_1d((5, 8))}, (8,))
    dst = Layout.from_boxes({2: boxes_1d((0, 2)), 3: boxes_1d((6, 8))}, (8,))
    assert [s.volume for s in Streams(src, dst)] == [2, 2]


@given(PAIRS, st.data())
def test_every_box_taken_away_is_missed(pair, data):
    src, dst = pair
    held = {rank: list(src.boxes(rank)) for rank in src.ranks}
    needed = owners(dst)
    times_held = sum((held_once(src, box) for box in cells(src)), np.zeros(src.shape, np.int64))
    gone = [
        box
        for box in cells(src)
        if (needed[box.slices()].astype(bool) & (times_held[box.slices()] == 1)).any()
    ]
    assume(gone)
    hole = data.draw(st.sampled_from(gone))
    left = {rank: [box for box in boxes if box != hole] for rank, boxes in held.items()}
    assert "no source rank holds" in refusal(Layout.from_boxes(left, src.shape), dst)


def held_once(layout: Layout, box: Box) -> np.ndarray:
    """One where the box is, zero elsewhere."""
    table = np.zeros(layout.shape, dtype=np.int64)
    table[box.slices()] = 1
    return table
