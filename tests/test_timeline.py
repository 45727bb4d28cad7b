"""Timelines by NIC: lanes, utilisation, the picture in characters, and figure files."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from xmesh import CostModel, DeviceMesh, Layout, Topology, plan
from xmesh.errors import OptionError
from xmesh.figure import draw
from xmesh.planner.simulate import simulate
from xmesh.timeline import busiest_nics, by_lane, crossing, lane_names, text_timeline, utilisation


def made(nics=1, **options):
    """Two hosts of two ranks send 2 MB each to two others."""
    src = Layout(DeviceMesh.arange((2, 2)), "S0R", (1000, 1000))
    dst = Layout(DeviceMesh.arange((2, 2), 4), "RS0", (1000, 1000))
    cost = CostModel(nic_bandwidth_Bps=1e9, nic_latency_s=1e-3)
    return plan(src, dst, topology=Topology.uniform(8, 2, nics), cost=cost, **options)


def test_lanes_have_every_message_between_hosts_at_both_ends():
    it = made()
    result = simulate(it)
    messages = crossing(result.messages, it.topology, it.cost)
    lanes = by_lane(messages, it.topology, range(4))
    assert [(lane.nic, lane.incoming) for lane in lanes] == [
        (0, False),
        (1, False),
        (2, True),
        (3, True),
    ]
    assert sum(map(len, lanes.values())) == 2 * len(messages)
    for lane, found in lanes.items():
        busy_s = (result.nic_in_busy_s if lane.incoming else result.nic_out_busy_s)[lane.nic]
        assert sum(m.end_s - m.start_s for m in found) == pytest.approx(busy_s)


def test_the_busiest_nics():
    result = simulate(made())
    assert busiest_nics(result, 16) == [0, 1, 2, 3]
    assert busiest_nics(result, 3) == [0, 1, 2]
    assert busiest_nics(result, 2) == [0, 2]  # one that sends, one that receives
    assert lane_names([0, 2], made().topology) == {0: "host0", 2: "host2"}
    assert lane_names([0, 3], made(nics=2).topology) == {0: "host0.0", 3: "host1.1"}


def test_utilisation_is_bytes_over_what_could_be_moved():
    it = made()
    result = simulate(it)
    messages = crossing(result.messages, it.topology, it.cost)
    end_s = max(message.end_s for message in messages)
    for incoming in (False, True):
        share = utilisation(messages, it.topology, it.cost, end_s, 50, incoming)
        assert share.shape == (50,)
        assert share.max() <= 1 + 1e-9
        nbytes = share.mean() * end_s * 2 * 1e9  # two NICs
        assert nbytes == pytest.approx(sum(message.nbytes for message in messages))
    nothing = utilisation([], it.topology, it.cost, 1.0, 3, incoming=True)
    assert np.array_equal(nothing, np.zeros(3))


def test_the_picture_in_characters():
    it = made()
    result = simulate(it)
    lines = text_timeline(it, result, width=60)
    assert [line.split()[:2] for line in lines[:4]] == [
        ["host0", "out"],
        ["host1", "out"],
        ["host2", "in"],
        ["host3", "in"],
    ]
    assert {len(line) for line in lines} == {60}
    assert lines[0].split()[2].strip(".").count(".") <= 1
    few = text_timeline(it, result, width=60, most=2)
    assert few[-1] == "  ... 2 more NICs, no busier"


def test_a_picture_of_nothing():
    layout = Layout(DeviceMesh.arange((2,)), "S0", (8,))
    it = plan(layout, layout)
    assert text_timeline(it, simulate(it)) == ["  nothing moves between hosts"]


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_figures(tmp_path, ending, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"timeline.{ending}"
    it = made()
    assert draw(it, simulate(it), str(path)) == ""
    assert path.read_bytes().startswith(magic)
    left_out = draw(it, simulate(it), str(path), most=2)
    assert left_out == "the 2 busiest of 4 NICs have rows"


def test_a_figure_of_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    layout = Layout(DeviceMesh.arange((2,)), "S0", (8,))
    it = plan(layout, layout)
    draw(it, simulate(it), str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").exists()


def test_a_figure_that_cannot_be_written(tmp_path):
    pytest.importorskip("matplotlib")
    it = made()
    for name in ("no/folder.png", "timeline.nonsense"):
        with pytest.raises(OptionError, match="--figure must name a file"):
            draw(it, simulate(it), str(tmp_path / name))


def test_figures_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    it = made()
    with pytest.raises(OptionError, match=r"pip install 'xmesh\[figures\]'"):
        draw(it, simulate(it), str(tmp_path / "a.png"))
