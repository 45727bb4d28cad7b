"""Simulated schedules as characters, traces and figures, and ``xmesh pipeline`` that shows them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from xmesh.cli import main
from xmesh.pipeline import SCHEDULES, PipelineSchedule, schedule
from xmesh.pipeline.timeline import chrome_trace, draw, text_timeline


def test_characters():
    found = schedule("1f1b", 2, 2, weight_delay=True).simulate(transfer_s=1)
    assert text_timeline(found) == [
        "0: F0-F1-         I0=W0~   I1=W1~",
        "1:       F0-I0=W0~F1-I1=W1~",
        f"   0{'10 s':>29}",
    ]
    assert text_timeline(found, width=13) == ["0: FF   IW IW", "1:   FIWFIW", "   0     10 s"]
    nothing = schedule("1f1b", 2, 2).simulate(forward_s=0, backward_s=0)
    assert text_timeline(nothing) == ["  nothing takes any time"]


def test_every_schedule_has_a_picture():
    for name in SCHEDULES:
        found = schedule(name, 3, 5).simulate(transfer_s=0.5)
        *lines, axis = text_timeline(found)
        assert len(lines) == 3
        assert all(f"F{k}" in line for k in range(5) for line in lines)
        assert axis.endswith(f" {found.makespan_s:.6g} s")


def test_trace():
    found = schedule("1f1b", 2, 2).simulate(transfer_s=1)
    data = json.loads(json.dumps(chrome_trace(found, {"schedule": "1f1b"})))
    bars = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == len(found.timeline) == 2 * 2 * 2 + 2 * 2
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for bar in bars:
        threads.setdefault((bar["pid"], bar["tid"]), []).append((bar["ts"], bar["dur"]))
    assert len(threads) == 4  # each group computes, and sends to the other
    for rows in threads.values():  # viewers drop bars that overlap
        rows.sort()
        for (start, duration), (after, _) in pairwise(rows):
            assert start + duration <= after
    assert data["otherData"] == {"schedule": "1f1b"}


def test_figure(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    draw(schedule("zb-h1", 3, 4).simulate(transfer_s=0.5), str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def printed(capsys, *argv):
    assert main(["pipeline", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_command(capsys, tmp_path):
    trace = tmp_path / "trace.json"
    line = ["--stages", "4", "--microbatches", "16", "--transfer-s", "1"]
    out = printed(capsys, "eager-1f1b", *line, "--timeline", "--trace", str(trace))
    assert out.startswith(str(schedule("eager-1f1b", 4, 16)))
    assert "  makespan  63 s\n  bubble    15 s, 23.8% of the makespan\n" in out
    assert "\n      0  0           48 s                 7\n" in out
    assert json.loads(trace.read_text())["traceEvents"]
    assert "  makespan  92 s\n" in printed(capsys, "1f1b", *line, "--transfers", "blocking")


def test_command_reads_what_it_wrote(capsys, tmp_path):
    path = tmp_path / "mine.txt"
    text = printed(capsys, "zb-h1", "--stages", "3", "--microbatches", "4", "--grid")
    assert PipelineSchedule.parse(text) == schedule("zb-h1", 3, 4)
    path.write_text(text)
    out = printed(capsys, str(path), "--forward-s", "1,2,3", "--transfer-s", "0,1")
    assert out.startswith(text)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("1f1b --stages 2", "needs --stages and --microbatches"),
        ("1f1b --stages 2 --microbatches 2 --forward-s x", "times are seconds"),
        ("1f1b --stages 2 --microbatches 2 --transfer-s 1,2", "one time for each of 1 edges"),
        ("/nowhere", "a schedule is one of"),
        ("/nowhere --stages 2", "says all of this itself"),
        ("1f1b --stages 2 --microbatches 2 --trace /nowhere/x", "--trace must name a file"),
    ],
)
def test_command_errors(capsys, line, rule):
    assert main(["pipeline", *line.split()]) == 2
    assert rule in capsys.readouterr().err
