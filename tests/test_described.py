"""Clusters that are described and not there, on the command line."""

from __future__ import annotations

import json
import sys

import pytest

from xmesh import CostModel, Plan, Topology
from xmesh.cli import main
from xmesh.commands.described import described
from xmesh.commands.parse import parse_layout
from xmesh.errors import OptionError
from xmesh.planner import plan
from xmesh.planner.simulate import simulate
from xmesh.planner.size import count_messages

MOVE = ["S0R@(4,4)", "RS0@(4,4)", "--shape=64,64"]


def printed(capsys, *argv):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def failed(capsys, *argv):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def planned(capsys, *argv):
    return Plan.from_json(printed(capsys, "plan", *MOVE, "--json", *argv))


@pytest.mark.parametrize(
    ("argv", "topology"),
    [
        ([], Topology.one_rank_per_host(32)),
        (["--hosts=8"], Topology.uniform(32, 4)),
        (["--hosts=5"], Topology.uniform(32, 7)),
        (["--hosts=4", "--ranks-per-host=8"], Topology.uniform(32, 8)),
        (["--ranks-per-host=8", "--nics-per-host=2"], Topology.uniform(32, 8, 2)),
    ],
)
def test_hosts(capsys, argv, topology):
    assert planned(capsys, *argv).topology == topology


def test_rates(capsys, tmp_path):
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(CostModel(intra_latency_s=1e-6, nic_latency_s=2e-6).to_json()))
    argv = ["--nic-gbits=100", "--nic-latency-us=4", "--intra-gbits=80", f"--cost={cost}"]
    assert planned(capsys, *argv).cost == CostModel(12.5e9, 4e-6, 10e9, 1e-6)
    assert planned(capsys, "--intra-latency-us=7").cost == CostModel(intra_latency_s=7e-6)


@pytest.mark.parametrize(
    ("kinds", "topology"),
    [
        ({"hosts": 4, "ranks_per_host": 8}, Topology.uniform(32, 8)),
        ([{"hosts": 4, "ranks_per_host": 8, "nics_per_host": 2}], Topology.uniform(32, 8, 2)),
        (
            [
                {"hosts": 2, "ranks_per_host": 8, "nics_per_host": 2, "nic_gbits": 200},
                {"hosts": 1, "ranks_per_host": 16, "nic_gbits": 80},
            ],
            Topology(
                [0] * 8 + [1] * 8 + [2] * 16,
                [0, 0, 0, 0, 1, 1, 1, 1] * 2 + [0] * 16,
                nic_bandwidth_Bps=[25e9, 25e9, 25e9, 25e9, 10e9],
            ),
        ),
    ],
)
def test_a_topology_from_a_file(capsys, tmp_path, kinds, topology):
    path = tmp_path / "hosts.json"
    for data in (kinds, topology.to_json()):
        path.write_text(json.dumps(data))
        assert planned(capsys, f"--topology={path}").topology == topology


@pytest.mark.parametrize(
    "kinds",
    [
        3,
        [],
        {},
        {"hosts": 0, "ranks_per_host": 1},
        {"hosts": 2, "ranks_per_host": True},
        {"hosts": 2, "ranks_per_host": 2, "nic_gbits": 0},
        {"hosts": 2, "ranks_per_host": 2, "nic_gbits": "fast"},
        {"hosts": 2, "ranks_per_host": 2, "nics": 2},
        [{"hosts": 1, "ranks_per_host": 1, "nic_gbits": 1}, {"hosts": 1, "ranks_per_host": 1}],
    ],
)
def test_kinds_of_hosts_that_are_none(kinds):
    with pytest.raises(OptionError, match=r"kinds? of host"):
        described(kinds)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--hosts=0"], "a place for every rank"),
        (["--hosts=3", "--ranks-per-host=8"], "32 ranks, --hosts 3 --ranks-per-host 8"),
        (["--nics-per-host=2"], "add --hosts or --ranks-per-host"),
        (["--hosts=4", "--nics-per-host=0"], "ints >= 1"),
        (["--topology=/nowhere.json"], "a topology is read from a file"),
        (["--topology=/nowhere.json", "--hosts=2"], "hosts are described once"),
        (["--nic-gbits=0"], "bandwidths > 0"),
        (["--intra-latency-us=-1"], "latencies >= 0"),
    ],
)
def test_errors(capsys, argv, text):
    assert text in failed(capsys, "plan", *MOVE, *argv)


def test_files_that_describe_no_hosts(capsys, tmp_path):
    path = tmp_path / "hosts.json"
    for text in ("[", "[1]", '{"host_of_rank": [0]}', '{"hosts": 1, "ranks_per_host": 4}'):
        path.write_text(text)
        assert main(["plan", *MOVE, f"--topology={path}"]) == 2
    path.write_text('{"hosts": 4, "ranks_per_host": 8, "nic_gbits": 4}')
    text = failed(capsys, "plan", *MOVE, f"--topology={path}", "--nic-gbits=8")
    assert "the rate of a NIC is given once" in text


# --- xmesh simulate -------------------------------------------------------------------------------


def test_a_resharding_is_simulated_as_its_plan(capsys, tmp_path):
    options = [*MOVE, "--hosts=8", "--nic-gbits=1"]
    path = tmp_path / "plan.json"
    path.write_text(printed(capsys, "plan", *options, "--json"))
    assert printed(capsys, "simulate", *options) == printed(capsys, "simulate", str(path))


def test_other_rates_for_a_plan(capsys, tmp_path):
    made = planned(capsys, "--hosts=8")
    path = tmp_path / "plan.json"
    path.write_text(made.to_json())
    slow = printed(capsys, "simulate", str(path), "--nic-gbits=0.001", "--nic-latency-us=0")
    seconds = simulate(made, CostModel(125e3, 0.0)).makespan_s
    assert f"simulated   {seconds * 1e3:.1f} ms" in slow
    # Four hosts get 4 KiB each, in which no rate of the plan's own remains.
    assert "lower bound 32.8 ms" in slow


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["plan.json", "--hosts=2", "--shape=3"], "--shape, --hosts"),
        (["S0@(2)", "R@(2)"], "add --shape"),
        (["a", "b", "c"], "takes a plan or two layouts"),
        ([*MOVE, "--nics=0"], "shows one NIC or more"),
        ([*MOVE, "--max-messages=9"], "simulates it all the same"),
    ],
)
def test_simulate_errors(capsys, argv, text):
    assert text in failed(capsys, "simulate", *argv)


def test_thousands_of_hosts(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    trace, figure = tmp_path / "trace.json", tmp_path / "figure.png"
    argv = ["S0R@(2000)", "S01R@(1000,2)", "--shape=8000,4", "--ranks-per-host=1", "--timeline"]
    out = printed(capsys, "simulate", *argv, f"--trace={trace}", f"--figure={figure}")
    assert "2,000 messages" in out
    assert "... 3,984 more" in out
    assert "2,000 NICs, busy" in out
    assert len(out.splitlines()) < 60
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]) == 4000
    assert "the 16 busiest of 4,000 NICs have rows" in out
    assert figure.exists()


def test_a_figure_without_matplotlib_is_refused_at_once(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "figures need matplotlib" in failed(capsys, "simulate", *MOVE, "--figure=a.png")


def test_a_plan_that_is_too_large_is_refused(capsys):
    argv = ["S0R@(2000,8)", "RS0@(2000,8)", "--shape=16000,16000", "--ranks-per-host=8"]
    text = failed(capsys, "simulate", *argv)
    assert "values:  about 32,000,000 messages" in text
    assert "--max-messages 32000000" in text


@pytest.mark.parametrize(
    ("src", "dst", "size"),
    [
        ("S0R@(4,4)", "RS0@(4,4)", 64),
        ("S01R@(4,4)", "RR@(4,4)", 64),
        ("S0R@(70)", "RS1@(2,70)", 70),  # by rule
    ],
)
@pytest.mark.parametrize("strategy", ["auto", "local_allgather", "send_recv"])
def test_messages_are_counted_without_making_them(monkeypatch, src, dst, size, strategy):
    source = parse_layout(src, (size, size))
    made = plan(
        source,
        parse_layout(dst, (size, size), start=len(source.ranks)),
        topology=Topology.uniform(210, 4),
        strategy=strategy,
        chunk_nbytes=256,
    )
    count = len(simulate(made).messages)
    assert count_messages(made) == (count, True)
    monkeypatch.setattr("xmesh.planner.size.COUNT_LIMIT", 1000)
    assert count_messages(made) == (count, size == 64)  # from samples, which are all alike here
