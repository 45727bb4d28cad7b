"""What ``print(plan)`` shows, and the bytes per host under it."""

from __future__ import annotations

import pytest
import strategies
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from xmesh.box import Box
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import STRATEGIES, plan
from xmesh.planner.describe import (
    ENUMERATE_LIMIT,
    MAX_ROWS,
    describe,
    host_traffic,
    nbytes_text,
    ranks_text,
    seconds_text,
    table_lines,
)
from xmesh.planner.simulate import simulate
from xmesh.topology import Topology

GOLDEN = """\
plan weights: S0R@(2,2) -> RS0@(2,2), shape (8, 6), int8, 48 B
  strategy    send_recv
  scheduler   naive, seed 0; schedule not known to be the best
  moves       4 unit tasks in 4 transfers: 4 between hosts, 0 inside a host
  copies      0 B stay on the rank that holds them

  #  box         bytes  from       to           form       chunks   start
  0  [0:4, 0:3]   12 B  0 (host0)  4,5 (host2)  send_recv       1     0 s
  1  [0:4, 3:6]   12 B  0 (host0)  6,7 (host3)  send_recv       1  2.40 s
  2  [4:8, 0:3]   12 B  2 (host1)  4,5 (host2)  send_recv       1  2.40 s
  3  [4:8, 3:6]   12 B  2 (host1)  6,7 (host3)  send_recv       1  4.80 s

  host   ranks  sent  of bound  received  of bound
  host0  0,1    48 B      200%       0 B        0%
  host1  2,3    48 B      200%       0 B        0%
  host2  4,5     0 B        0%      48 B      200%
  host3  6,7     0 B        0%      48 B      200%

  makespan    7.20 s, 3.000 times the lower bound
  lower bound 2.40 s
  digest      """


def layouts_of(src, dst, shape, ranks, overlap=False):
    mesh = DeviceMesh.arange(ranks)
    return Layout(mesh, src, shape), Layout(
        mesh if overlap else DeviceMesh.arange(ranks, mesh.size), dst, shape
    )


def test_golden():
    src, dst = layouts_of("S0R", "RS0", (8, 6), (2, 2))
    made = plan(
        src,
        dst,
        dtype="int8",
        topology=Topology([0, 0, 1, 1, 2, 2, 3, 3], nic_bandwidth_Bps=[10.0] * 4),
        strategy="send_recv",
        scheduler="naive",
        name="weights",
    )
    assert str(made) == GOLDEN + made.digest.hex()[:12]


def test_long_plans_are_cut():
    made = plan(*layouts_of("S0R", "RS0", (64, 64), (16,)))
    text = describe(made)
    assert f"{256} unit tasks in {256} transfers" in text
    assert f"  ... {256 - MAX_ROWS} more" in text
    assert max(map(len, text.splitlines())) < 120


def test_many_receivers_and_boxes_are_abbreviated():
    mesh = DeviceMesh.arange((1,))
    made = plan(
        Layout(mesh, "R", (100,)),
        Layout(DeviceMesh.arange((6, 3), 3), "R", (100,)),
        topology=Topology.uniform(21, 3),
    )
    assert "3-5 (host1), 6-8 (host2), 9-11 (host3), 12-14 (host4), ... 2 hosts more" in str(made)
    shape = (2,) * 9 + (4,)
    src, dst = layouts_of("R" * 9 + "S0", "R" * 10, shape, (4,))
    assert "[0:2, 0:2, 0:2, 0:2, 0:2, 0:2, 0:2, ...]" in str(plan(src, dst))
    cyclic = {r: [Box((i,), (i + 1,)) for i in range(r, 8, 2)] for r in (0, 1)}
    assert "  [0:1] +3   16 B  0 (host0)  2 (host2) " in str(
        plan(Layout.from_boxes(cyclic, (8,)), Layout(DeviceMesh([2]), "R", (8,)))
    )


def test_nothing_moves():
    src, dst = layouts_of("S0R", "S0R", (8, 8), (4,), overlap=True)
    text = str(plan(src, dst))
    assert "makespan    0 s: nothing moves" in text
    assert "copies      256 B stay" in text


@pytest.mark.parametrize(("ranks", "whole"), [(70, True), (120, False)])
def test_plans_by_rule_are_not_listed(ranks, whole):
    """4,900 and 14,400 unit tasks: beyond a search, below and above what is enumerated."""
    assert (ranks**2 <= ENUMERATE_LIMIT) == whole
    src, dst = layouts_of("S0R", "RS0", (ranks, ranks), (ranks,), overlap=True)
    text = str(plan(src, dst, topology=Topology.uniform(ranks, 8)))
    assert f"{ranks**2:,} unit tasks, too many to search" in text
    assert f"{ranks:,} boxes on {ranks:,} sets of ranks" in text
    assert ("times the lower bound" in text) == whole
    assert ("left out for more than 10,000 unit tasks" in text) != whole
    assert " chunks " not in text


def test_a_huge_plan_is_described_at_once():
    src, dst = layouts_of("S0R", "RS0", (2048, 2048), (2048,), overlap=True)
    assert "more than 1,000,000 unit tasks" in str(plan(src, dst))


@given(st.data())
@hypothesis_settings(max_examples=60)
def test_host_traffic_is_what_the_simulation_moves(data):
    shape = data.draw(strategies.shapes())
    src, dst = data.draw(strategies.layouts(shape)), data.draw(strategies.layouts(shape))
    topology = Topology.uniform(strategies.RANK_BOUND, data.draw(st.integers(1, 6)))
    made = plan(src, dst, topology=topology, strategy=data.draw(st.sampled_from(STRATEGIES)))
    result = simulate(made)
    for host, sent, received in host_traffic(made):
        assert sent == result.host_out_nbytes[host]
        assert received == result.host_in_nbytes[host]
    assert str(made).startswith("plan array: ")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12_800, "12.5 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**50, "1.00 PiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_nbytes_text(nbytes, text):
    assert nbytes_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4e-7, "0.40 us"),
        (41.94e-3, "41.9 ms"),
        (0.99999, "1.00 s"),
        (123.4, "123 s"),
        (999.96e-6, "1.00 ms"),
    ],
)
def test_seconds_text(seconds, text):
    assert seconds_text(seconds) == text


def test_ranks_text():
    assert ranks_text([]) == ""
    assert ranks_text([0, 1, 2, 3, 8, 9, 12]) == "0-3,8,9,12"
    assert ranks_text([3, 2, 1, 4, 5, 6]) == "3,2,1,4-6"
    assert ranks_text(range(0, 40, 2), most=3) == "0,2,4,..."


def test_table_lines():
    rows = [("a", 1), ("bcd", 20)]
    assert table_lines(("x", "number"), rows, "<>", total=5) == [
        "  x    number",
        "  a         1",
        "  bcd      20",
        "  ... 3 more",
    ]
    assert table_lines(("x", "y"), [], "<>") == ["  x  y"]
