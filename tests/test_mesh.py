from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import meshes

from xmesh.errors import MeshError
from xmesh.mesh import DeviceMesh


def refusal(*args, **kwargs) -> str:
    with pytest.raises(MeshError) as caught:
        DeviceMesh(*args, **kwargs)
    return str(caught.value)


def test_nested_lists_arrays_and_flat_lists():
    mesh = DeviceMesh([[0, 1], [3, 2]], axis_names=("dp", "tp"))
    assert (mesh.shape, mesh.ndim, mesh.size, mesh.ranks) == ((2, 2), 2, 4, (0, 1, 3, 2))
    assert mesh.axis_names == ("dp", "tp")
    assert DeviceMesh(np.array([[0, 1], [3, 2]]), ["dp", "tp"]) == mesh
    assert DeviceMesh([np.array([0, 1]), (3, np.int32(2))], ("dp", "tp")) == mesh
    assert DeviceMesh([4, 2]).shape == (2,)
    assert DeviceMesh(range(3)) == DeviceMesh.arange((3,))
    assert all(type(rank) is int for rank in DeviceMesh(np.arange(4, dtype=np.uint8)).ranks)


@given(meshes())
def test_agrees_with_a_numpy_array(mesh):
    array = np.array(mesh.ranks).reshape(mesh.shape)
    assert DeviceMesh(array, mesh.axis_names) == mesh
    for place in np.ndindex(array.shape):
        assert mesh.coordinates(array[place]) == place
    assert [rank for rank in range(20) if rank in mesh] == sorted(mesh.ranks)


@given(meshes(), st.data())
def test_axis_groups_differ_only_along_the_axes(mesh, data):
    axes = data.draw(st.permutations(range(mesh.ndim)))[: data.draw(st.integers(0, mesh.ndim))]
    rest = [axis for axis in range(mesh.ndim) if axis not in axes]
    array = np.array(mesh.ranks).reshape(mesh.shape).transpose(rest + axes)
    expected = array.reshape(int(np.prod([mesh.shape[axis] for axis in rest], dtype=int)), -1)
    assert mesh.axis_groups(axes) == tuple(map(tuple, expected.tolist()))


def test_axis_groups_by_name_or_index():
    mesh = DeviceMesh.arange((2, 3), axis_names=("dp", "tp"))
    assert mesh.axis_groups("tp") == mesh.axis_groups(1) == ((0, 1, 2), (3, 4, 5))
    assert mesh.axis_groups(0) == ((0, 3), (1, 4), (2, 5))
    assert mesh.axis_groups(("tp", "dp")) == ((0, 3, 1, 4, 2, 5),)
    with pytest.raises(MeshError, match="an axis may be given once"):
        mesh.axis_groups(("tp", 1))


@given(meshes())
def test_round_trips(mesh):
    assert DeviceMesh.from_json(json.loads(json.dumps(mesh.to_json()))) == mesh
    assert eval(repr(mesh)) == mesh
    assert mesh.coordinates(mesh.ranks[0]) == (0,) * mesh.ndim  # fills the cache
    copy = pickle.loads(pickle.dumps(mesh))
    assert (copy, hash(copy)) == (mesh, hash(mesh))
    assert list(vars(copy)) == ["shape", "ranks", "axis_names"]


def test_meshes_differ_by_shape_order_and_names():
    mesh = DeviceMesh.arange((2, 2))
    others = {
        DeviceMesh.arange((4,)),
        DeviceMesh([[0, 1], [3, 2]]),
        DeviceMesh.arange((2, 2), axis_names=("a", "b")),
        DeviceMesh.arange((2, 2), start=1),
    }
    assert len(others | {mesh, DeviceMesh([[0, 1], [2, 3]])}) == 5
    with pytest.raises(AttributeError):
        mesh.shape = (4,)  # type: ignore[misc]


def test_repr_and_str():
    mesh = DeviceMesh([[0, 1], [3, 2]], axis_names=("dp", "tp"))
    assert repr(mesh) == "DeviceMesh([[0, 1], [3, 2]], axis_names=('dp', 'tp'))"
    assert str(mesh) == "(dp=2,tp=2) of ranks 0,1,3,2"
    big = DeviceMesh.arange((64, 128), start=8)
    assert repr(big) == "DeviceMesh.arange((64, 128), start=8)"
    assert str(big) == "(64,128) of ranks 8..8199"
    scattered = DeviceMesh(range(0, 200, 2))
    assert repr(scattered) == "<DeviceMesh (100) of ranks 0,2,4,6,8,10,12,14,... (100 in all)>"


def test_thousands_of_ranks():
    mesh = DeviceMesh(np.arange(8192)[::-1].reshape(64, 128))
    assert mesh.coordinates(0) == (63, 127)
    assert len(mesh.axis_groups(1)) == 64


@pytest.mark.parametrize(
    ("ranks", "phrases"),
    [
        ([], ["at least one rank", "shape (0,), 0 ranks"]),
        ([[], []], ["at least one rank", "shape (2, 0), 0 ranks"]),
        (3, ["at least one axis", "ranks=3", "for example [3]"]),
        ("01", ["at least one axis", "ranks='01'"]),
        (
            [[0, 1], [2]],
            ["as long as the others", "ranks[0] has 2 entries, ranks[1] has 1 entries"],
        ),
        ([[0], 1], ["as long as the others", "ranks[0] has 1 entries, ranks[1] is one rank"]),
        ([0, [1]], ["ranks[0] is one rank, ranks[1] has 1 entries"]),
        ([[[0], [1]], [[2], [3, 4]]], ["ranks[0][0] has 1 entries, ranks[1][1] has 2 entries"]),
        ([[0, 1], [7, 0]], ["a rank may be in a mesh once", "rank 0 at places [0, 3]", "(2, 2)"]),
        ([0, -1], ["a rank is an int >= 0", "rank -1 of type int"]),
        ([0, 1.0], ["a rank is an int >= 0", "rank 1.0 of type float"]),
        (np.array([0.0, 1.0]), ["a rank is an int >= 0", "rank 0.0 of type float"]),
        ([0, True], ["a rank is an int >= 0", "rank True of type bool"]),
        ([0, "1"], ["a rank is an int >= 0", "rank '1' of type str"]),
        ([None], ["a rank is an int >= 0", "rank None of type NoneType"]),
    ],
)
def test_ranks_that_are_no_mesh(ranks, phrases):
    text = refusal(ranks)
    assert "remedy:" in text
    for phrase in phrases:
        assert phrase in text


@pytest.mark.parametrize(
    ("names", "phrase"),
    [
        (("dp",), "one name for each of its 2 axes"),
        ("dp", "one name for each of its 2 axes"),
        (("dp", "dp"), "axis names must differ"),
        (("dp", ""), "an axis name is an identifier"),
        (("dp", "1"), "an axis name is an identifier"),
        (("dp", "t p"), "an axis name is an identifier"),
        (("dp", 1), "an axis name is an identifier"),
    ],
)
def test_bad_axis_names(names, phrase):
    text = refusal([[0, 1]], axis_names=names)
    assert phrase in text
    assert f"axis_names={names!r}, shape (1, 2)" in text


@pytest.mark.parametrize(("shape", "start"), [((), 0), ((2, 0), 0), ((2,), -1), ("2", 0), (2, 0)])
def test_arange_refuses(shape, start):
    with pytest.raises(MeshError, match=r"at least one rank|a rank is an int >= 0"):
        DeviceMesh.arange(shape, start)


def test_unknown_axis_lists_the_axes_and_suggests():
    mesh = DeviceMesh.arange((2, 2), axis_names=("data", "tensor"))
    assert (mesh.axis("tensor"), mesh.axis(0), mesh.axis(1)) == (1, 0, 1)
    one: Any = np.int64(1)
    assert mesh.axis(one) == 1
    with pytest.raises(MeshError) as caught:
        mesh.axis("tensr")
    assert str(caught.value) == (
        "an axis must be one of the mesh's\n"
        "  values:  axis 'tensr'\n"
        "  context: mesh (data=2,tensor=2) of ranks 0..3\n"
        "  remedy:  did you mean 'tensor'? give an axis index from 0 to 1 or a name: data, tensor"
    )
    strangers: list[Any] = [2, -1, True, 0.5, None, "x"]
    for axis in strangers:
        with pytest.raises(MeshError, match="or a name: data, tensor"):
            mesh.axis(axis)
    with pytest.raises(
        MeshError, match="give an axis index from 0 to 1, or axis_names to the mesh"
    ):
        DeviceMesh.arange((2, 2)).axis("data")


def test_a_stranger_has_no_coordinates():
    with pytest.raises(MeshError) as caught:
        DeviceMesh([[0, 1], [2, 3]]).coordinates(9)
    assert "only a rank of the mesh has coordinates" in str(caught.value)
    assert "rank 9" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [{}, {"shape": [2]}, None, {"shape": [3], "ranks": [0, 1]}, {"shape": [0], "ranks": []}],
)
def test_json_that_is_no_mesh(data):
    with pytest.raises(MeshError):
        DeviceMesh.from_json(data)
