"""Targets, report and figures of a cluster's measurements, from rows made up here."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace

import pytest

from xmesh import cli
from xmesh.bench import cluster, figures
from xmesh.bench.report import Setting, report, targets_text
from xmesh.bench.rows import Row, row_from_json
from xmesh.bench.targets import targets
from xmesh.cluster import EmulatedCluster
from xmesh.errors import XmeshError
from xmesh.planner import CostModel

MIB = 2**20
SETTING = Setting("xmesh bench cluster", 5, 4, 200e6, "MPICH 5.0", "2026-11-30")


def row(case, method, time_s, **changes):
    """One that took so long, of a bound of 1 s and as predicted."""
    strategy, _, scheduler = method.partition("/")
    plain = method.startswith("mpi")
    made = Row(
        case=case,
        src="S0R@(2,4)",
        dst="RS0@(2,4)",
        shape=(2048, 2048),
        nbytes=16 * MIB,
        unit_tasks=4,
        strategy="broadcast" if method == "auto" else strategy,
        scheduler="" if plain else scheduler or "auto",
        ranks_per_host=4,
        nic_bandwidth_Bps=2.4e7,
        sent_nbytes=(),
        received_nbytes=(),
        makespan_s=None if plain else 1.0,
        bound_s=1.0,
        ratio=None if plain else 1.0,
        predicted_s=None if plain else time_s,
        time_s=time_s,
        times_s=(time_s,),
        verified=True,
        problem="",
        method=method,
        receivers=4,
    )
    return replace(made, **changes)


N_TO_M = [
    row(1, "auto", 1.02),
    row(1, "broadcast", 1.0),
    row(1, "send_recv/naive", 4.0),
    row(1, "mpi_alltoallw", 4.4),
    row(1, "mpi_bcast", 1.6),
    row("uneven", "auto", 1.1, receivers=1),
    row("uneven", "broadcast", 1.09, receivers=1),
    row("uneven", "send_recv/naive", 1.2, receivers=1),
    row("uneven", "mpi_alltoallw", 1.05, receivers=1),
]
ONE_TO_M = [
    row(f"1 to {receivers}", method, time_s, formula_s=formula_s)
    for receivers, method, time_s, formula_s in (
        ("1x1", "auto", 1.0, 1.0),
        ("1x1", "send_recv", 1.0, 1.0),
        ("1x1", "broadcast", 1.0, 1.1),
        ("1x1", "mpi_bcast", 1.0, None),
        ("4x2", "auto", 1.05, 1.1),
        ("4x2", "send_recv", 8.0, 8.0),
        ("4x2", "broadcast", 1.06, 1.1),
        ("4x2", "mpi_bcast", 2.0, None),
    )
]


def missed(n_to_m, one_to_m=()):
    return {each.rule: each.missed for each in targets(n_to_m, one_to_m) if each.missed}


def changed(rows, case, method, **changes):
    return [
        replace(each, **changes) if (each.case, each.method) == (case, method) else each
        for each in rows
    ]


def only(found):
    ((rule, texts),) = found.items()
    return rule, texts


def test_a_rival_that_is_faster_is_a_target_missed_with_a_reason():
    rule, (text,) = only(missed(N_TO_M, ONE_TO_M))
    assert "faster than mpi_alltoallw" in rule
    assert text == (
        "case uneven (nothing to multicast: each box is for one rank, so both send the same): 0.95"
    )


def test_repeats_that_overlap_are_said():
    rows = changed(N_TO_M, "uneven", "mpi_alltoallw", times_s=(1.05, 1.2))
    rows = changed(rows, "uneven", "auto", times_s=(1.0, 1.1))
    assert "the times of the repeats overlap" in only(missed(rows))[1][0]


@pytest.mark.parametrize(
    ("case", "method", "changes", "phrase", "text"),
    [
        (1, "auto", {"time_s": 1.16, "predicted_s": 1.16}, "1.15 x the bound", "case 1: 1.16"),
        (1, "broadcast", {"predicted_s": 0.85}, "prediction is within", "case 1, broadcast: 0.85"),
        (
            *(1, "send_recv/naive", {"time_s": 0.95, "predicted_s": 0.95}),
            *("any other strategy", "case 1, send_recv/naive: 1.07"),
        ),
        (1, "mpi_bcast", {"time_s": 0.9}, "faster than mpi_bcast", "case 1: 0.88"),
        (1, "mpi_bcast", {"verified": False, "problem": "all of it"}, "right", "all of it"),
        (
            *(1, "auto", {"nbytes": 62 * MIB, "time_s": 1.09, "predicted_s": 1.09}),
            *("1.08 x", "case 1: 1.09"),
        ),
        (
            *("1 to 4x2", "broadcast", {"time_s": 1.2, "predicted_s": 1.2}),
            *("broadcast to the most", "1 to 4x2 against 1 to 1x1: 1.20"),
        ),
        (
            *("1 to 4x2", "send_recv", {"time_s": 9.5, "predicted_s": 9.5}),
            *("of its formula", "1 to 4x2, send_recv: 1.19"),
        ),
    ],
)
def test_each_target_can_be_missed(case, method, changes, phrase, text):
    before = missed(N_TO_M, ONE_TO_M)
    found = missed(
        changed(N_TO_M, case, method, **changes), changed(ONE_TO_M, case, method, **changes)
    )
    (rule,) = [rule for rule in found if phrase in rule]
    (new,) = [each for each in found[rule] if each not in before.get(rule, ())]
    assert text in new


def test_what_was_not_measured_is_not_met():
    assert not any(target.met for target in targets([], []))
    assert targets_text([], []).count("not measured") == len(targets([], []))


def test_the_report_has_all_tables():
    cost = CostModel(2.39e7, 1e-5, 4e9, 2e-5)
    setting = replace(SETTING, costs={"paper": cost}, left_out=["6", "uneven"])
    text = report(N_TO_M, ONE_TO_M, setting)
    assert text.startswith("# Emulated cluster: 5 hosts of 4 ranks, NICs of 200 Mbit/s\n")
    assert "`xmesh bench cluster`, 2026-11-30" in text
    assert "191.2 Mbit/s" in text
    assert "all right" in text
    assert "too large for these hosts: case 6, uneven" in text
    for line in (
        "| case | auto | broadcast | send_recv/naive | mpi_alltoallw | mpi_bcast |",
        "| 1 | 1.02 | 1.00 | 4.00 | 4.40 | 1.60 |",
        "| uneven | 1.10 | 1.09 | 1.20 | 1.05 | \u2013 |",
        "| 1 | 3.92 | 4.31 | 1.57 | broadcast | broadcast | +2.0% |",
        "| 1 to 4x2 | 0.95 | 1.00 | 0.96 |",
    ):
        assert line in text.split("\n")
    assert report([], ONE_TO_M, SETTING).count("## n to m") == 0


def test_a_wrong_element_is_in_the_report():
    rows = changed(N_TO_M, 1, "mpi_bcast", verified=False, problem="rank 9: all wrong")
    text = report(rows, [], SETTING)
    assert "WRONG in 1 of 9 rows" in text
    assert "case 1, mpi_bcast: rank 9: all wrong" in text


def test_rows_of_plain_mpi_survive_json():
    for each in (*N_TO_M, *ONE_TO_M):
        assert row_from_json(json.loads(json.dumps(asdict(each)))) == each


# --- Figures --------------------------------------------------------------------------------------


def test_figures_are_png_and_svg(tmp_path):
    pytest.importorskip("matplotlib")
    files = figures.draw(N_TO_M, ONE_TO_M, tmp_path, SETTING.title)
    assert sorted(file.name for file in files) == [
        *("n-to-m.png", "n-to-m.svg", "one-to-m.png", "one-to-m.svg"),
        *("prediction.png", "prediction.svg"),
    ]
    for file in files:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG" if file.suffix == ".png" else b"<?xml")
    drawn = (tmp_path / "n-to-m.svg").read_text()
    assert "uneven" in drawn
    assert "mpi_alltoallw" in drawn
    assert figures.draw([], [], tmp_path, "nothing") == []


def test_figures_of_one_case_and_a_method_of_its_own(tmp_path):
    pytest.importorskip("matplotlib")
    files = figures.draw([row(1, "broadcast/dfs", 1.0)], [], tmp_path, "one")
    assert len(files) == 4


def test_without_matplotlib_nothing_is_begun(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None)
    monkeypatch.setattr(EmulatedCluster, "up", lambda self: pytest.fail("began"))
    with pytest.raises(XmeshError, match="xmesh\\[figures\\]"):
        cluster.main(["--output", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


# --- The command ----------------------------------------------------------------------------------


def test_a_cluster_that_no_case_fits(capsys):
    assert cli.main(["bench", "cluster", "--hosts", "2", "--only", "paper"]) == 2
    assert "8 ranks, which is too few for case 1, 2, 3" in capsys.readouterr().err


def test_a_cluster_of_one_host(capsys):
    assert cli.main(["bench", "cluster", "--hosts", "1"]) == 2
    assert "a rank on one host and one on another" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    assert cli.main(["bench", "cluster", "--output", str(tmp_path / "file" / "x")]) == 2
    assert "--output must name a folder" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--rate", "fast"], ["--hosts", "0"], ["--method", "magic"]])
def test_meaningless_options_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        cluster.main(words)
    assert "xmesh bench cluster: error" in capsys.readouterr().err
