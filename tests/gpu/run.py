"""The tests of a machine with one GPU: `make test-gpu`.

    python tests/gpu/run.py                    on its GPU, with the CuPy that is installed
    python tests/gpu/run.py --double           the same tests on the double of CuPy, with no GPU
    python tests/gpu/run.py --only ranks -- -k slow

On the double all of them run, but for what needs a GPU to mean anything: an array beyond 2 GiB is a
small one there, the GPT computes on stand-ins (gpu/test_gpt_on_device.py), and speed is nobody's
subject. tests/test_gpu_runner.py does that in every `make test`. What follows `--` goes to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import mpi_guard  # noqa: E402  # found by the path above

RANKS = "2,4"
DOUBLE = str(TESTS / "double")
_LOOK = """
import cupy
count = cupy.cuda.runtime.getDeviceCount()
name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
print(f"CuPy {cupy.__version__}, {count} GPU(s), the first of them {name}")
"""


def cupy_here() -> tuple[str, str]:
    """The CuPy and the GPU, in words, and what is wrong where there are none."""
    done = subprocess.run(
        [sys.executable, "-c", _LOOK], capture_output=True, text=True, check=False
    )
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return done.stdout.strip(), last if done.returncode else ""


def prepare(double: bool, cache: str) -> None:
    """Set what all processes below this one are to see."""
    os.environ["XMESH_TEST_GPU"] = "double" if double else "1"
    path = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    # The first test on a GPU also makes contexts, and compiles what CuPy needs.
    os.environ.setdefault("XMESH_TEST_TIMEOUT_S", "60" if double else "300")
    if double:
        os.environ["DOUBLE_CACHE"] = cache
        path.insert(0, DOUBLE)
    else:
        path = [part for part in path if part != DOUBLE]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


def pytest_here(places: Sequence[str], extra: Sequence[str]) -> bool:
    """Tests of one process."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=300", *places, *extra]
    status = subprocess.run(command, cwd=TESTS.parent, stdin=subprocess.DEVNULL).returncode
    return status == 0 or (status == 5 and bool(extra))


def pytest_on_ranks(n: int, aware: str, double: bool, extra: Sequence[str]) -> bool:
    """Tests of ranks that share the GPU."""
    os.environ["XMESH_CUDA_AWARE"] = aware
    os.environ["DOUBLE_CUDA_AWARE"] = "0" if aware == "0" else "1"
    if double and aware == "auto":
        os.environ["XMESH_CUDA_AWARE"] = "1"  # its device pointers are those of the host then
    command = ["-m", "pytest", "-q", "--with-mpi", "--no-summary"]
    command += ["-p", "no:cacheprovider", "-p", "no:timeout", "tests/gpu/ranks", *extra]
    result = mpi_guard.run_mpi(n, command, 600)
    return result.ok or (result.empty and bool(extra))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog="-- ARGS")
    parser.add_argument("--double", action="store_true", help="on the double of CuPy")
    parser.add_argument("--only", choices=["single", "ranks", "device"], help="this part alone")
    parser.add_argument("--ranks", default=RANKS, help=f"numbers of ranks ({RANKS})")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    options, extra = parser.parse_args(words[:at]), words[at + 1 :]
    mpi_guard.interrupt_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="xmesh-gpu-") as cache:
        prepare(options.double, cache)
        found, trouble = cupy_here()
        if trouble:
            print(
                f"no GPU that CuPy can use: {trouble}\n"
                "install CuPy (make test-gpu CUPY=cupy-cuda12x) and look at nvidia-smi; the same "
                "tests run without a GPU by: python tests/gpu/run.py --double",
                file=sys.stderr,
            )
            return 2
        print(found, flush=True)
        return run(options, extra)


def run(options: argparse.Namespace, extra: Sequence[str]) -> int:
    """All steps; the exit status."""
    steps: list[tuple[str, str, Callable[[], bool]]] = [
        ("single", "one process", partial(pytest_here, ["tests/gpu"], extra))
    ]
    for n in map(int, options.ranks.split(",")):
        for aware, name in (("0", "staged"), ("auto", "CUDA-aware, if MPI is")):
            on_ranks = partial(pytest_on_ranks, n, aware, options.double, extra)
            steps.append(("ranks", f"{n} ranks on one GPU, {name}", on_ranks))
    if not options.double:  # else `make test` has them
        places = ["tests/device", "--ignore=tests/device/mpi"]
        steps.append(("device", "tests/device", partial(pytest_here, places, extra)))
    failed = []
    for part, name, step in steps:
        if options.only in (None, part):
            print(f"== {name}", flush=True)
            began_s = time.monotonic()
            ok = step()
            took_s = time.monotonic() - began_s
            print(f"== {name}: {'ok' if ok else 'FAILED'}, {took_s:.1f} s\n", flush=True)
            failed += [] if ok else [name]
    print("FAILED: " + "; ".join(failed) if failed else "all ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
