"""`import xmesh` and the planning commands must touch no MPI or GPU library, installed or not."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("mpi4py", "cupy", "torch", "jax", "matplotlib")

# A finder ahead of all others sees every attempt, also one that is caught because the library is
# not installed.
WATCH = f"""
import sys, json
class Watch:
    seen = set()
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            self.seen.add(name.partition(".")[0])
sys.meta_path.insert(0, Watch())
def report():
    print("\\n" + json.dumps(sorted(Watch.seen)))
"""

COMMAND = """
import contextlib, io
from xmesh.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    try:
        status = main({argv!r})
    except SystemExit as stop:
        status = stop.code
if status not in (0, None):
    sys.exit(f"status {{status}}")
"""


def heavy_imports(code, root=ROOT):
    """Which heavy libraries a fresh interpreter tries to import while it runs the code."""
    child = subprocess.run(
        [sys.executable, "-c", f"{WATCH}\n{code}\nreport()"],
        cwd=root,  # first on the path of `python -c`
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def test_import_is_light():
    assert heavy_imports("import xmesh") == []


def test_pipelines_are_planned_without_mpi():
    code = "from xmesh.pipeline import schedule; schedule('zb-h1', 2, 4).simulate()"
    assert heavy_imports(code) == []


@pytest.mark.skipif(importlib.util.find_spec("xmesh.cli") is None, reason="no command line yet")
@pytest.mark.parametrize("command", ["layout", "plan", "simulate", "pipeline"])
def test_planning_commands_are_light(command):
    assert heavy_imports(COMMAND.format(argv=[command, "--help"])) == []


@pytest.mark.parametrize(
    ("line", "library"),
    [
        ("import mpi4py", "mpi4py"),
        ("from mpi4py import MPI", "mpi4py"),
        ("try:\n    import cupy\nexcept ImportError:\n    pass", "cupy"),
    ],
)
def test_the_check_can_fail(tmp_path, line, library):
    copy = tmp_path / "xmesh"
    shutil.copytree(ROOT / "xmesh", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "offender.py").write_text(line + "\n")
    with open(copy / "__init__.py", "a") as file:
        file.write("\nfrom xmesh import offender\n")
    assert heavy_imports("import xmesh", tmp_path) == [library]
