"""The trace of a simulation has each message on both its ranks, at its time."""

from __future__ import annotations

import json

from xmesh import DeviceMesh, Layout, Topology, plan
from xmesh.cli import main
from xmesh.planner.simulate import simulate
from xmesh.report import chrome_trace


def test_each_message_stands_on_both_ranks_at_its_time():
    src, dst = Layout(DeviceMesh([0]), "R", (4096,)), Layout(DeviceMesh([1, 2, 3]), "R", (4096,))
    made = plan(src, dst, "float32", Topology.uniform(4, 2), strategy="send_recv")
    messages = simulate(made).messages
    events = chrome_trace(messages, made.topology)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * len(messages)
    for message, (out, into) in zip(
        messages, zip(spans[::2], spans[1::2], strict=True), strict=True
    ):
        assert (out["tid"], into["tid"]) == (2 * message.source, 2 * message.destination + 1)
        assert out["pid"] == made.topology.host(message.source)
        assert into["pid"] == made.topology.host(message.destination)
        for event in (out, into):
            assert event["ts"] == message.start_s * 1e6
            assert abs(event["ts"] + event["dur"] - message.end_s * 1e6) < 1e-6
            assert event["args"]["nbytes"] == message.nbytes
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"host0", "host1", "rank 0 out", "rank 3 in"} <= names


def test_the_command_writes_a_trace(tmp_path, capsys):
    file, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    assert main(["plan", "S0@(2)", "R@(2)", "--shape", "64", "--json"]) == 0
    file.write_text(capsys.readouterr().out)
    assert main(["simulate", str(file), "--trace", str(trace)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert json.loads(trace.read_text())["traceEvents"]
    assert main(["simulate", str(file), "--trace", str(tmp_path / "no" / "trace.json")]) == 2
    assert "--trace must name a file that can be written" in capsys.readouterr().err
