"""The cases of the experiments as data, the paper's formulas, and the methods compared."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmesh import DeviceMesh, Layout, Topology, plan
from xmesh.bench import multicast, paper
from xmesh.bench.baselines import applies, pieces
from xmesh.bench.cases import CASES, ITEMSIZE, MORE_CASES, Case, scaled_shape
from xmesh.bench.methods import N_TO_M, ONE_TO_M, Method
from xmesh.errors import XmeshError
from xmesh.planner import STRATEGIES

REFERENCE = {  # case: unit tasks, and Gbit/s over 10 Gbit/s NICs by the best order
    1: (2, 20),
    2: (2, 20),
    3: (4, 20),
    4: (64, 20),
    5: (4, 20),
    6: (4, 20),
    7: (4, 10),
    8: (4, 10),
    9: (4, 20),
}

# --- The cases ------------------------------------------------------------------------------------


def case_ids(case: Case) -> str:
    return f"case{case.number}"


@pytest.mark.parametrize("case", CASES, ids=case_ids)
def test_planned_as_well_as_the_paper_allows(case):
    src, dst = case.layouts()
    assert math.prod(case.shape) * ITEMSIZE == pytest.approx(2 * 2**30, rel=0.01)
    assert sorted((*src.ranks, *dst.ranks)) == list(range(case.num_ranks))
    made = plan(src, dst, "float32", Topology.uniform(case.num_ranks, 4))
    tasks, gbits_per_s = REFERENCE[case.number]
    assert len(made.unit_tasks) == tasks
    nbytes = math.prod(case.shape) * ITEMSIZE
    assert nbytes * 8 / made.makespan_s / 1e9 == pytest.approx(gbits_per_s, rel=0.01)


@pytest.mark.parametrize("case", CASES, ids=case_ids)
@given(nbytes=st.integers(0, 2**32))
def test_scaled_shapes_keep_proportions_and_even_cuts(case, nbytes):
    shape = scaled_shape(case, nbytes)
    full = math.prod(case.shape) * ITEMSIZE
    if nbytes >= full:
        assert shape == case.shape
        return
    for extent, other, ratio, other_ratio in zip(
        shape, shape[1:], case.ratio, case.ratio[1:], strict=False
    ):
        assert Fraction(extent, other) == Fraction(ratio, other_ratio)
    for extent, original, parts in zip(shape, case.shape, case.parts, strict=True):
        assert original % parts or extent % parts == 0
    least = math.prod(scaled_shape(case, 0)) * ITEMSIZE
    assert math.prod(shape) * ITEMSIZE <= max(nbytes, least)
    # As large as the steps allow: the next one is larger in each dimension by one least shape.
    larger = [a + b for a, b in zip(shape, scaled_shape(case, 0), strict=True)]
    assert math.prod(larger) * ITEMSIZE > nbytes


@pytest.mark.parametrize("case", CASES, ids=case_ids)
def test_the_proportions_are_those_of_the_paper(case):
    for extent, ratio in zip(case.shape, case.ratio, strict=True):
        assert extent / case.shape[0] == pytest.approx(ratio / case.ratio[0], rel=0.01)


def test_cases_of_the_same_proportions_get_the_same_shape():
    assert {scaled_shape(case, 2**20) for case in CASES if case.number != 6} == {(80, 80, 40)}


@pytest.mark.parametrize("case", MORE_CASES, ids=case_ids)
@pytest.mark.parametrize("nbytes", [0, 20_000, 15 * 2**20, 2**33])
def test_more_cases_have_plans_at_the_bound_for_five_hosts(case, nbytes):
    shape = scaled_shape(case, nbytes)
    assert math.prod(shape) * ITEMSIZE <= max(nbytes, 4096)
    src, dst = case.layouts(shape)
    assert case.num_ranks <= 20
    assert not set(src.ranks) & set(dst.ranks)
    if nbytes > 2**20:
        made = plan(src, dst, "uint32", Topology.uniform(20, 4))
        assert made.makespan_s == pytest.approx(made.lower_bound_s, rel=0.01)


def test_cases_are_found_by_number_and_by_name():
    assert paper.chosen_cases(None, more=False) == list(CASES)
    assert paper.chosen_cases(None, more=True) == [*CASES, *MORE_CASES]
    assert [case.number for case in paper.chosen_cases(["uneven", "7"], False)] == [7, "uneven"]


@pytest.mark.parametrize(
    ("hosts", "ranks_per_host", "names"),
    [
        (5, 4, ["1x1", "1x2", "1x3", "1x4", "2x2", "3x2", "4x2"]),
        (3, 2, ["1x1", "1x2", "2x2"]),
        (2, 1, ["1x1"]),
    ],
)
def test_multicasts_that_fit(hosts, ranks_per_host, names):
    topology = Topology.uniform(hosts * ranks_per_host, ranks_per_host)
    cases = multicast.fitting_cases(topology)
    assert list(cases) == [f"1 to {name}" for name in names]
    for case, num_hosts, each in cases.values():
        src, dst = case.layouts(scaled_shape(case, 4000))
        assert src.ranks == (0,)
        assert src.shape == (1000,)
        counts = Counter(topology.host(rank) for rank in dst.ranks)
        assert counts == dict.fromkeys(range(1, 1 + num_hosts), each)


def test_a_multicast_needs_two_hosts():
    with pytest.raises(XmeshError, match="one host and one on another"):
        multicast.fitting_cases(Topology.uniform(4, 4))


def test_the_formulas_of_the_paper():
    formulas = {
        name: multicast.formula_s(name, 3, 2, 10.0, 30) for name in (*STRATEGIES, "mpi_bcast")
    }
    assert formulas == {
        "send_recv": 60,
        "local_allgather": 30,
        "global_allgather": 20,
        "broadcast": 11,
        "mpi_bcast": None,
    }
    assert multicast.formula_s("global_allgather", 1, 4, 10.0, 1) == 10
    # To one rank every strategy is a plain send.
    assert {multicast.formula_s(name, 1, 1, 10.0, 1) for name in STRATEGIES} == {10}
    assert multicast.formula_s("mpi_bcast", 1, 1, 10.0, 1) is None


# --- Methods --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*N_TO_M, *ONE_TO_M, Method("send_recv", "dfs")], ids=str)
def test_methods_are_read_as_they_are_written(method):
    assert Method.parse(str(method)) == method


@pytest.mark.parametrize("text", ["", "bcast", "broadcast/fast", "mpi_bcast/naive"])
def test_other_methods_are_refused(text):
    with pytest.raises(XmeshError, match="plain MPI: mpi_isend"):
        Method.parse(text)


def test_plain_mpi_goes_round_among_replicas():
    src, dst = CASES[1].layouts((8, 8, 4))
    found = pieces(src, dst)
    assert [piece.receiver for piece in found] == list(range(8, 16))
    assert sorted(piece.sender for piece in found) == list(range(8))
    overlapping = Layout(DeviceMesh([0, 1, 2]), "RRR", (8, 8, 4))
    assert {piece.sender for piece in pieces(src, overlapping)} == {0, 1, 2}  # their own


def test_a_broadcast_is_for_boxes_that_several_lack():
    bcast = Method("mpi_bcast", "")
    assert not applies(bcast, *CASES[3].layouts())
    assert applies(bcast, *CASES[0].layouts())
    assert applies(Method("mpi_isend", ""), *CASES[3].layouts())
