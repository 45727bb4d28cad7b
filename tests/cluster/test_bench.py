"""``xmesh bench cluster`` as a whole, tiny: files, checks, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from xmesh.cluster.emulated import RECORDS
from xmesh.cluster.processes import marked

pytest.importorskip("matplotlib")


@pytest.fixture
def start(environment, tmp_path):
    """The command in a process of its own, in a folder of the test's."""
    started = []

    def begin(*words):
        process = subprocess.Popen(
            [sys.executable, "-m", "xmesh", "bench", "cluster", *words],
            env=os.environ | environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def nothing_is_left_of(process):
    name = f"xm{process.pid}"
    namespaces = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert f"{name}-" not in namespaces
    assert not list(RECORDS.glob(f"{name}*"))
    assert marked("XMESH_CLUSTER", name) == []


@pytest.mark.timeout(240)
def test_all_of_it(start, tmp_path):
    process = start(
        *("--hosts", "3", "--rate", "1gbit", "--case", "7", "one-rank-per-host", "8"),
        *("--mbytes", "0.1", "--repeats", "2", "--other-repeats", "1"),
        *("--method", "auto", "send_recv/naive", "mpi_alltoallw", "mpi_bcast", "mpi_isend"),
    )
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    nothing_is_left_of(process)
    folder = tmp_path / "out" / "cluster-bench"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("multicast.json", "n-to-m.png", "n-to-m.svg", "one-to-m.png", "one-to-m.svg"),
        *("paper.json", "prediction.png", "prediction.svg", "report.md"),
    ]
    rows = json.loads((folder / "paper.json").read_text())
    assert [(row["case"], row["strategy"], row["scheduler"]) for row in rows][2:5] == [
        (7, "mpi_alltoallw", ""),
        (7, "mpi_bcast", ""),
        (7, "mpi_isend", ""),
    ]
    assert {row["case"] for row in rows} == {7, 8}
    for row in rows:
        assert row["verified"] is True
        assert row["time_s"] > 0
        assert row["bound_s"] > 0
        assert (row["predicted_s"] is None) == (row["scheduler"] == "")
    multicasts = json.loads((folder / "multicast.json").read_text())
    assert len({row["case"] for row in multicasts}) == 5
    text = (folder / "report.md").read_text()
    assert "3 hosts of 4 ranks, NICs of 1000 Mbit/s" in text
    assert "too large for these hosts: case one-rank-per-host" in text
    assert "every element of every call is right: **met**" in text
    assert text.split("## Targets")[1].split("##")[0].strip() in output
    assert "case 7: S1RR@(1,4) -> RRR@(2,4), mpi_bcast" in output


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(start, tmp_path, number, status):
    process = start(
        *("--hosts", "2", "--ranks-per-host", "1", "--rate", "100mbit", "--only", "multicast"),
        *("--method", "send_recv", "--mbytes", "1", "--other-repeats", "10000"),
    )
    deadline_s = time.monotonic() + 60
    while not marked("XMESH_CLUSTER", f"xm{process.pid}"):
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == status
    nothing_is_left_of(process)


@pytest.mark.timeout(120)
def test_ranks_that_fail(start, tmp_path):
    """Too little time: an error, what was measured is kept, and the cluster is gone."""
    process = start(
        *("--hosts", "2", "--ranks-per-host", "1", "--rate", "100mbit", "--only", "multicast"),
        *("--method", "auto", "send_recv", "--mbytes", "1", "--other-repeats", "10000"),
        *("--repeats", "1", "--timeout", "12"),
    )
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 2
    assert "the ranks must end within 12 s" in output
    nothing_is_left_of(process)
    rows = json.loads((tmp_path / "out" / "cluster-bench" / "multicast.json").read_text())
    assert [row["method"] for row in rows] == ["auto"]
