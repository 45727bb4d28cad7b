"""The experiments: cases as data, the checks, the table, and how ranks are started."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from xmesh import Box, cli
from xmesh import mpiexec as starting
from xmesh.bench import content, demo, paper, recording, show
from xmesh.bench.rows import Row, row_from_json
from xmesh.errors import XmeshError

KEYS = {"case", "strategy", "scheduler", "time_s", "bound_s", "predicted_s", "verified"}

ROW = Row(
    case=3,
    src="RS0R@(2,4)",
    dst="S0RR@(2,4)",
    shape=(8, 8, 4),
    nbytes=1024,
    unit_tasks=4,
    strategy="broadcast",
    scheduler="auto",
    ranks_per_host=4,
    nic_bandwidth_Bps=1.25e8,
    sent_nbytes=(512, 512, 0, 0),
    received_nbytes=(0, 0, 512, 512),
    makespan_s=0.002,
    bound_s=0.001,
    ratio=2.0,
    predicted_s=0.0021,
    time_s=0.0305,
    times_s=(0.03, 0.0305, 0.04),
    verified=True,
    problem="",
)


def test_a_trace_for_each_case():
    assert recording.path_of_case("a/trace.json", 3, 1) == "a/trace.json"
    assert recording.path_of_case("a/trace.json", 3, 2) == "a/trace-case3.json"
    assert recording.path_of_case("trace", 9, 9) == "trace-case9"


# --- The check of every element -------------------------------------------------------------------


def test_codes_depend_on_the_place_in_the_whole_array_alone():
    whole = content.codes(Box.from_shape((7, 5, 6)), (7, 5, 6))
    assert np.unique(whole).size == 7 * 5 * 6
    box = Box((2, 1, 3), (7, 4, 5))
    np.testing.assert_array_equal(content.codes(box, (7, 5, 6)), whole[box.slices()])


def test_the_content_of_no_two_calls_agrees_anywhere():
    keys = [content.key(number, repeat) for number in range(1, 200) for repeat in range(20)]
    assert len(set(keys)) == len(keys)


def test_one_wrong_element_is_found_and_named():
    box = Box((2, 0), (4, 5))
    wanted = content.codes(box, (4, 5))
    out = wanted.copy()
    assert content.difference(wanted, out, box, rank=3, repeat=1) == ""
    out[1, 2] ^= 1
    text = content.difference(wanted, out, box, rank=3, repeat=1)
    assert "rank 3, repeat 1: 1 of 10 elements are wrong; the first is (3, 2)" in text


# --- Rows and tables ------------------------------------------------------------------------------


def rendered(rows: list[Row], width: int) -> str:
    stream = io.StringIO()
    show.print_table(rows, Console(file=stream, width=width, force_terminal=True, no_color=True))
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())


def test_rows_survive_json_and_have_the_keys_that_others_read():
    data = json.loads(json.dumps(asdict(ROW)))
    assert set(data) >= KEYS
    assert row_from_json(data) == ROW


def test_the_table_shows_what_was_measured():
    text = rendered([ROW, replace(ROW, case=7, time_s=1.5)], width=150)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    assert lines[0].startswith("case source -> destination tasks strategy")
    assert lines[2] == (
        "3 RS0R@(2,4) -> S0RR@(2,4) 4 broadcast auto 512 B 512 B 2.00 ms 1.00 ms 2.000 2.10 ms "
        "30.5 ms ok"
    )
    assert lines[3].startswith("7 ")
    assert "1.50 s" in text
    assert "planned for hosts of 4 ranks with a NIC of 1 Gbit/s each" in text
    assert "…" not in text


def test_a_table_in_a_file_is_as_wide_as_it_must_be():
    stream = io.StringIO()
    row = replace(ROW, strategy="global_allgather", sent_nbytes=(1000 * 2**20,))
    show.print_table([row], Console(file=stream))
    assert "…" not in stream.getvalue()
    assert "global_allgather auto 1000 MiB" in " ".join(stream.getvalue().split())


def test_a_narrow_terminal_gets_fewer_columns_but_no_cut_ones():
    text = rendered([ROW], width=80)
    assert "…" not in text
    assert "predicted" not in text
    assert "30.5 ms" in text


def test_a_wrong_element_is_seen_in_the_table():
    text = rendered([replace(ROW, verified=False, problem="rank 9, repeat 1: all wrong")], 120)
    assert "WRONG" in text
    assert "case 3: rank 9, repeat 1: all wrong" in text


def test_progress_is_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    with show.Display(Console(file=stream, force_terminal=False)) as display:
        display.step(1, 4, "case 3")
        display.row(ROW)
    assert stream.getvalue() == ("case 3: RS0R@(2,4) -> S0RR@(2,4), broadcast, 30.5 ms, verified\n")


def test_progress_on_a_terminal_says_what_is_at_work():
    stream = io.StringIO()
    with show.Display(Console(file=stream, force_terminal=True, width=80)) as display:
        display.step(1, 4, "case 3: somewhere")
    assert "case 3: somewhere" in stream.getvalue()


# --- The command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["--case", "10"], ["--mbytes", "0"], ["--mbytes", "nan"], ["--repeats", "-1"]]
)
def test_meaningless_options_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        paper.main(words)
    assert "xmesh bench paper: error" in capsys.readouterr().err


def test_the_command_line_knows_the_experiments(capsys):
    assert cli.main(["bench", "nothing"]) == 2
    assert "choose from: cluster, demo, multicast, paper, pipeline" in capsys.readouterr().err


@pytest.fixture
def child_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a test starts import the package that the test imports."""
    root = str(Path(__file__).resolve().parent.parent)
    parts = filter(None, [root, os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(parts))


needs_mpiexec = pytest.mark.usefixtures("mpiexec", "child_path")


@pytest.fixture
def mpiexec() -> None:
    try:
        starting.Launcher.find()
    except XmeshError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


@needs_mpiexec
def test_the_command_starts_the_ranks_itself(tmp_path, capfd):
    file = tmp_path / "rows.json"
    words = ["--case", "7", "--mbytes", "0.1", "--repeats", "2", "--json", str(file)]
    assert cli.main(["bench", "paper", *words, "--scheduler", "greedy", "--nic-gbits", "2"]) == 0
    (row,) = json.loads(file.read_text())
    assert row["case"] == 7
    assert row["scheduler"] == "greedy"
    assert row["nic_bandwidth_Bps"] == 2.5e8
    assert row["verified"] is True
    assert len(row["times_s"]) == 2
    out, err = capfd.readouterr()
    assert "S1RR@(1,4) -> RRR@(2,4)" in out
    assert "case 7: " in err


@needs_mpiexec
def test_too_few_ranks_are_told_what_to_do():
    lines: list[str] = []
    words = ["-m", "xmesh", "bench", "paper", "--case", "1", "7"]
    status = starting.run_ranks(2, words, on_line=lines.append, timeout_s=60)
    assert status == 2
    text = "\n".join(lines)
    assert text.count("there must be a rank for every place of both meshes") == 1
    assert "mpiexec -n 16 xmesh bench paper" in text


def test_the_demo_of_an_installed_package_says_where_the_example_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "_EXAMPLES", tmp_path)
    monkeypatch.setattr(paper, "main", lambda argv: 0)
    assert demo.main([]) == 0
    out = capsys.readouterr().out
    assert "coupled_heat.py is in examples/ of the source distribution" in out
    assert "gpt/train.py is in examples/ of the source distribution" in out


# --- Starting ranks -------------------------------------------------------------------------------


def test_a_launcher_is_known_by_its_variables(monkeypatch):
    for name in starting._SET_BY_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    assert not starting.launched()
    monkeypatch.setenv("PMI_RANK", "0")
    assert starting.launched()


def test_no_mpiexec_is_said_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(XmeshError, match="pip install"):
        starting.Launcher.find()


def fake_mpiexec(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "mpiexec"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


def test_open_mpi_gets_the_options_that_it_needs(monkeypatch, tmp_path):
    fake_mpiexec(tmp_path, "mpiexec (Open MPI) 5.0.6", monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    words = starting.Launcher.find().command(20, ["program.py"])
    assert words[:3] == [str(tmp_path / "mpiexec"), "-n", "20"]
    assert {"--oversubscribe", "--allow-run-as-root"} < set(words)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--allow-run-as-root" not in starting.Launcher.find().command(20, ["program.py"])


def test_other_launchers_get_no_such_options(monkeypatch, tmp_path):
    fake_mpiexec(tmp_path, "HYDRA build details:", monkeypatch)
    expected = [str(tmp_path / "mpiexec"), "-n", "3", str(tmp_path / "python"), "program.py"]
    assert starting.Launcher.find().command(3, ["program.py"]) == expected


@needs_mpiexec
def test_lines_and_status_of_ranks_come_back():
    lines: list[str] = []
    code = "import sys; sys.stdout.write('out\\n'); sys.stderr.write('err\\n'); sys.exit(7)"
    status = starting.run_ranks(2, ["-c", code], on_line=lines.append, timeout_s=60)
    assert status == 7
    assert {"out", "err"} <= set(lines)


@needs_mpiexec
def test_ranks_that_do_not_end_are_ended(tmp_path):
    code = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w').close(); time.sleep(600)"
    )
    began_s = time.monotonic()
    with pytest.raises(XmeshError, match="must end within 5 s"):
        starting.run_ranks(2, ["-c", code], on_line=lambda line: None, timeout_s=5)
    assert time.monotonic() - began_s < 90
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert started
    deadline_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
