"""The programs in examples/ run, and say that what they computed is right."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xmesh.errors import XmeshError
from xmesh.mpiexec import Launcher, run_ranks

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        Launcher.find()
    except XmeshError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))
    parts = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(parts))


def run(count: int, name: str, *words: str) -> str:
    lines: list[str] = []
    argv = [str(EXAMPLES / name), *words]
    status = run_ranks(count, argv, on_line=lines.append, timeout_s=TIMEOUT_S, import_from=ROOT)
    text = "\n".join(lines)
    assert status == 0, text
    return text


def alone(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_every_example_is_tested_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "reshard.py",
        "coupled_heat.py",
        "jax_pipeline.py",
        "torch_pipeline.py",
    }


@pytest.mark.parametrize("count", [2, 4, 5])
def test_reshard(count):
    text = run(count, "reshard.py")
    half = count // 2
    assert f"S0R@({half}) -> RS0@({count - half})" in text
    assert len(re.findall(r"^rank \d+ sent rows", text, re.MULTILINE)) == half
    received = re.findall(r"^rank \d+ has columns .* every element right$", text, re.MULTILINE)
    assert len(received) == count - half
    assert "WRONG" not in text


# 3 ranks: one analyst, which turns its field without a message; 5: uneven rows and columns.
@pytest.mark.parametrize("count", [3, 5, 6])
def test_coupled_heat_equals_one_process(count):
    text = run(count, "coupled_heat.py", "--steps", "12", "--size", "33", "--every", "5")
    assert [int(step) for step in re.findall(r"step +(\d+) of 12", text)] == [0, 5, 10]
    found = re.search(r"3 spectra, largest relative difference to one process: (\S+): equal", text)
    assert found is not None, text
    assert float(found.group(1)) < 1e-12
    assert "the solver waited" in text


# 3 ranks: one in the first stage, and uneven points in the second.
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("library", "title"), [("jax", "JAX"), ("torch", "PyTorch")])
def test_pipelines_of_other_libraries_equal_one_process(library, title, count):
    text = run(count, f"{library}_pipeline.py", "--steps", "20")
    if importlib.util.find_spec(library) is None:
        assert text == f"skipped, as this example needs {title}: pip install {library}"
        pytest.skip(f"{library} is not installed")
    losses = [float(loss) for loss in re.findall(r"of 20: loss (\S+)", text)]
    assert losses[-1] < losses[0]
    assert re.search(r"difference to one process: losses \S+, weights \S+: equal", text), text


SMALL_UNET = ["--side", "8", "--width", "4", "--layers", "4", "--heads", "2", "--images", "8"]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, []),
        (2, ["--schedule", "gpipe"]),
        (4, ["--schedule", "eager-1f1b", "--weight-delay"]),
        (4, ["--schedule", "zb-h1", "--ranks", "1x2,2"]),
    ],
)
def test_unet_equals_one_process(count, words):
    words = [*SMALL_UNET, "--steps", "3", "--dtype", "float64", "--check", *words]
    text = run(count, "unet/train.py", *words)
    assert "step    3 of 3: loss" in text
    assert re.search(r"to one process: losses \S+, gradients \S+: equal", text), text


def test_unet_resumes(tmp_path):
    words = [*SMALL_UNET, "--steps"]
    straight = run(2, "unet/train.py", *words, "6", "--checkpoint", str(tmp_path / "other"))
    run(2, "unet/train.py", *words, "3", "--checkpoint", str(tmp_path))
    resumed = run(2, "unet/train.py", *words, "6", "--resume", str(tmp_path))
    assert resumed.splitlines() == straight.splitlines()[3:]


def test_unet_says_what_is_wrong():
    for words, said in (
        (["--layers", "3"], "layers must be even"),
        (["--ranks", "2,2"], "--ranks 2,2 does not make 2 ranks"),
        (["--ranks", "1,x"], "--ranks 1,x is not written as"),
        (["--images", "9"], "micro-batches must divide the images"),
        (["--resume", "/nonexistent"], "no checkpoint"),
    ):
        lines: list[str] = []
        argv = [str(EXAMPLES / "unet" / "train.py"), *words]
        assert run_ranks(2, argv, on_line=lines.append, timeout_s=TIMEOUT_S, import_from=ROOT) == 2
        assert said in "\n".join(lines)


@pytest.mark.parametrize("name", ["reshard.py", "coupled_heat.py"])
def test_started_without_mpiexec_they_say_how(name):
    ended = alone(name)
    assert ended.returncode != 0
    assert f"mpiexec -n {4 if name == 'reshard.py' else 6} python examples/{name}" in (
        ended.stdout + ended.stderr
    )


@pytest.mark.parametrize("count", [2, 4])
def test_a_program_ends_well_after_a_set_up_that_timed_out(count):
    """MPICH aborts in MPI_Finalize where messages on COMM_WORLD were never received."""
    lines: list[str] = []
    argv = [str(ROOT / "tests" / "guard_cases" / "late_rank.py")]
    status = run_ranks(count, argv, on_line=lines.append, timeout_s=TIMEOUT_S, import_from=ROOT)
    text = "\n".join(lines)
    assert status == 0, text
    assert f"all {count} ranks must call within 0.3 s" in text


# One process needs no mpiexec; interleaved stages on 2 ranks.
@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, ("--save-every", "2", "--untied")),
        (2, ("--pp", "2", "--weight-delay")),
        (2, ("--pp", "2", "--schedule", "interleaved-1f1b")),
        (4, ("--dp", "2", "--tp", "2")),
    ],
)
def test_gpt_equals_one_process_and_is_resumed(count, words, tmp_path):
    words = (*words, "--hidden", "16", "--sequence", "16", "--rows", "8", "--every", "1")
    words = (*words, "--dtype", "float64", "--check", "--checkpoint", str(tmp_path))
    texts = [run(count, "gpt/train.py", *words, "--steps", "3")]
    texts.append(run(count, "gpt/train.py", *words, "--steps", "5", "--resume", str(tmp_path)))
    line = re.compile(
        r"^step +(\d+)  loss (\S+)  differs .* loss (\S+), gradients (\S+) ", re.MULTILINE
    )
    found = [match for text in texts for match in line.findall(text)]
    assert [int(step) for step, *_ in found] == [0, 1, 2, 3, 4], texts
    losses = [float(loss) for _, loss, *_ in found]
    assert losses[-1] < losses[0] - 0.1
    assert all(max(float(a), float(b)) < 1e-5 for *_, a, b in found)


def test_gpt_says_what_it_cannot_run(tmp_path):
    for words, said in (
        (["--pp", "2"], "mpiexec -n 2 python examples/gpt/train.py"),
        (["--heads", "5"], "5 heads do not divide 64 features"),
        (["--rows", "7"], "4 micro-batches do not divide 7 rows"),
        (["--resume", str(tmp_path)], "latest.json"),
    ):
        ended = alone("gpt/train.py", *words)
        assert ended.returncode != 0
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr


def test_the_code_in_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program, loopback = tmp_path / "field.py", tmp_path / "loopback.py"
    program.write_text(blocks[0])
    loopback.write_text(f"{blocks[0].split('local = None')[0]}{blocks[1]}print(sorted(outputs))\n")
    for count, file, expected in (
        (4, program, "4 unit tasks in 4 transfers"),
        (1, loopback, "[2, 3]"),
    ):
        lines: list[str] = []
        status = run_ranks(
            count, [str(file)], on_line=lines.append, timeout_s=TIMEOUT_S, import_from=ROOT
        )
        text = "\n".join(lines)
        assert status == 0, text
        assert expected in text


def test_the_code_about_pipelines_runs(tmp_path):
    (block, *_) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "pipeline.md").read_text(), re.DOTALL
    )
    program = tmp_path / "doubles.py"
    program.write_text(block)
    lines: list[str] = []
    status = run_ranks(
        2, [str(program)], on_line=lines.append, timeout_s=TIMEOUT_S, import_from=ROOT
    )
    text = "\n".join(lines)
    assert status == 0, text
    # 24 elements, times 2, times 3; the first weight's gradient is 3 * 24 * (0 + 1 + 2 + 3) / 4.
    assert re.search(r"0\.0.*144\.0.*288\.0.*432\.0", text)
    assert "{0: {'w': array(108.)}}" in text
