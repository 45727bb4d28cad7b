"""What a trace of a measured run holds, without MPI; clocks that differ are put on one axis."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from traces import bars, ends, messages_of

import xmesh
from xmesh import DeviceMesh, Layout, Resharder, Topology, Trace
from xmesh.clocks import Reading, RoundTrip, reading_of, to_axis
from xmesh.errors import OptionError
from xmesh.recording import CallRecord, Record, on_one_axis
from xmesh.report import Call, Span

SHAPE = (64, 48)


def plan(**options):
    src = Layout(DeviceMesh.arange((2, 2)), "S0R", SHAPE)
    dst = Layout(DeviceMesh.arange((2, 2), 4), "RS0", SHAPE)
    return xmesh.plan(src, dst, topology=Topology.uniform(8, 2), chunk_nbytes=512, **options)


def local(made):
    array = np.arange(np.prod(SHAPE), dtype="float32").reshape(SHAPE)
    return {r: array[made.src.boxes(r)[0].slices()] for r in made.src.ranks}


@pytest.mark.parametrize("strategy", ["broadcast", "send_recv", "local_allgather"])
def test_a_trace_has_the_messages_of_the_plan(tmp_path, strategy):
    made = plan(strategy=strategy)
    path = tmp_path / "trace.json"
    trace = Trace()
    with Resharder(made, trace=trace) as reshard:
        for _ in range(3):
            reshard(local(made))
    for call in (None, 0, 1):
        trace.write(str(path), call)
        data = json.loads(path.read_text())
        about = data["otherData"]
        assert about["call"] == (2 if call is None else call)
        assert about["clock_error_bound_s"] == 0
        assert about["simulated_s"] > 0
        assert about["processors"]["4"] == "this process"
        for run in ("measured", "simulated"):
            calls, found = bars(data, run)
            assert ends(found) == (messages_of(made), messages_of(made))
            assert all(bar["ts"] >= 0 and bar["dur"] >= 0 for bar in found)
            threads: dict[Any, list[Any]] = {}
            for bar in found:
                threads.setdefault((bar["pid"], bar["tid"]), []).append(bar)
            for thread in threads.values():
                assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(thread))
            if run == "measured":
                assert sorted(bar["args"]["rank"] for bar in calls) == list(range(8))
                end = max(bar["ts"] + bar["dur"] for bar in calls)
                assert min(bar["ts"] for bar in calls) == 0
                assert all(bar["ts"] + bar["dur"] <= end + 1e-3 for bar in found)


def test_calls_in_flight_at_once_are_told_apart(tmp_path):
    made = plan()
    trace = Trace()
    with Resharder(made, trace=trace) as reshard:
        reshard(local(made))
        requests = [reshard.start(local(made)) for _ in range(40)]
        for request in requests:
            request.wait()
    for call in (25, 39, 40):
        trace.write(str(tmp_path / "trace.json"), call)
        _, found = bars(json.loads((tmp_path / "trace.json").read_text()), "measured")
        assert ends(found) == (messages_of(made), messages_of(made))
    with pytest.raises(OptionError, match="keeps the last 16 calls, of 41"):
        trace.write(str(tmp_path / "trace.json"), 24)


def test_without_a_call_or_a_file(tmp_path):
    made = plan()
    trace = Trace(keep=1)
    with pytest.raises(OptionError, match="a call must have been recorded"):
        trace.write(str(tmp_path / "trace.json"))
    with Resharder(made, trace=trace) as reshard:
        with pytest.raises(OptionError, match="a call must have been recorded"):
            trace.write(str(tmp_path / "trace.json"))
        reshard(local(made))
    with pytest.raises(OptionError, match="a file that can be written"):
        trace.write(str(tmp_path / "no" / "trace.json"))
    with pytest.raises(OptionError, match="a trace records one resharder"):
        Resharder(made, trace=trace)
    with pytest.raises(OptionError, match="trace must be a Trace"):
        Resharder(made, trace="trace.json")  # type: ignore[arg-type]
    for keep in (0, 1.5, True):
        with pytest.raises(OptionError, match="one call or more"):
            Trace(keep=keep)  # type: ignore[arg-type]


# --- Clocks ---------------------------------------------------------------------------------------


def test_the_shortest_round_trip_counts_and_bounds_the_error():
    rng = np.random.default_rng(5)
    for ahead_s in (-3e5, -1e-3, 0.0, 7.5):
        trips = []
        for _ in range(20):
            asked_s = rng.uniform(100, 101)
            there_s, back_s = rng.exponential(1e-4, 2)
            trips.append(
                RoundTrip(asked_s, asked_s + there_s + ahead_s, asked_s + there_s + back_s)
            )
        reading = reading_of(trips)
        assert reading.error_s == pytest.approx(min(t.answered_s - t.asked_s for t in trips) / 2)
        assert abs(reading.ahead_s - ahead_s) <= reading.error_s + 1e-9


def test_a_clock_that_drifts_is_put_right_between_two_readings():
    def clock(true_s):
        return 40 + true_s * (1 + 1e-4)

    readings = [Reading(clock(t), clock(t) - t, 0.0) for t in (10.0, 1000.0)]
    axis = to_axis(readings)
    for true_s in (10.0, 300.0, 999.0):
        assert axis(clock(true_s)) == pytest.approx(true_s, abs=1e-9)
    assert to_axis(readings[:1])(clock(10.0) + 5) == pytest.approx(15.0)


def test_ranks_with_other_clocks_meet_on_one_axis():
    """Rank 1's clock is 100 s ahead; it called 1 s later, and its receive waits for the send."""
    send = Record(1, False, (3,), 2, 8, 11.5, 12.5)
    receive = Record(0, True, (3,), 2, 8, 111.2, 113.0)
    unfinished = Record(0, True, (4,), 0, -1, 111.2)
    first = CallRecord(0, 10.0, 14.0, [send])
    second = CallRecord(1, 111.0, 115.0, [receive, unfinished])
    found = on_one_axis([(first, lambda t: t), (second, lambda t: t - 100)])
    assert found == [
        Call(0.0, 4.0, 0),
        Span(1.5, 2.5, 0, 1, False, (3,), 2, 8),
        Call(1.0, 5.0, 1),
        Span(1.5, 3.0, 1, 0, True, (3,), 2, 8),
    ]
