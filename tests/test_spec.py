from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import AXIS_NAMES

from xmesh.errors import SpecError
from xmesh.mesh import DeviceMesh
from xmesh.spec import ShardingSpec

NAMES = st.sampled_from((*AXIS_NAMES, "S", "R", "_", "axis_10"))


@st.composite
def specs(draw: st.DrawFn, axes: st.SearchStrategy[int | str]) -> ShardingSpec:
    """Any spec at all, on no mesh in particular."""
    entries: list[list[int | str]] = [[] for _ in range(draw(st.integers(0, 5)))]
    if entries:
        for axis in draw(st.lists(axes, max_size=8, unique=True)):
            draw(st.sampled_from(entries)).append(axis)
    return ShardingSpec(tuple(map(tuple, entries)))


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(SpecError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# --- parse and print ---------------------------------------------------------------------------


@given(specs(st.integers(0, 12) | NAMES))
def test_text_round_trips(spec):
    assert ShardingSpec.parse(str(spec)) == spec
    assert str(ShardingSpec.parse(str(spec))) == str(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(ShardingSpec(spec.axes)) == hash(spec)


@given(specs(st.integers(0, 9)), st.data())
def test_every_way_to_write_a_spec_reads_alike(spec, data):
    def write(entry):
        digits = "".join(map(str, entry))
        forms = [f"S{digits}", f"S^{digits}", f"S{{{digits}}}", f"S^{{{digits}}}"]
        forms.append("S{" + ", ".join(map(str, entry)) + ",}")
        return data.draw(st.sampled_from(forms)) if entry else "R"

    separators = st.sampled_from(("", " ", "  ", ",", " , ", "\t"))
    text = "".join(
        (data.draw(separators) if d else "") + write(entry) for d, entry in enumerate(spec.axes)
    )
    assert ShardingSpec.parse(f" {text} ") == spec


@pytest.mark.parametrize(
    ("text", "axes", "canonical"),
    [
        ("", (), ""),
        ("  ", (), ""),
        ("S01 R", ((0, 1), ()), "S01R"),
        ("S^{01}R", ((0, 1), ()), "S01R"),
        ("S0RR", ((0,), (), ()), "S0RR"),
        ("S0 R S{1}", ((0,), (), (1,)), "S0RS1"),
        ("S^0 R", ((0,), ()), "S0R"),
        ("S10", ((1, 0),), "S10"),
        ("S{10}", ((1, 0),), "S10"),
        ("S{10,}", ((10,),), "S{10,}"),
        ("S{10,11}", ((10, 11),), "S{10,11}"),
        ("S{ 0 , 1 }", ((0, 1),), "S01"),
        ("S{dp,tp} R", (("dp", "tp"), ()), "S{dp,tp}R"),
        ("S{dp,1}", (("dp", 1),), "S{dp,1}"),
        ("R, S0", ((), (0,)), "RS0"),
    ],
)
def test_examples(text, axes, canonical):
    spec = ShardingSpec.parse(text)
    assert spec.axes == axes
    assert str(spec) == canonical
    assert spec.ndim == len(axes)


@pytest.mark.parametrize(
    ("text", "place", "phrase"),
    [
        ("s0R", 0, "write S for s"),
        ("S0r", 2, "write R for r"),
        ("S", 0, "S needs the mesh axes"),
        ("R S", 2, "S needs the mesh axes"),
        ("S R", 0, "S needs the mesh axes"),
        ("SR", 1, "S needs the mesh axes"),
        ("SS0", 1, "S needs the mesh axes"),
        ("S^R", 2, "S needs the mesh axes"),
        ("S_{0}", 1, "S needs the mesh axes"),
        ("S{}", 2, "braces hold at least one axis"),
        ("S{0", 1, "a brace must be closed"),
        ("S{0 R S{1}", 1, "a brace must be closed"),
        ("S0}", 2, "stand right after an S"),
        ("S{0 1}", 2, "separate axes by commas"),
        ("S{dp,,tp}", 5, "an axis is an index or a name"),
        ("S{dp, 2x}", 6, "an axis is an index or a name"),
        ("S{,}", 2, "an axis is an index or a name"),
        ("S{-1}", 2, "an axis is an index or a name"),
        ("R0", 1, "axes stand right after their S"),
        ("S0 1", 3, "axes stand right after their S"),
        ("S0 X", 3, "a dimension begins with R or S"),
        ("S0\tX", 3, "a dimension begins with R or S"),
        ('("dp", None)', 0, "a JAX-style tuple is passed as a tuple"),
        (",R", 0, "a dimension begins with R or S"),
        ("R,", 1, "a comma stands between two dimensions"),
        ("R, ,S0", 3, "a comma stands between two dimensions"),
        ("S0S0", 3, "axis 0 cuts both dimension 0 and dimension 1"),
        ("S0 R\nS10", 7, "axis 0 cuts both dimension 0 and dimension 2"),
        ("S00", 2, "axis 0 cuts dimension 0 twice"),
        ("S{dp} S{tp,dp}", 11, "axis 'dp' cuts both dimension 0 and dimension 1"),
        ("S²", 1, "S needs the mesh axes"),
    ],
)
def test_malformed_text_has_a_caret_under_the_place(text, place, phrase):
    message = refusal(ShardingSpec.parse, text)
    assert phrase in message
    assert "remedy:" in message
    lines = message.split("\n")
    below = next(i for i, line in enumerate(lines) if line.strip() == "^")
    indent = len("  values:  ")
    assert lines[below] == " " * (indent + place) + "^"
    shown = text.replace("\t", " ").replace("\n", " ")
    assert lines[below - 1] == f"  values:  {shown}"


@given(st.text(alphabet="SRsr01{}^,_ d(\n", max_size=10))
def test_any_text_is_read_or_refused(text):
    caught = ""
    try:
        spec = ShardingSpec.parse(text)
    except SpecError as error:
        caught = str(error)
    else:
        assert ShardingSpec.parse(str(spec)) == spec
    assert not caught or any(line.strip() == "^" for line in caught.split("\n"))


def test_whole_text_of_an_error():
    assert refusal(ShardingSpec.parse, "S0 r") == (
        "R and S are upper case\n  values:  S0 r\n              ^\n  remedy:  write R for r"
    )


@pytest.mark.parametrize(
    ("axes", "phrase"),
    [
        (("dp", ()), "'dp' is no tuple of axes"),
        ((0, 1), "not iterable"),
        (((-1,),), "axis -1 is negative"),
        (((0.5,),), "axis 0.5 is neither an index nor a name"),
        (((True,),), "axis True is neither an index nor a name"),
        ((("a b",),), "axis 'a b' is no identifier"),
        (((0,), (1, 0)), "axis 0 cuts both dimension 0 and dimension 1"),
        (3, "axes=3"),
    ],
)
def test_axes_that_are_no_spec(axes, phrase):
    assert phrase in refusal(ShardingSpec, axes)


def test_axes_are_stored_as_plain_tuples():
    lists: Any = [[np.int64(1)], []]
    spec = ShardingSpec(lists)
    assert spec == ShardingSpec(((1,), ()))
    assert type(spec.axes[0][0]) is int
    assert "only a string can be parsed" in refusal(ShardingSpec.parse, 3)


# --- on a mesh ---------------------------------------------------------------------------------


def test_resolve_turns_names_into_indices():
    mesh = DeviceMesh.arange((2, 2), axis_names=("dp", "tp"))
    spec = ShardingSpec.parse("S{tp,dp} R").resolve(mesh)
    assert spec.axes == ((1, 0), ())
    assert spec.resolve(mesh) is spec


def test_resolve_refuses_what_the_mesh_does_not_have():
    mesh = DeviceMesh.arange((2, 2), axis_names=("dp", "tp"))
    assert refusal(ShardingSpec.parse("S{tq} R").resolve, mesh) == (
        "an axis must be one of the mesh's\n"
        "  values:  axis 'tq'\n"
        "  context: spec S{tq}R on mesh (dp=2,tp=2) of ranks 0..3\n"
        "  remedy:  did you mean 'tp'? give an axis index from 0 to 1 or a name: dp, tp"
    )
    assert "axis 2" in refusal(ShardingSpec.parse("S2").resolve, mesh)
    text = refusal(ShardingSpec.parse("S{dp} S0").resolve, mesh)
    assert "axis 0 cuts both dimension 0 and dimension 1" in text
    assert "S{dp}S0 on mesh" in text


# --- JAX ---------------------------------------------------------------------------------------


@given(specs(st.integers(0, 12) | NAMES))
def test_partition_spec_round_trips(spec):
    entries = spec.to_partition_spec()
    assert ShardingSpec.from_partition_spec(entries) == spec
    while entries and entries[-1] is None:
        entries = entries[:-1]
    assert ShardingSpec.from_partition_spec(entries, ndim=spec.ndim) == spec
    assert ShardingSpec.coerce(entries, ndim=spec.ndim) == spec
    assert ShardingSpec.coerce(str(spec)) == ShardingSpec.coerce(spec) == spec


class FakePartitionSpec:
    """As in recent JAX: no tuple, but iterable."""

    unreduced: frozenset[str] = frozenset()

    def __init__(self, *entries):
        self.entries = entries

    def __iter__(self):
        return iter(self.entries)


def test_partition_spec_examples():
    read = ShardingSpec.from_partition_spec
    assert str(read(("dp", None, ("tp", "pp")))) == "S{dp}RS{tp,pp}"
    assert str(read(FakePartitionSpec("dp", ()), ndim=3)) == "S{dp}RR"
    assert read((0, None, [1, 2])).to_partition_spec() == (0, None, (1, 2))
    assert "has 2 entries, the array 1 dimensions" in refusal(read, ("dp", None), ndim=1)
    assert "None, an axis or a tuple of axes" in refusal(read, (object(),))
    assert "None, an axis or a tuple of axes" in refusal(ShardingSpec.coerce, 3)
    partial = FakePartitionSpec("dp")
    partial.unreduced = frozenset({"tp"})
    assert "no partial sums" in refusal(read, partial)


# --- DTensor -----------------------------------------------------------------------------------


@dataclass
class Placement:
    """As torch.distributed.tensor's placements answer."""

    kind: str
    dim: int = 0

    def is_shard(self):
        return self.kind == "S"

    def is_replicate(self):
        return self.kind == "R"

    def is_partial(self):
        return self.kind == "P"


@dataclass
class _StridedShard(Placement):
    split_factor: int = 2


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_placements_agree_with_the_definition(mesh_ndim, ndim, data):
    dims = data.draw(
        st.lists(st.none() | st.integers(0, ndim - 1), min_size=mesh_ndim, max_size=mesh_ndim)
    )

    def write(dim):
        if dim is None:
            return data.draw(st.sampled_from((None, "R", Placement("R"))))
        dim -= data.draw(st.sampled_from((0, ndim)))
        forms = (dim, np.int64(dim), f"S({dim})", ("S", dim), Placement("S", dim))
        return data.draw(st.sampled_from(forms))

    spec = ShardingSpec.from_placements([write(dim) for dim in dims], ndim)
    for d, entry in enumerate(spec.axes):
        assert entry == tuple(axis for axis, dim in enumerate(dims) if dim == d)
    expected = tuple("R" if dim is None else f"S({dim})" for dim in dims)
    assert spec.to_placements(mesh_ndim) == expected


@pytest.mark.parametrize(
    ("placement", "phrase"),
    [
        (Placement("P"), "no partial sums"),
        ("P", "no partial sums"),
        ("P(sum)", "no partial sums"),
        (_StridedShard("S"), "a strided shard is not one of the cuts"),
        (2, "dim 2 of an array with 2 dimensions"),
        ("S(-3)", "give a dim from -2 to 1, or Replicate"),
        ("S", "a placement is Shard(dim) or Replicate()"),
        (("S",), "a placement is Shard(dim) or Replicate()"),
        (True, "a placement is Shard(dim) or Replicate()"),
        (Placement("?"), "a placement is Shard(dim) or Replicate()"),
    ],
)
def test_placements_that_are_refused(placement, phrase):
    text = refusal(ShardingSpec.from_placements, [None, placement], 2)
    assert phrase in text
    assert f"placement {placement!r} of mesh axis 1" in text
    assert "remedy:" in text


def test_specs_that_placements_cannot_say():
    text = refusal(ShardingSpec.parse("R S10").to_placements, 2)
    assert "ascending order" in text
    assert "dimension 1 of spec RS10 is cut by axes [1, 0]" in text
    assert "transpose the mesh so that the major axis comes first, or reshard to S01" in text
    for spec, mesh_ndim in (("S{dp}", 1), ("S1", 1)):
        text = refusal(ShardingSpec.parse(spec).to_placements, mesh_ndim)
        assert "call spec.resolve(mesh) first" in text


def test_every_ascending_spec_can_be_said():
    for dims in itertools.product((None, 0, 1), repeat=3):
        spec = ShardingSpec.from_placements(dims, 2)
        assert ShardingSpec.from_placements(spec.to_placements(3), 2) == spec
