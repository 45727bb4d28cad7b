"""`make test-gpu` and `make bench-gpu` on the double of CuPy: they work before a GPU is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xmesh.errors import XmeshError
from xmesh.mpiexec import Launcher

ROOT = Path(__file__).resolve().parent.parent


def run(*argv, program="tests/gpu/run.py", **environment):
    pytest.importorskip("mpi4py")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "XMESH_TEST_"))}
    return subprocess.run(
        [sys.executable, program, *argv],
        cwd=ROOT,
        env={**environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.timeout(300)
def test_all_of_it_on_the_double():
    done = run("--double", "--ranks=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all ok\n")
    assert "skipped" not in done.stdout
    assert done.stdout.count(" passed in ") == 3


def test_without_cupy_it_says_what_to_do(tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('no CuPy here')\n")
    done = run(PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no GPU that CuPy can use: ImportError: no CuPy here" in done.stderr
    assert "make test-gpu CUPY=cupy-cuda12x" in done.stderr


def test_the_benchmark_runs_and_gives_no_verdict_on_the_double():
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "double")])
    done = run("--quick", program="benchmarks/gpu.py", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "Packing on the GPU" in done.stdout
    assert "A call between 2 ranks on one GPU" in done.stdout
    assert "No verdict: this CuPy is the double" in done.stdout


@pytest.mark.parametrize(
    ("document", "ranks", "said"),
    [
        ("README.md", 2, "524288.0 by mpi because"),
        ("docs/gpu.md", 4, "by mpi because NCCL cannot be used"),
    ],
)
def test_the_code_in_the_documents_runs(tmp_path, document, ranks, said):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "import cupy" in block)
    program = tmp_path / "program.py"
    program.write_text(block)
    try:
        words = Launcher.find().command(ranks, [str(program)])
    except XmeshError as error:
        pytest.skip(str(error))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "double")])
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": path, "DOUBLE_CACHE": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
