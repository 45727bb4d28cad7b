"""The trace of a simulation has each message on both its ranks, at its time."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmesh import DeviceMesh, Layout, Topology, plan
from xmesh.cli import main
from xmesh.planner.simulate import simulate
from xmesh.report import Call, Span, apart, both_ends, chrome_trace


def small_plan():
    src, dst = Layout(DeviceMesh([0]), "R", (4096,)), Layout(DeviceMesh([1, 2, 3]), "R", (4096,))
    return plan(src, dst, "float32", Topology.uniform(4, 2), strategy="send_recv")


def test_each_message_stands_on_both_ranks_at_its_time():
    made = small_plan()
    messages = simulate(made).messages
    spans = both_ends(messages, made.topology, made.cost)
    trace = chrome_trace({"simulated": spans}, made.topology, {"unit": "us"})
    assert trace["otherData"] == {"unit": "us"}
    events = trace["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    names = threads(events)
    assert len(bars) == len(spans) == 2 * len(messages)
    for message, out, into in zip(messages, spans[::2], spans[1::2], strict=True):
        latency_s, _ = made.cost.link(made.topology, message.source, message.destination)
        assert (out.rank, out.peer, out.incoming) == (message.source, message.destination, False)
        assert (into.rank, into.peer, into.incoming) == (message.destination, message.source, True)
        assert (out.start_s, into.end_s) == (message.start_s, message.end_s)
        assert out.end_s == pytest.approx(message.end_s - latency_s)
        assert into.start_s == pytest.approx(message.start_s + latency_s)
        for span in (out, into):
            (bar,) = [
                bar
                for bar in bars
                if bar["ts"] == span.start_s * 1e6
                and bar["args"]["rank"] == span.rank
                and bar["name"].endswith(f"{'from' if span.incoming else 'to'} {span.peer}")
            ]
            assert bar["ts"] + bar["dur"] == pytest.approx(span.end_s * 1e6)
            assert bar["args"]["nbytes"] == message.nbytes
            process, thread = names[bar["pid"], bar["tid"]]
            assert process == f"simulated {made.topology.host_name(span.rank)}"
            # What rank 0 sends inside its host is under way beside what it sends to another.
            assert thread.startswith(f"rank {span.rank} {'in' if span.incoming else 'out'}")


def threads(events):
    """(pid, tid) -> names of process and thread."""
    about = [event for event in events if event["ph"] == "M"]
    process = {e["pid"]: e["args"]["name"] for e in about if e["name"] == "process_name"}
    return {
        (e["pid"], e["tid"]): (process[e["pid"]], e["args"]["name"])
        for e in about
        if e["name"] == "thread_name"
    }


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_bars_of_a_thread_do_not_overlap(times):
    spans = [Span(a, a + d, 0, 1, False, (0,), i, 4) for i, (a, d) in enumerate(times)]
    rows = apart(spans)
    assert sorted(span for row in rows for span in row) == sorted(spans)
    for row in rows:
        assert all(a.end_s <= b.start_s for a, b in pairwise(row))
    most = max((sum(a <= t < a + d for a, d in times) for t in range(70)), default=0)
    assert len(rows) <= most + sum(d == 0 for _, d in times)


def test_runs_are_processes_of_their_own_in_their_order():
    made = small_plan()
    spans = both_ends(simulate(made).messages, made.topology, made.cost)
    events = chrome_trace({"measured": [*spans, Call(0, 1, 0)], "simulated": spans}, made.topology)[
        "traceEvents"
    ]
    names = threads(events)
    assert {process.split()[0] for process, _ in names.values()} == {"measured", "simulated"}
    order = {e["args"]["sort_index"]: e["pid"] for e in events if e["name"] == "process_sort_index"}
    processes = [
        names[pid, tid][0] for _, pid in sorted(order.items()) for p, tid in names if p == pid
    ]
    assert processes == sorted(processes)
    assert ("measured host0", "rank 0 call") in names.values()
    assert ("simulated host0", "rank 0 call") not in names.values()


def test_the_command_writes_a_trace(tmp_path, capsys):
    file, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    assert main(["plan", "S0@(2)", "R@(2)", "--shape", "64", "--json"]) == 0
    file.write_text(capsys.readouterr().out)
    assert main(["simulate", str(file), "--trace", str(trace)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert json.loads(trace.read_text())["traceEvents"]
    assert main(["simulate", str(file), "--trace", str(tmp_path / "no" / "trace.json")]) == 2
    assert "--trace must name a file that can be written" in capsys.readouterr().err
