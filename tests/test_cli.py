"""The command line: what it prints, how it fails, and what it leaves alone."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import strategies
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import xmesh
from xmesh.cli import COMMANDS, main
from xmesh.commands import doctor, doctor_gpu, doctor_text
from xmesh.commands.layout import picture, rank_table
from xmesh.commands.parse import parse_layout, parse_mesh, parse_shape
from xmesh.errors import LayoutError, MeshError, SpecError, XmeshError
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.mpiexec import Launcher
from xmesh.planner import CostModel, Plan, plan
from xmesh.topology import Topology

ROOT = Path(__file__).resolve().parent.parent
ASCII = "-|+++++++++"
HEAVY = ("mpi4py", "cupy", "torch", "jax", "matplotlib")


def fresh(code, *, env=None):
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def failed(capsys, *argv):
    """The error text of a command line that must fail."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("xmesh: error: ")
    assert "Traceback" not in err
    return err


def printed(capsys, *argv):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


# --- The command itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    assert "usage: xmesh" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nope"], ["plan"], ["layout", "R@(1)", "--bogus"]])
def test_usage_errors(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: xmesh" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"xmesh {xmesh.__version__}\n"


def test_python_m():
    child = subprocess.run(
        [sys.executable, "-m", "xmesh", "layout", "S0@(2)", "--shape", "3,4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (child.returncode, child.stdout) == (2, "")
    assert child.stderr.startswith("xmesh: error: a spec says, for each dimension")


def test_a_reader_may_stop_early():
    argv = ["layout", "S0@(4096)", "--shape", "4096", "--all"]
    code = f"import sys; from xmesh.cli import main; sys.exit(main({argv!r}))"
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(timeout=60) == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["layout", "S01R@(2,4)", "--shape", "8,16"],
        ["plan", "S0R@(4)", "RS0@(4)", "--shape", "8,16", "--simulate"],
        ["simulate", "S0R@(4)", "RS0@(4)", "--shape", "8,16", "--timeline", "--hosts", "4"],
    ],
)
def test_planning_imports_nothing_heavy(argv):
    code = (
        "import sys\nfrom xmesh.cli import main\n"
        f"status = main({argv!r})\n"
        f"sys.exit(str([m for m in {HEAVY!r} if m in sys.modules]) if status == 0 else 'failed')"
    )
    assert fresh(code).stderr.strip() == "[]"


# --- Notations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("8,16", (8, 16)),
        ("(8, 16)", (8, 16)),
        ("8x16", (8, 16)),
        ("7,", (7,)),
        ("()", ()),
        ("", ()),
    ],
)
def test_shapes(text, shape):
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("(2,4)", DeviceMesh.arange((2, 4), 5)),
        ("( 2, 4, )", DeviceMesh.arange((2, 4), 5)),
        ("(3)", DeviceMesh.arange((3,), 5)),
        ("(2,4)+8", DeviceMesh.arange((2, 4), 8)),
        ("(2,4) + 0", DeviceMesh.arange((2, 4))),
        ("[[0,3],[1,2]]", DeviceMesh([[0, 3], [1, 2]])),
    ],
)
def test_meshes(text, mesh):
    assert parse_mesh(text, start=5) == mesh


@given(st.data())
@hypothesis_settings(max_examples=50)
def test_layouts_round_trip(data):
    layout = data.draw(strategies.layouts(data.draw(strategies.shapes())))
    assert layout.mesh is not None
    nested = layout.mesh.ranks
    for extent in reversed(layout.mesh.shape[1:]):
        nested = [list(nested[i : i + extent]) for i in range(0, len(nested), extent)]
    text = f"{layout.spec}@{json.dumps(list(nested))}"
    found = parse_layout(text, layout.shape, uneven=layout.uneven)
    assert found.holders == layout.holders


@pytest.mark.parametrize(
    ("text", "kind", "place"),
    [
        ("S01R", LayoutError, 4),
        ("S01R@", MeshError, 5),
        ("S01R@2,4", MeshError, 5),
        ("S01R@(2;4)", MeshError, 7),
        ("S01R@(2,,4)", MeshError, 8),
        ("S01R@()", MeshError, 6),
        ("S01R@(2,4", MeshError, 9),
        ("S01R@(2,4)8", MeshError, 10),
        ("S01R@(2,4)+", MeshError, 11),
        ("S01R@(2,4)+x", MeshError, 11),
        ("S01R@(2,4)+8 9", MeshError, 13),
        ("S01R@[[0,1],[2,3]", MeshError, 17),
        ("S01R@[[0,1],[2,a]]", MeshError, 15),
        ("S01R@(9999,9999)", MeshError, 5),
        ("S0 Q@(2,4)", SpecError, 3),
    ],
)
def test_a_caret_points_at_what_cannot_be_read(text, kind, place):
    with pytest.raises(kind) as caught:
        parse_layout(text, (8, 8))
    _, values, caret, *_ = str(caught.value).split("\n")
    assert values.startswith("  values:  S0")
    assert caret == " " * (11 + place) + "^"


@pytest.mark.parametrize(("text", "place"), [("8,,16", 2), ("8,a", 2), ("(8, -1)", 4), (",", 0)])
def test_a_caret_points_into_shapes(text, place):
    with pytest.raises(LayoutError) as caught:
        parse_shape(text)
    assert f"  values:  {text}\n{' ' * (11 + place)}^" in str(caught.value)


# --- xmesh layout ---------------------------------------------------------------------------------

PICTURE = """\
S0S1@(2,2), shape (3, 4): 4 distinct boxes on 4 ranks

        0:2      2:4
     ┌────────┬────────┐
     │        │        │
 0:2 │   4    │   5    │
     ├────────┼────────┤
 2:3 │   6    │   7    │
     └────────┴────────┘

  rank  (dp,tp)  box         local shape
     4  (0, 0)   [0:2, 0:2]  (2, 2)
     5  (0, 1)   [0:2, 2:4]  (2, 2)
     6  (1, 0)   [2:3, 0:2]  (1, 2)
     7  (1, 1)   [2:3, 2:4]  (1, 2)
"""


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    """No colours, and a terminal of known width, whatever runs the tests."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def test_layout(capsys):
    out = printed(
        capsys, "layout", "S{dp}S{tp}@(2,2)", "--shape=3,4", "--axis-names=dp,tp", "--start=4"
    )
    assert out == PICTURE


def test_replicas_and_one_dimension(capsys):
    out = printed(capsys, "layout", "S1@[[0,1],[2,3],[5,7]]", "--shape=8")
    assert "│     0,2,5      │     1,3,7      │" in out


def test_scalar(capsys):
    assert "│ 0-3 │" in printed(capsys, "layout", "@(4)", "--shape=()")


def test_no_elements(capsys):
    assert "no rank holds an element" in printed(capsys, "layout", "S0R@(2)", "--shape=0,3")


def test_a_slice_of_more_dimensions(capsys):
    argv = ["layout", "S0RS1@(2,2)", "--shape=4,6,4", "--dims=1,2", "--fix", "0=2"]
    out = printed(capsys, *argv)
    assert "drawn: [2, :, :], dimension 1 down, 2 across" in out
    assert "│   2    │   3    │" in out
    assert "│   0    │   1    │" not in out


def test_uneven_rules(capsys):
    assert "[8:10]  (2,)" in printed(capsys, "layout", "S0@(4)", "--shape=10", "--uneven=balanced")
    assert "[9:10]  (1,)" in printed(capsys, "layout", "S0@(4)", "--shape=10", "--uneven=ceil")


def test_what_does_not_fit_is_left_out(capsys):
    out = printed(capsys, "layout", "S0S1@(40,40)", "--shape=1000,1000")
    assert "0:25   25:50 " in out
    assert "975:1000" in out
    assert "│...│" in out
    assert "... 1,560 more (--all lists them)" in out
    assert max(map(len, out.splitlines())) <= 80
    out = printed(capsys, "layout", "S0S1@(40,40)", "--shape=1000,1000", "--all")
    assert "  1599  (39, 39)" in out


def test_colour(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    argv = ["layout", "S0S1@(2,2)", "--shape=2,2"]
    coloured = printed(capsys, *argv)
    backgrounds = {part.split("m")[0] for part in coloured.split("\x1b[30;48;")[1:]}
    assert len(backgrounds) == 4
    assert "\x1b" not in printed(capsys, *argv, "--no-color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(capsys, *argv)


@given(st.data())
@hypothesis_settings(max_examples=60)
def test_every_layout_can_be_drawn(data):
    shape = data.draw(strategies.shapes())
    layout = data.draw(strategies.layouts(shape))
    dims = data.draw(st.permutations(range(len(shape))))[:2]
    at = {d: data.draw(st.integers(0, max(0, n - 1))) for d, n in enumerate(shape) if d not in dims}
    width = data.draw(st.integers(20, 120))
    lines = ["".join(p.text for p in line) for line in picture(layout, dims, at, width, ASCII)]
    assert 0 not in shape or lines == ["  no rank holds an element"]
    assert len({len(line) for line in lines[1:]}) <= 1
    assert len(rank_table(layout, None)) == 1 + len(layout.ranks)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--fix", "1=0"], "--fix 1=0"),
        (["--fix", "2=9"], "--fix gives an index of a dimension that is not drawn"),
        (["--fix", "2"], "write --fix 2=3"),
        (["--fix", "x=1"], "'x' in --fix x=1"),
        (["--dims", "0"], "a picture has two different dimensions"),
        (["--dims", "1,1"], "a picture has two different dimensions"),
        (["--dims", "0,3"], "give an index from 0 to 2"),
        (["--axis-names", "a"], "one name for each of its 2 axes"),
        (["--start", "-1"], "a rank is an int >= 0"),
    ],
)
def test_layout_errors(capsys, argv, text):
    assert text in failed(capsys, "layout", "S0S1R@(2,2)", "--shape=4,4,4", *argv)


def test_a_start_given_twice(capsys):
    assert "given once" in failed(capsys, "layout", "R@(2)+3", "--shape=4", "--start=3")


# --- xmesh plan, xmesh simulate -------------------------------------------------------------------

PLAN = ["plan", "S0R@(2,2)", "RS0@(2,2)", "--shape=8,6", "--ranks-per-host=2"]


def expected_plan(**options):
    return plan(
        Layout(DeviceMesh.arange((2, 2)), "S0R", (8, 6)),
        Layout(DeviceMesh.arange((2, 2), 4), "RS0", (8, 6)),
        topology=Topology.uniform(8, 2),
        **options,
    )


def test_plan(capsys):
    assert printed(capsys, *PLAN) == f"{expected_plan()}\n"


def test_plan_options(capsys, tmp_path):
    cost = tmp_path / "cost.json"
    cost.write_text('{"nic_bandwidth_Bps": 5e8, "nic_latency_s": 0.0}')
    argv = ["--dtype=bfloat16", "--strategy=send_recv", "--scheduler=greedy", "--seed=7"]
    out = printed(capsys, *PLAN, *argv, f"--cost={cost}", "--json")
    assert Plan.from_json(out) == expected_plan(
        dtype="bfloat16",
        strategy="send_recv",
        scheduler="greedy",
        seed=7,
        cost=CostModel(nic_bandwidth_Bps=5e8, nic_latency_s=0.0),
    )


def test_json_round_trip(capsys):
    out = printed(capsys, *PLAN, "--json")
    assert Plan.from_json(out) == expected_plan()
    assert json.loads(out)["strategy"] == expected_plan().strategy


def test_json_alone_on_stdout(capsys):
    assert main([*PLAN, "--json", "--simulate"]) == 0
    out, err = capsys.readouterr()
    assert Plan.from_json(out) == expected_plan()
    assert err.startswith("  simulated ")


def test_simulate(capsys, tmp_path):
    out = printed(capsys, *PLAN, "--simulate")
    simulated = out.splitlines()[-1].split(" with")[0]
    assert simulated.startswith("  simulated ")
    path = tmp_path / "plan.json"
    path.write_text(printed(capsys, *PLAN, "--json"))
    out = printed(capsys, "simulate", str(path))
    assert out.splitlines()[1].startswith(simulated)
    assert "between hosts" in out


def test_meshes_of_a_plan(capsys):
    def ranks(src, dst):
        out = printed(capsys, "plan", src, dst, "--shape=8,6", "--json")
        made = Plan.from_json(out)
        return made.src.ranks, made.dst.ranks

    assert ranks("S0R@(2)", "RR@(2)") == ((0, 1), (2, 3))
    assert ranks("S0R@(2)+3", "RR@(2)") == ((3, 4), (5, 6))
    assert ranks("S0R@(2)", "RR@(2)+0") == ((0, 1), (0, 1))
    assert ranks("S0R@[7,2]", "RR@(2)") == ((7, 2), (8, 9))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["plan", "S0R@(2", "RR@(2)", "--shape=4,4"], "values:  S0R@(2\n                 ^"),
        (["plan", "S0R@(2)", "RR@(2)", "--shape=4"], "shape (4,) has 1"),
        (["plan", "S0R@(2)", "RR@(2)", "--shape=4,4", "--dtype=nope"], "dtype must be one"),
        (["plan", "S0R@(2)", "RR@(2)", "--shape=4,4", "--ranks-per-host=0"], "ints >= 1"),
        (["plan", "S0R@(2)", "RR@(2)", "--shape=4,4", "--cost=/nowhere.json"], "/nowhere.json"),
        (["simulate", "/nowhere.json"], "a plan is read from a file that can be read"),
        (["bench", "nope"], "an experiment must be one that there is"),
    ],
)
def test_errors(capsys, argv, text):
    assert text in failed(capsys, *argv)


@pytest.mark.parametrize("data", ["[1]", "{", '{"nic": 3}', '{"nic_latency_s": "fast"}'])
def test_cost_files(capsys, tmp_path, data):
    path = tmp_path / "cost.json"
    path.write_text(data)
    text = failed(capsys, *PLAN, f"--cost={path}")
    assert "a cost model is a JSON object of numbers" in text
    assert str(path) in text


def test_a_file_that_is_no_plan(capsys, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{}")
    assert "text must be a plan" in failed(capsys, "simulate", str(path))


# --- xmesh doctor ---------------------------------------------------------------------------------

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mpi4py":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""
DOCTOR = "import sys\nfrom xmesh.cli import main\nsys.exit(main({argv!r}))"
NO_LAUNCHER = dict.fromkeys(doctor._LAUNCHER_VARIABLES)


DOUBLE = {"PYTHONPATH": str(ROOT / "tests" / "double")}


def doctor_run(code, **env):
    env = {k: v for k, v in os.environ.items() if k not in NO_LAUNCHER} | env
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (child.returncode, child.stderr) == (0, "")
    return child.stdout


def test_doctor_without_mpi4py():
    text = doctor_run(BLOCK + DOCTOR.format(argv=["doctor"]))
    assert "mpi4py is not installed" in text
    assert "pip install 'xmesh[mpich]'" in text
    report = json.loads(doctor_run(BLOCK + DOCTOR.format(argv=["doctor", "--json"])))
    assert report["would_use"]["transport"].startswith("loopback")
    assert len(report["ranks"]) == 1
    assert report["ranks"][0]["gpu"]["cuda_aware_mpi"] == {"aware": None, "why": "no MPI"}


def test_doctor_with_mpi4py():
    pytest.importorskip("mpi4py")
    report = json.loads(doctor_run(DOCTOR.format(argv=["doctor", "--json"])))
    assert report["mpi"]["ranks"] == 1
    assert report["mpi"]["tag_ub"] >= 32767  # the least that MPI allows
    assert report["mpi"]["thread_level"] == "multiple"
    assert report["would_use"]["transport"].startswith("mpi with one rank")
    assert report["hosts"]["shared_memory"] == [[0, [0]]]
    assert report["would_use"]["topology"].startswith("1 ranks on 1 hosts")
    assert report["differences"] == []


def test_doctor_survives_an_mpi_that_kills_its_process(monkeypatch, tmp_path):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "MPI.py").write_text(
        "import os, sys\nprint('no such fabric', file=sys.stderr, flush=True)\nos.abort()\n"
    )
    path = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = json.loads(doctor_run(path + DOCTOR.format(argv=["doctor", "--json"])))
    assert "exit status -6: no such fabric" in report["mpi"]["missing"]
    assert report["would_use"]["transport"].startswith("loopback")


def rank_report(rank, **changes):
    return {
        "rank": rank,
        "xmesh": "1",
        "python": "3.12.0",
        "numpy": "2.0",
        "mpi4py": "4.1",
        "host_name": "a",
        "processor_name": "a",
        "shared_memory_leader": 0,
        "slurm_hosts": None,
        "cores": [0, 1],
        "gpu": gpu_of(),
    } | changes


def gpu_of(**changes):
    """What a rank says that has a GPU and everything for it."""
    return {
        "device_files": 1,
        "device": {
            **{"name": "G", "ordinal": 0, "visible": 1, "pci_bus_id": "0000:3B:00.0"},
            **{"free_nbytes": 2**30, "total_nbytes": 2**31},
        },
        "cupy": {"version": "14"},
        "nccl": {"runtime": "2.27.3", "build": "2.25.1", "can_split": True},
        "wheels": {},
        "cuda_aware_mpi": {"aware": False, "why": "MPIX_Query_cuda_support says no"},
        "hints": {},
    } | changes


def test_hosts_from_three_sources():
    names = ["n1", "n1", "n2", "n2"]
    everyone = [
        rank_report(r, slurm_hosts=names, shared_memory_leader=r // 2 * 2) for r in range(4)
    ]
    assert doctor.hosts_seen(everyone) == {
        "shared_memory": [(0, [0, 1]), (2, [2, 3])],
        "processor_name": [("a", [0, 1, 2, 3])],
        "slurm": [("n1", [0, 1]), ("n2", [2, 3])],
    }
    assert "hosts for 4 ranks, but there are 3" in doctor.hosts_seen(everyone[:3])["slurm"]


def test_oversubscription():
    (row,) = doctor.cores_seen([rank_report(r) for r in range(4)])
    assert (row["cores"], row["ranks_per_core"], row["oversubscribed"]) == (2, 2.0, True)
    (row,) = doctor.cores_seen([rank_report(r, cores=[2 * r, 2 * r + 1]) for r in range(4)])
    assert (row["cores"], row["oversubscribed"]) == (8, False)
    (row,) = doctor.cores_seen([rank_report(0, cores="unknown: why")])
    assert (row["cores"], row["ranks_per_core"]) == ("unknown: why", None)


def test_ranks_that_differ_are_named():
    everyone = [rank_report(0), rank_report(1, numpy="1.26"), rank_report(2)]
    assert doctor.differences(everyone) == ["numpy: 2.0 on ranks 0,2; 1.26 on rank 1"]


def test_a_launcher_of_another_mpi_is_recognised():
    text = doctor.transport_use(object(), "", {"PMI_SIZE": "4"}, 1)
    assert "another MPI than mpi4py's" in text
    text = doctor.transport_use(object(), "", {"PMI_SIZE": "4"}, 4)
    assert text == "mpi: 4 ranks in MPI_COMM_WORLD"


# --- xmesh doctor: GPUs ---------------------------------------------------------------------------

NO_CUPY = """
import sys
class NoCupy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cupy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoCupy())
"""


def test_doctor_without_cupy():
    report = json.loads(doctor_run(NO_CUPY + DOCTOR.format(argv=["doctor", "--json"])))
    gpu = report["ranks"][0]["gpu"]
    assert "CuPy is not installed" in gpu["cupy"]["missing"]
    assert gpu["device"] == gpu["nccl"] == gpu["cupy"]
    assert report["would_use"]["device_arrays"].startswith("none: ")
    assert not report["would_use"]["nccl"]["usable"]


def test_doctor_without_a_gpu():
    code = DOCTOR.format(argv=["doctor", "--json"])
    report = json.loads(doctor_run(code, **DOUBLE, DOUBLE_DEVICES="0"))
    gpu = report["ranks"][0]["gpu"]
    assert gpu["cupy"] == {"version": "14.2.0"}
    assert "cudaErrorNoDevice" in gpu["device"]["missing"]
    assert report["would_use"]["device_arrays"].startswith("none: cudaErrorNoDevice")


def test_doctor_with_a_gpu():
    pytest.importorskip("mpi4py")
    code = DOCTOR.format(argv=["doctor", "--json"])
    report = json.loads(doctor_run(code, **DOUBLE, XMESH_CUDA_AWARE="1"))
    gpu = report["ranks"][0]["gpu"]
    assert (gpu["device"]["name"], gpu["device"]["ordinal"]) == ("Double of a GPU", 0)
    assert 0 < gpu["device"]["free_nbytes"] <= gpu["device"]["total_nbytes"]
    assert gpu["nccl"]["can_split"]
    assert gpu["cuda_aware_mpi"] == {"aware": True, "why": "XMESH_CUDA_AWARE=1"}
    use = report["would_use"]
    assert use["nccl"]["usable"]
    assert use["device_arrays"].startswith("nccl where all ranks say like=, because NCCL ")
    assert use["device_arrays"].endswith(
        "else mpi, device pointers given to it, because XMESH_CUDA_AWARE=1"
    )
    report = json.loads(doctor_run(code, **DOUBLE, XMESH_CUDA_AWARE="maybe"))
    aware = report["ranks"][0]["gpu"]["cuda_aware_mpi"]
    assert aware["aware"] is None
    assert "must be 0, 1 or auto" in aware["why"]
    text = doctor_run(DOCTOR.format(argv=["doctor"]), **DOUBLE, XMESH_CUDA_AWARE="0")
    assert "Double of a GPU, device 0 of 1 (PCI 0000:3B:00.0), 1.0 GiB" in text
    assert "CUDA-aware MPI  no: XMESH_CUDA_AWARE=0" in text


def test_doctor_of_ranks_that_share_a_gpu():
    pytest.importorskip("mpi4py")
    try:
        launcher = Launcher.find()
    except XmeshError as error:
        pytest.skip(str(error))
    environ = {k: v for k, v in os.environ.items() if k not in NO_LAUNCHER}
    child = subprocess.run(
        launcher.command(2, ["-m", "xmesh", "doctor", "--json"]),
        cwd=ROOT,
        env={**environ, **DOUBLE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    (row,) = report["shared_gpus"]
    assert (row["pci_bus_id"], row["ranks"]) == ("0000:3B:00.0", [0, 1])
    assert (
        "not nccl, because ranks 0,1 share GPU 0000:3B:00.0"
        in (report["would_use"]["device_arrays"])
    )


def test_an_mpi_that_dies_of_device_pointers_is_tried_elsewhere():
    pytest.importorskip("mpi4py")
    environ = {**os.environ, **DOUBLE}
    assert "status -11" in doctor_gpu.try_elsewhere(0, environ)
    assert doctor_gpu.try_elsewhere(0, {**environ, "DOUBLE_CUDA_AWARE": "1"}) == ""
    with pytest.raises(doctor_gpu.NotTriedError, match="cudaErrorNoDevice"):
        doctor_gpu.try_elsewhere(0, {**environ, "DOUBLE_DEVICES": "0"})


def test_why_nccl_is_used_or_not():
    def use(*gpus):
        return doctor_gpu.device_use([rank_report(r, gpu=gpu) for r, gpu in enumerate(gpus)], True)

    other = gpu_of(device=gpu_of()["device"] | {"pci_bus_id": "0000:5E:00.0"})
    found = use(gpu_of(), other)
    assert found["nccl"] == {
        "usable": True,
        "why": "NCCL 2.27.3 is there and each rank has a GPU of its own",
    }
    assert found["device_messages"] == [
        {"way": "staged", "why": "MPIX_Query_cuda_support says no", "ranks": [0, 1]}
    ]
    found = use(gpu_of(), other | {"nccl": {"missing": "no libnccl"}})
    assert found["nccl"] == {"usable": False, "why": "rank 1: no libnccl"}
    lacks = {"missing": "no device"}
    found = use(gpu_of(), gpu_of(device=lacks))
    assert found["device_arrays"] == (
        "mpi, rank 0: staged through pinned memory, because MPIX_Query_cuda_support says no; "
        "rank 1: no device arrays, because no device; not nccl, because rank 1: no device"
    )
    nothing = gpu_of(device_files=0, device=lacks, cupy=lacks, nccl=lacks)
    assert use(nothing, nothing)["device_arrays"] == "none: no device"


def test_ranks_with_alike_gpus_are_one_line():
    free = gpu_of()["device"] | {"free_nbytes": 2**29}
    everyone = [rank_report(0, gpu=gpu_of()), rank_report(1, gpu=gpu_of(device=free))]
    texts = doctor_text._gpu_texts({"ranks": everyone, "shared_gpus": []})
    assert texts["ranks 0,1"] == "G, device 0 of 1 (PCI 0000:3B:00.0), 2.0 GiB, 0.5 to 1.0 free"
    assert texts["CuPy"] == "14"
    everyone[1] = rank_report(1, gpu=gpu_of(cupy={"version": "13"}))
    texts = doctor_text._gpu_texts({"ranks": everyone, "shared_gpus": []})
    assert texts["CuPy"] == "rank 0: 14; rank 1: 13"
    assert doctor.differences(everyone) == ["CuPy: 14 on rank 0; 13 on rank 1"]


# --- The documents --------------------------------------------------------------------------------


def examples():
    """Commands in docs/algorithm.md, each with the lines that it is said to print."""
    found: list[tuple[str, list[str]]] = []
    inside = False
    for line in (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = line == "```console"
        elif inside and line.startswith("$ xmesh "):
            found.append((line.removeprefix("$ xmesh "), []))
        elif inside:
            found[-1][1].append(line)
    return found


@pytest.mark.parametrize(("command", "lines"), examples())
def test_the_documents_tell_the_truth(capsys, command, lines):
    out = iter(printed(capsys, *shlex.split(command)).splitlines())
    assert lines
    for line in lines:
        assert line in out, f"not printed, or not in this place: {line}"
