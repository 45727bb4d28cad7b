from __future__ import annotations

import doctest
import importlib.util
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import explicit_layouts, layout_pairs, layouts, meshes, shapes, specs

from xmesh.box import Box
from xmesh.errors import LayoutError, MeshError, SpecError
from xmesh.layout import UNEVEN_RULES, Layout, part_bounds
from xmesh.mesh import DeviceMesh
from xmesh.spec import ShardingSpec


def torch_chunk(n: int, parts: int) -> list[list[int]]:
    """torch.chunk of ``range(n)``, filled up with empty lists as DTensor does."""
    size = max(1, math.ceil(n / parts))
    chunks = [list(range(i, min(n, i + size))) for i in range(0, n, size)]
    return chunks + [[]] * (parts - len(chunks))


def split(n: int, parts: int, uneven: str) -> list[list[int]]:
    if uneven == "balanced":
        return [part.tolist() for part in np.array_split(np.arange(n), parts)]
    return torch_chunk(n, parts)


def refusal(call, *args, error=LayoutError, **kwargs) -> str:
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@st.composite
def any_layouts(draw: st.DrawFn) -> Layout:
    shape = draw(shapes(max_ndim=4))
    return draw(layouts(shape) | explicit_layouts(shape))


@st.composite
def spec_layouts(draw: st.DrawFn) -> Layout:
    return draw(layouts(draw(shapes(max_ndim=4))))


# --- what a spec cuts --------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 12), st.sampled_from(UNEVEN_RULES))
def test_part_bounds_are_those_of_torch_chunk_and_array_split(n, parts, uneven):
    bounds = [part_bounds(n, parts, i, uneven) for i in range(parts)]
    assert [list(range(*bound)) for bound in bounds] == split(n, parts, uneven)


@given(spec_layouts())
def test_every_rank_holds_the_part_of_its_flattened_index(layout):
    mesh, spec = layout.mesh, layout.spec
    for rank in mesh.ranks:
        place = mesh.coordinates(rank)
        (box,) = layout.boxes(rank)
        assert layout.local_shape(rank) == box.shape
        for d, axes in enumerate(spec.axes):
            sizes = [mesh.shape[axis] for axis in axes]
            # numpy's own row-major numbering: the major axis first
            index = int(np.ravel_multi_index([place[axis] for axis in axes], sizes)) if axes else 0
            part = split(layout.shape[d], math.prod(sizes), layout.uneven)[index]
            assert list(range(box.start[d], box.stop[d])) == part


@given(spec_layouts())
def test_each_element_is_in_one_box_and_has_as_many_replicas_as_unused_axes_say(layout):
    boxes = np.zeros(layout.shape, int)
    copies = np.zeros(layout.shape, int)
    for box, ranks in layout.holders.items():
        boxes[box.slices()] += 1
        copies[box.slices()] += len(ranks)
    used = {axis for axes in layout.spec.axes for axis in axes}
    unused = [n for axis, n in enumerate(layout.mesh.shape) if axis not in used]
    assert (boxes == 1).all()
    assert (copies == math.prod(unused)).all()


@given(any_layouts())
def test_holders_are_the_boxes_of_all_ranks_turned_around(layout):
    expected: dict[Box, list[int]] = {}
    for rank in sorted(layout.ranks):
        for box in layout.boxes(rank):
            if not box.empty:
                expected.setdefault(box, []).append(rank)
    assert layout.holders == {box: tuple(ranks) for box, ranks in expected.items()}
    assert list(layout.holders) == sorted(layout.holders)
    assert layout.boxes(99) == ()


@given(st.data())
def test_equal_parts_are_those_of_a_reshape(data):
    """What JAX does with a dimension cut by several axes, where it divides."""
    mesh = data.draw(meshes(max_axes=3))
    spec = data.draw(specs(mesh, 2))
    cuts = [[mesh.shape[axis] for axis in axes] for axes in spec.axes]
    shape = tuple(math.prod(sizes) * data.draw(st.integers(1, 3)) for sizes in cuts)
    array = np.arange(math.prod(shape)).reshape(shape)
    grid = array.reshape(
        *cuts[0], shape[0] // math.prod(cuts[0]), *cuts[1], shape[1] // math.prod(cuts[1])
    )
    for uneven in UNEVEN_RULES:
        layout = Layout(mesh, spec, shape, uneven)
        for rank in mesh.ranks:
            place = mesh.coordinates(rank)
            index = [
                *(place[axis] for axis in spec.axes[0]),
                slice(None),
                *(place[axis] for axis in spec.axes[1]),
                slice(None),
            ]
            (box,) = layout.boxes(rank)
            assert np.array_equal(array[box.slices()], grid[tuple(index)])


JAX_PROGRAM = """
import itertools, json, os
os.environ.update(XLA_FLAGS="--xla_force_host_platform_device_count=12", JAX_PLATFORMS="cpu")
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()).reshape(2, 3, 2), ("a", "b", "c"))
entries = (None, "a", "b", ("a", "b"), ("b", "a"), ("c", "a"), ("c", "b", "a"))
rows = []
for pair in itertools.product(entries, repeat=2):
    names = [name for e in pair if e is not None for name in ((e,) if isinstance(e, str) else e)]
    if len(set(names)) < len(names):
        continue
    sharding = NamedSharding(mesh, PartitionSpec(*pair))
    for device, index in sharding.devices_indices_map((12, 24)).items():
        bounds = [s.indices(n)[:2] for s, n in zip(index, (12, 24))]
        rows.append([pair, device.id, bounds])
print(json.dumps(rows))
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
@pytest.mark.timeout(120)
def test_jax_itself_cuts_alike():
    run = subprocess.run(
        [sys.executable, "-c", JAX_PROGRAM], capture_output=True, text=True, check=True
    )
    mesh = DeviceMesh.arange((2, 3, 2), axis_names=("a", "b", "c"))
    rows = json.loads(run.stdout)
    assert len(rows) > 12 * 12
    for pair, rank, bounds in rows:
        entries = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in pair)
        (box,) = Layout(mesh, entries, (12, 24)).boxes(rank)
        assert [list(bound) for bound in zip(box.start, box.stop, strict=True)] == bounds


def test_several_axes_cut_by_the_flattened_index():
    mesh = DeviceMesh.arange((2, 2))
    # 5 over 2 x 2: ceil(5/4) = 2, so 2 + 2 + 1 + 0; axis by axis it would be 2 + 1 + 1 + 1
    layout = Layout(mesh, "S01", (5,))
    assert [layout.local_shape(rank) for rank in range(4)] == [(2,), (2,), (1,), (0,)]
    layout = Layout(mesh, "S10", (5,))
    assert list(layout.holders.items()) == [
        (Box((0,), (2,)), (0,)),
        (Box((2,), (4,)), (2,)),
        (Box((4,), (5,)), (1,)),
    ]
    assert [layout.local_shape(rank) for rank in range(4)] == [(2,), (1,), (2,), (0,)]
    layout = Layout(mesh, "S01", (5,), uneven="balanced")
    assert [layout.local_shape(rank) for rank in range(4)] == [(2,), (1,), (1,), (1,)]


def test_scalars_and_empty_arrays():
    mesh = DeviceMesh.arange((2, 2))
    scalar = Layout(mesh, "", ())
    assert scalar.holders == {Box((), ()): (0, 1, 2, 3)}
    assert scalar.local_shape(3) == ()
    nothing = Layout(mesh, "S0 R", (0, 3))
    assert nothing.holders == {}
    assert nothing.boxes(1) == (Box((0, 0), (0, 3)),)


def test_specs_in_every_form_give_the_same_layout():
    mesh = DeviceMesh([[3, 1], [2, 0]], axis_names=("dp", "tp"))
    layout = Layout(mesh, "S01 R", (8, 4))
    assert layout.ranks == (3, 1, 2, 0)
    assert layout.spec == ShardingSpec(((0, 1), ()))
    assert layout.boxes(1) == (Box((2, 0), (4, 4)),)
    for spec in ("S{dp,tp}R", ShardingSpec.parse("S01R"), (("dp", "tp"),), [("dp", 1), None]):
        assert Layout(mesh, spec, np.array([8, 4])) == layout
    assert Layout(mesh, "RR", (8, 4)) == Layout(mesh, (), (8, 4))


def test_thousands_of_ranks():
    mesh = DeviceMesh.arange((64, 128))
    layout = Layout(mesh, "S10 R", (2**20, 4096))
    holders = layout.holders
    assert len(holders) == 8192
    assert layout.holders is holders


# --- explicit boxes ----------------------------------------------------------------------------


def test_block_cyclic_boxes():
    boxes = {1: [Box((0,), (2,)), Box((4,), (6,))], 0: [Box((2,), (4,)), Box((6,), (7,))], 5: []}
    layout = Layout.from_boxes(boxes, (7,))
    assert (layout.mesh, layout.spec, layout.ranks, layout.ndim) == (None, None, (0, 1, 5), 1)
    assert layout.boxes(1) == (Box((0,), (2,)), Box((4,), (6,)))
    assert layout.boxes(5) == layout.boxes(4) == ()
    assert list(layout.holders.values()) == [(1,), (0,), (1,), (0,)]
    assert layout.describe() == "4 boxes@3 ranks"
    assert layout == Layout.from_boxes({5: [], 0: boxes[0], 1: boxes[1]}, (7,))
    assert layout != Layout.from_boxes(boxes, (8,))


def test_boxes_of_different_ranks_may_overlap():
    layout = Layout.from_boxes({0: [Box((0,), (3,))], 1: [Box((2,), (4,))]}, (4,))
    assert layout.holders == {Box((0,), (3,)): (0,), Box((2,), (4,)): (1,)}


@given(st.data())
def test_overlap_within_a_rank_is_found(data):
    shape = (5, 5)
    ends = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted)
    cells = st.tuples(ends, ends)
    boxes = [
        Box((rows[0], columns[0]), (rows[1], columns[1]))
        for rows, columns in data.draw(st.lists(cells, max_size=5))
    ]
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.slices()] += 1
    if (count > 1).any():
        assert "must not overlap" in refusal(Layout.from_boxes, {3: boxes}, shape)
    else:
        assert Layout.from_boxes({3: boxes}, shape).boxes(3) == tuple(boxes)


@pytest.mark.parametrize(
    ("boxes", "phrases"),
    [
        ({3: [Box((0, 0), (2, 5))]}, ["inside the array", "[0:2, 0:5]", "(4, 4)", "rank 3"]),
        ({3: [Box((0,), (2,))]}, ["inside the array", "[0:2]", "as many dimensions"]),
        ({3: [Box((4, 4), (4, 5))]}, ["inside the array"]),
        ({3: [((0, 0), (1, 1))]}, ["a rank holds boxes", "of type tuple", "rank 3"]),
        (
            {3: [Box((0, 0), (2, 2)), Box((1, 1), (3, 3))]},
            ["must not overlap", "box [0:2, 0:2] and box [1:3, 1:3]", "rank 3"],
        ),
        ({-1: []}, ["a rank is an int >= 0", "rank -1"]),
        ({True: []}, ["a rank is an int >= 0", "of type bool"]),
        ({"0": []}, ["a rank is an int >= 0", "of type str"]),
    ],
)
def test_boxes_that_are_no_layout(boxes, phrases):
    text = refusal(Layout.from_boxes, boxes, (4, 4))
    for phrase in (*phrases, "remedy:"):
        assert phrase in text


def test_two_scalars_on_a_rank_overlap():
    text = refusal(Layout.from_boxes, {0: [Box((), ()), Box((), ())]}, ())
    assert "must not overlap" in text


# --- as data -----------------------------------------------------------------------------------


@given(any_layouts())
def test_round_trips(layout):
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert layout.holders is layout.holders  # fills the cache
    copy = pickle.loads(pickle.dumps(layout))
    assert (copy, hash(copy)) == (layout, hash(layout))
    assert "holders" not in vars(copy)
    assert copy.holders == layout.holders
    names = {"Layout": Layout, "DeviceMesh": DeviceMesh, "Box": Box}
    assert eval(repr(layout), names) == layout


def test_describe():
    mesh = DeviceMesh.arange((2, 4), axis_names=("dp", "tp"))
    assert Layout(mesh, "S{dp,tp} R", (8, 8)).describe() == "S01R@(2,4)"
    assert str(Layout(mesh, "R S1", (8, 8), "balanced")) == "RS1@(2,4) balanced"
    assert str(Layout(mesh, "", ())) == "scalar@(2,4)"


# --- errors ------------------------------------------------------------------------------------

MESH = DeviceMesh.arange((2, 2), axis_names=("dp", "tp"))


def test_shape_and_spec_must_have_the_same_dimensions():
    expected = (
        "a spec says, for each dimension of the array, how it is cut\n"
        "  values:  spec 'S0R' has 2 dimensions, shape (4,) has 1\n"
        "  context: mesh (dp=2,tp=2) of ranks 0..3\n"
        "  remedy:  write one R or S per array dimension"
    )
    assert refusal(Layout, MESH, "S0 R", (4,)) == expected
    assert refusal(Layout, MESH, ("dp", None), (4,)) == expected
    assert "spec '' has 0 dimensions" in refusal(Layout, MESH, "", (4,))


@pytest.mark.parametrize("shape", [(4, -1), (4, 2.0), (4, True), (4, None), 4, "44"])
def test_shapes_are_ints(shape):
    text = refusal(Layout, MESH, "S0 R", shape)
    assert "a shape is a sequence of ints >= 0" in text
    assert f"shape={shape!r}" in text


def test_unknown_rule():
    text = refusal(Layout, MESH, "S0", (4,), uneven="floor")
    assert "is one of 'ceil', 'balanced'" in text
    assert "uneven='floor'" in text


def test_local_shape_needs_one_box():
    text = refusal(Layout(MESH, "S0", (4,)).local_shape, 9)
    assert "rank 9 is not in the layout" in text
    assert "layout S0@(2,2)" in text
    layout = Layout.from_boxes({0: [Box((0,), (1,)), Box((2,), (3,))], 1: []}, (4,))
    assert "rank 0 holds 2 boxes" in refusal(layout.local_shape, 0)
    assert "rank 1 holds 0 boxes" in refusal(layout.local_shape, 1)
    assert "rank 2 is not in the layout" in refusal(layout.local_shape, 2)


def test_errors_of_spec_and_mesh_pass_through():
    assert "^" in refusal(Layout, MESH, "S0 x", (4,), error=SpecError)
    assert "axis 'pp'" in refusal(Layout, MESH, "S{pp}", (4,), error=SpecError)
    broken = Layout(MESH, "S0", (4,)).to_json() | {"mesh": {}}
    assert "the JSON of a mesh" in refusal(Layout.from_json, broken, error=MeshError)


@pytest.mark.parametrize("data", [{}, None, {"boxes": 3}, {"boxes": [[0, [[1]]]], "shape": [2]}])
def test_json_that_is_no_layout(data):
    assert "the JSON of a layout holds" in refusal(Layout.from_json, data)


# --- the strategies that other tests draw from -------------------------------------------------


@given(layout_pairs(explicit=True))
def test_pairs_have_one_shape_and_cover_it(pair):
    source, destination = pair
    assert source.shape == destination.shape
    for layout in pair:
        assert set(layout.ranks) <= set(range(16))
        held = np.zeros(layout.shape, bool)
        for box in layout.holders:
            held[box.slices()] = True
        assert held.all()


def test_pairs_of_every_relation_are_drawn():
    seen = set()

    @given(layout_pairs())
    def draw(pair):
        source, destination = (set(layout.ranks) for layout in pair)
        if pair[0].mesh == pair[1].mesh:
            seen.add("identical")
        elif not source & destination:
            seen.add("disjoint")
        elif source - destination and destination - source:
            seen.add("overlapping")

    draw()
    assert seen == {"identical", "disjoint", "overlapping"}


def test_the_documentation_is_true():
    page = Path(__file__).parent.parent / "docs" / "notation.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 20
    assert result.failed == 0
