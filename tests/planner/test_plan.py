from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import layout_pairs

from xmesh.errors import PlanError, TopologyError, XmeshError
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import STRATEGIES, CostModel, Plan, plan
from xmesh.planner.check import check
from xmesh.planner.schedulers import BY_NAME
from xmesh.topology import Topology


def small(**options) -> Plan:
    src = Layout(DeviceMesh([[0, 1], [2, 3]]), "S0 S1", (8, 6))
    dst = Layout(DeviceMesh([[4, 5, 6]]), "R S1", (8, 6))
    return plan(src, dst, **{"topology": Topology.uniform(8, 2)} | options)


def rotated(*args, **options) -> Plan:
    """A plan by rule, however few its tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xmesh.planner.make_plan.SEARCH_LIMIT", 0)
        return plan(*args, **options)


def refusal(call, *args, error: type[XmeshError] = PlanError, **kwargs) -> str:
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# --- text and digest ---------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    layout_pairs(explicit=True),
    st.sampled_from((*STRATEGIES, "auto")),
    st.sampled_from((plan, rotated)),
    st.sampled_from(("bool", "float64", ">f4")),
)
def test_json_gives_the_same_plan_back(pair, strategy, planner, dtype):
    topology = Topology.uniform(16, 4, 2)
    made = planner(*pair, dtype, topology, strategy, cost=CostModel(1e9, 1e-6), name="weights")
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.digest == made.digest
    assert hash(again) == hash(made)
    assert again.to_json() == made.to_json()
    for rank in made.ranks:
        assert again.ops(rank) == made.ops(rank)
    for what in ("src", "dst", "dtype", "topology", "cost", "name", "strategy", "optimal"):
        assert getattr(again, what) == getattr(made, what)


OTHERS = {
    "dtype": "int32",
    "topology": Topology.uniform(8, 4),
    "strategy": "send_recv",
    "scheduler": "naive",
    "seed": 1,
    "cost": CostModel(nic_latency_s=1e-3),
    "name": "bias",
    "chunk_nbytes": 8,
}


@pytest.mark.parametrize("option", OTHERS)
def test_the_digest_differs_when_an_option_does(option):
    assert small().digest == small().digest
    changed = small(**{option: OTHERS[option]})
    assert changed.digest != small().digest
    assert changed != small()


def test_the_digest_differs_when_a_layout_does():
    base = small()
    assert plan(base.src, base.src, topology=base.topology) != base
    assert base != base.to_json()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSONDecodeError"),
        ("{", "JSONDecodeError"),
        ("[]", "key 'xmesh_plan' must be 1"),
        ("null", "key 'xmesh_plan' must be 1"),
        ('{"xmesh_plan": 2}', "key 'xmesh_plan' must be 1"),
        ('{"xmesh_plan": 1}', "KeyError: 'src'"),
    ],
)
def test_text_that_is_no_plan_is_refused(text, reason):
    told = refusal(Plan.from_json, text)
    assert told.startswith("text must be a plan as Plan.to_json writes it")
    assert reason in told


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "float31"),
        ("dtype", "O"),
        ("src", {"shape": [1]}),
        ("topology", {}),
        ("topology", None),
        ("cost", {"nic_bandwidth_Bps": -1.0}),
        ("cost", {"speed": 1.0}),
        ("transfers", [{"order": [0]}]),
        ("transfers", 5),
        ("transfers", "a rule of tomorrow"),
        ("chunk_nbytes", "many"),
    ],
)
def test_a_plan_with_a_broken_part_is_refused(key, value):
    data = json.loads(small().to_json()) | {key: value}
    told = refusal(Plan.from_json, json.dumps(data))
    assert told.startswith("text must be a plan as Plan.to_json writes it")
    assert "context:" in told
    del data[key]
    assert f"KeyError: '{key}'" in refusal(Plan.from_json, json.dumps(data))


PROGRAM = """
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import plan
from xmesh.topology import Topology
import xmesh.planner.make_plan as module
mesh = DeviceMesh.arange((2, 4))
other = DeviceMesh.arange((3, 4), start=8)
topology = Topology([f"node{rank // 4}" for rank in range(20)])
for module.SEARCH_LIMIT in (4096, 0):
    for spec in ("R S01", "S1 S0", "R R"):
        src, dst = Layout(mesh, spec, (96, 40)), Layout(other, "S1 S0", (96, 40))
        made = plan(src, dst, topology=topology)
        print(made.digest.hex(), [str(op) for rank in made.ranks for op in made.ops(rank)])
"""


def test_every_process_makes_the_same_plan():
    root = Path(__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "7", "991")
    }
    assert len(outputs) == 1


# --- options -----------------------------------------------------------------------------------


def test_unknown_names_are_refused_with_the_known_ones():
    text = refusal(small, strategy="carrier_pigeon")
    assert text.startswith(
        "strategy must be one of send_recv, local_allgather, global_allgather, broadcast, auto"
    )
    assert "'carrier_pigeon'" in text
    text = refusal(small, scheduler="astrology")
    assert text.startswith(f"scheduler must be one of {', '.join(BY_NAME)}")
    assert "pass scheduler='auto'" in text


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_nbytes": 0},
        {"chunk_nbytes": -4},
        {"chunk_nbytes": 1e6},
        {"chunk_nbytes": 2**63},
        {"chunk_nbytes": None},
        {"seed": "x"},
        {"seed": True},
    ],
)
def test_numbers_that_mean_nothing_are_refused(options):
    text = refusal(small, **options)
    ((name, value),) = options.items()
    assert text.startswith(f"{name} must be an integer from ")
    assert f"{name}={value!r}" in text


def test_numbers_of_numpy_are_numbers():
    made = small(seed=np.int64(3), chunk_nbytes=np.int32(64))
    assert made == small(seed=3, chunk_nbytes=64) == Plan.from_json(made.to_json())


def test_arguments_of_another_kind_are_named():
    layout = Layout(DeviceMesh([0]), "R", (4,))
    assert refusal(plan, "R", layout).startswith("src must be a Layout\n  values:  'R' of type str")
    assert refusal(plan, layout, None).startswith("dst must be a Layout\n  values:  None of type")
    wrong: dict[str, Any] = {"topology": [0, 0], "cost": {}, "name": 5}
    for name, value in wrong.items():
        text = refusal(plan, layout, layout, **{name: value})
        assert text.startswith(f"{name} must be a ")
        assert repr(value) in text


def test_a_plan_that_was_edited_wrongly_is_refused_when_it_is_read():
    data = json.loads(small().to_json())
    rows = data["transfers"]
    edits: tuple[dict[str, object], ...] = (
        {"strategy": "zig"},
        {"chunk_volume": 0},
        {"receivers": []},
        {"receivers": [77]},
        {"sender": 99},
        {"boxes": [[[0], [1]]]},
    )
    for edit in edits:
        text = json.dumps({**data, "transfers": [{**rows[0], **edit}, *rows[1:]]})
        assert refusal(Plan.from_json, text).startswith("text must be a plan as Plan.to_json"), edit
    for key, value in {"cost": [], "dtype": 5, "topology": None, "chunk_nbytes": 0}.items():
        assert refusal(Plan.from_json, json.dumps({**data, key: value})), key
    assert "text must be a plan" in refusal(Plan.from_json, None)


def test_a_large_array_inside_a_host_with_given_nics_is_planned():
    """Splitting over senders is for NICs; inside a host there are none to give a speed."""
    src = Layout(DeviceMesh([0, 1]), "R", (12_000_000,))
    dst = Layout(DeviceMesh([2, 3, 4]), "S0", (12_000_000,))
    made = plan(src, dst, topology=Topology([0] * 5, nic_bandwidth_Bps=[1e9]))
    assert len(made.transfers()) == 3


def test_a_rank_without_a_host_is_named():
    text = refusal(small, topology=Topology.uniform(6, 2), error=TopologyError)
    assert "not in it: rank 6" in text


@pytest.mark.parametrize(
    "fields", [{"nic_bandwidth_Bps": 0}, {"intra_latency_s": -1}, {"nic_latency_s": float("inf")}]
)
def test_a_cost_model_that_cannot_be_is_refused(fields):
    text = refusal(CostModel, **fields)
    assert text.startswith(
        "a cost model needs bandwidths > 0 and latencies >= 0, sizes too, all finite"
    )
    assert next(iter(fields)) in text


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        (">f4", 4),
        (np.complex128, 16),
        (bool, 1),
        ("S5", 5),
        ([("x", "<f4"), ("y", "<i2", (3,))], 10),
    ],
)
def test_any_dtype_of_a_fixed_size_will_do(dtype, itemsize):
    made = small(dtype=dtype)
    assert made.itemsize == itemsize
    again = Plan.from_json(made.to_json())
    assert again.dtype == made.dtype
    assert again.digest == made.digest


@pytest.mark.parametrize("dtype", [object, "O", [("x", object)], "S0", "float31", "no such"])
def test_other_dtypes_are_refused(dtype):
    text = refusal(small, dtype=dtype)
    assert "elements must have a fixed size" in text or "dtype must be one that NumPy knows" in text


@pytest.mark.parametrize(("itemsize", "chunks"), [(1, 3), (2, 6), (4, 12), (16, 48), (100, 48)])
def test_chunks_keep_to_their_size_in_bytes(itemsize, chunks):
    src, dst = (Layout(DeviceMesh([rank]), "R", (48,)) for rank in (0, 1))
    made = plan(src, dst, f"S{itemsize}", strategy="send_recv", chunk_nbytes=16)
    # A chunk cannot be less than an element.
    assert [len(t.chunks) for t in made.transfers()] == [chunks]


# --- plans by rule -----------------------------------------------------------------------------


@settings(max_examples=100)
@given(layout_pairs(explicit=True), st.sampled_from(STRATEGIES), st.integers(1, 16))
def test_plans_by_rule_are_sound(pair, strategy, ranks_per_host):
    topology = Topology.uniform(16, ranks_per_host)
    check(rotated(*pair, "int16", topology, strategy, chunk_nbytes=32))


def test_a_plan_by_rule_spreads_senders_and_takes_turns():
    src = Layout(DeviceMesh.arange((4, 4)), "S0 R", (64, 64))
    dst = Layout(DeviceMesh.arange((4, 4), start=16), "R S0", (64, 64))
    made = rotated(src, dst, topology=Topology.uniform(32, 4))
    check(made)
    transfers = made.transfers()
    assert len({t.sender for t in transfers}) > 4
    for turn in range(4):
        now = [t for t in transfers if t.order[0] == turn]
        assert len({made.topology.host(t.sender) for t in now}) == 4
        assert len({t.receivers for t in now}) == 4


def test_a_rank_of_a_million_task_plan_knows_its_own_part():
    shape = (4096, 4096)
    src = Layout(DeviceMesh.arange((32, 32)), "S01 R", shape)
    dst = Layout(DeviceMesh.arange((32, 32), start=1024), "R S01", shape)
    made = plan(src, dst, topology=Topology.uniform(2048, 8))
    sends, receives = made.ops(5), made.ops(1500)
    assert [op.kind for op in sends] == ["send"] * 1024
    assert [op.kind for op in receives] == ["recv"] * 1024
    assert {op.peer for op in sends} == set(range(1024, 2048))
    assert {op.peer for op in receives} == set(range(1024))
    # The block that both have: rows of 5, columns of 1500 - 1024.
    (sent,) = (op for op in sends if op.peer == 1500)
    (received,) = (op for op in receives if op.peer == 5)
    assert sent.boxes == received.boxes
    assert sent.transfer == received.transfer
    assert str(sent.boxes[0]) == "[20:24, 1904:1908]"
    assert sum(op.volume for op in sends) == sum(op.volume for op in receives) == 4 * 4096
    # The plan itself is no larger than its layouts.
    assert len(made.to_json()) < 100_000


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([(("title", "a"), "<i4")]),
        np.dtype([("a", "S0"), ("b", "<i4")]),
        np.dtype([("a", "<f4", (2, 3)), ("b", [("c", ">u2")])]),
        np.dtype(
            {"names": ["a", "b"], "formats": ["u1", "<f8"], "offsets": [3, 8], "itemsize": 24}
        ),
        np.dtype([("a", "u1"), ("b", "<f8")], align=True),
        "bfloat16",
    ],
    ids=str,
)
def test_structured_dtypes_survive_json(dtype):
    src, dst = (Layout(DeviceMesh([rank]), "R", (4,)) for rank in (0, 1))
    made = plan(src, dst, dtype)
    read = Plan.from_json(made.to_json())
    assert read == made
    assert read.dtype == made.dtype


def test_bfloat16_inside_a_structure_survives_json():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    src, dst = (Layout(DeviceMesh([rank]), "R", (4,)) for rank in (0, 1))
    made = [
        plan(src, dst, np.dtype([("a", kind), ("b", "<f4")]))
        for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    ]
    assert made[0] != made[1]
    assert [Plan.from_json(p.to_json()).dtype for p in made] == [p.dtype for p in made]


@pytest.mark.parametrize("dtype", [None, "__doc__", np.dtype(("f4", (2,))), "O", "S0"])
def test_what_is_no_element_type_is_refused(dtype):
    layout = Layout(DeviceMesh([0]), "R", (4,))
    assert refusal(plan, layout, layout, dtype)
