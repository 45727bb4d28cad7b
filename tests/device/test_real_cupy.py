"""What the double has and what xmesh uses is in the real CuPy, with the same parameters.

Each CuPy is described in a process of its own, for only one can have that name. The real one needs
no GPU for that. It is in no environment that xmesh is tested in: .ci/run makes some for this file,
and sets XMESH_REAL_CUPY=1, so that nothing is skipped there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cupy_uses
import pytest

from xmesh.device.copy_kernel import SOURCE

HERE = Path(__file__).resolve().parent
DOUBLE = HERE.parent / "double"

#: Parameters that CuPy 13 lacks; the double refuses them where it stands for CuPy 13.
SINCE_14 = {
    *(("cuda.Stream", "priority"), ("cuda.stream.Stream", "priority")),
    ("cuda.nccl.NcclCommunicator", "config"),
}

#: Names of CuPy 14 that xmesh uses where they are there.
USED_SINCE_14 = {"cuda.Stream.from_external", "cuda.nccl.NcclCommunicator.commSplit"}

#: Nothing may be skipped.
MUST = os.environ.get("XMESH_REAL_CUPY") == "1"

#: CuPy has these names only where the library can be loaded.
NCCL = "cuda.nccl."


def environment(*, double):
    """Of a process that finds the double, as a version of CuPy, or for None the real one."""
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [entry for entry in path if Path(entry).resolve() != DOUBLE]
    return {
        **os.environ,
        "DOUBLE_CUPY_VERSION": double or "",
        "PYTHONPATH": os.pathsep.join([str(DOUBLE), *path] if double else path),
    }


def describe(*, double):
    """The names of a CuPy, as describe_cupy.py prints them; None where it is not installed."""
    done = subprocess.run(
        [sys.executable, str(HERE / "describe_cupy.py"), *(["--own"] if double else [])],
        env=environment(double=double),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 3:
        return None
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def real():
    described = describe(double=None)
    if described is None:
        if MUST:
            pytest.fail("XMESH_REAL_CUPY=1, and there is none")
        pytest.skip("cupy is not installed")
    return described


def differences(ours, theirs):
    """What is wrong with the double's names, as text."""
    is_13 = theirs["__version__"].startswith("13.")
    has_nccl = bool(theirs["names"].get(f"{NCCL}available", {}).get("value"))
    for name, mine in ours["names"].items():
        if name.startswith(NCCL) and not has_nccl and not MUST:
            continue
        if name not in theirs["names"]:
            if not in_docstring(theirs["names"], name):
                yield f"{name} is not in CuPy {theirs['__version__']}"
            continue
        other = theirs["names"][name]
        if mine["callable"] and not other["callable"]:
            yield f"{name} can be called, and CuPy's cannot"
        if isinstance(mine["value"], int) and mine["value"] != other["value"]:
            yield f"{name} is {mine['value']}, and CuPy's is {other['value']}"
        if mine["parameters"] is None or other["parameters"] is None:
            continue
        later = {parameter for place, parameter in SINCE_14 if place == name and is_13}
        parameters = [each for each in mine["parameters"] if each["name"] not in later]
        yield from _parameters(name, parameters, other["parameters"])


def in_docstring(names, name):
    """What CuPy's Python classes give their objects is there alone."""
    holder, _, attribute = name.rpartition(".")
    return f".{attribute} (" in names.get(holder, {}).get("doc", "")


def _parameters(name, mine, theirs):
    """A call that the double takes must mean the same to CuPy, so ours may be fewer."""
    mine = [each for each in mine if not each["name"].startswith("_")]  # of the double itself
    by_name = {each["name"]: each for each in theirs}
    positional = [each["name"] for each in theirs if each["kind"] == "positional"]
    open_ended = {each["kind"] for each in theirs}
    for index, each in enumerate(mine):
        other = by_name.get(each["name"])
        what = f"parameter {each['name']} of {name}"
        if each["kind"] in ("*", "**"):
            if each["kind"] not in open_ended:
                yield f"CuPy has no {what}"
        elif other is None:
            if "**" not in open_ended:
                yield f"CuPy has no {what}"
        elif each["kind"] == "positional" and positional[index : index + 1] != [each["name"]]:
            yield f"{what} is at another place in CuPy"
        elif other["default"] not in (each["default"], "?"):
            yield f"{what} is {each['default']} by default, and {other['default']} in CuPy"
    wanted = {each["name"] for each in mine}
    for other in theirs:
        needed = other["kind"] in ("positional", "keyword") and other["default"] is None
        if needed and other["name"] not in wanted:
            yield f"{name} of CuPy needs {other['name']}"


def test_the_double_has_no_name_that_cupy_lacks(real):
    ours = describe(double=real["__version__"])
    assert len(ours["names"]) > 150
    assert list(differences(ours, real)) == []


def test_differences_are_found(real):
    ours = describe(double=real["__version__"])
    names = ours["names"]
    names["cuda.absent"] = names["cuda.alloc"]
    names["cuda.runtime.streamLegacy"]["value"] = 7
    names["cuda.memory.alloc"]["parameters"][0]["name"] = "nbytes"
    names["cuda.Event"]["parameters"].reverse()
    names["cuda.Event.record"]["parameters"][-1]["default"] = "0"
    found = "\n".join(differences(ours, real))
    for text in (
        "cuda.absent is not in CuPy",
        "streamLegacy is 7",
        "no parameter nbytes of cuda.memory.alloc",
        "parameter block of cuda.Event is at another place",
        "parameter stream of cuda.Event.record is 0 by default, and None in CuPy",
    ):
        assert text in found


def not_in(real, uses):
    """Uses that the real CuPy does not allow, as text."""
    names = real["names"]
    is_13 = real["__version__"].startswith("13.")
    has_nccl = bool(names.get(f"{NCCL}available", {}).get("value"))
    for use in uses:
        if (is_13 and use.name in USED_SINCE_14) or (
            use.name.startswith(NCCL) and not has_nccl and not MUST
        ):
            continue
        if use.name not in names:
            is_module = any(name.startswith(f"{use.name}.") for name in names)
            if not is_module and not in_docstring(names, use.name):
                yield f"{use.where}: CuPy {real['__version__']} has no {use.name}"
            continue
        parameters = names[use.name]["parameters"]
        if use.call is None or parameters is None:
            continue
        count, keywords = use.call
        places = [each for each in parameters if each["kind"] == "positional"]
        given = {each["name"] for each in places[:count]} | set(keywords)
        if count > len(places) and not any(each["kind"] == "*" for each in parameters):
            yield f"{use.where}: {use.name} takes {len(places)} arguments, and not {count}"
        for each in parameters:
            needed = each["kind"] in ("positional", "keyword") and each["default"] is None
            if needed and each["name"] not in given:
                yield f"{use.where}: {use.name} needs {each['name']}"
        known = {each["name"] for each in parameters}
        if not any(each["kind"] == "**" for each in parameters):
            for keyword in sorted(set(keywords) - known):
                yield f"{use.where}: {use.name} has no parameter {keyword}"


def all_uses():
    return [
        use
        for path in cupy_uses.sources()
        for use in cupy_uses.uses_of(path.read_text(), path.name)
    ]


def test_all_of_cupy_that_xmesh_uses_is_there(real):
    uses = all_uses()
    assert list(not_in(real, uses)) == []
    assert sum(use.call is not None for use in uses) > 40


def test_the_uses_are_found():
    found = {(use.name, use.call) for use in all_uses()}
    for name, call in (
        ("cuda.alloc_pinned_memory", (1, ())),
        ("cuda.Stream", (0, ("non_blocking",))),
        ("cuda.Event.record", (1, ())),
        ("cuda.runtime.memcpyAsync", (5, ())),
        ("cuda.runtime.CUDARuntimeError", None),
        ("cuda.nccl.NcclCommunicator", (3, ())),
        ("cuda.nccl.NcclCommunicator.send", (5, ())),
        ("cuda.nccl.NcclCommunicator.broadcast", (6, ())),
        ("cuda.nccl.NcclCommunicator.commSplit", (2, ())),
        ("cuda.nccl.groupStart", (0, ())),
        ("empty", (2, ())),
    ):
        assert (name, call) in found, name


def test_wrong_uses_are_found(real):
    source = """
def wrong(gpu, cupy):
    gpu.cupy.cuda.absent(1)
    runtime = cupy.cuda.runtime
    runtime.memcpyAsync(1, 2, 3, 4)
    runtime.memcpyAsync(1, 2, 3, 4, 5, 6)
    cupy.cuda.Event(timing=False)
"""
    found = "\n".join(not_in(real, cupy_uses.uses_of(source, "x.py")))
    for text in (
        "x.py:3: CuPy",
        "has no cuda.absent",
        "x.py:5: cuda.runtime.memcpyAsync needs",
        "x.py:6: cuda.runtime.memcpyAsync takes 5 arguments, and not 6",
        "x.py:7: cuda.Event has no parameter timing",
    ):
        assert text in found


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_the_compiler_of_cuda_takes_the_kernels(real, architecture):
    """As g++, by which they run in tests, is another compiler."""
    code = f"""
import sys
from cupy.cuda import nvrtc
if nvrtc.getVersion()[0] >= 13 and "{architecture}" < "sm_75":
    sys.exit("older than this CUDA compiles for")
program = nvrtc.createProgram(sys.stdin.read(), "kernel.cu", [], [])
try:
    nvrtc.compileProgram(program, ["--gpu-architecture={architecture}"])
finally:
    print(nvrtc.getProgramLog(program))
print(len(nvrtc.getCUBIN(program)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=SOURCE,
        env=environment(double=None),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode and "libnvrtc" in done.stderr and not MUST:
        pytest.skip("the library of the compiler is not installed")
    if "older than this CUDA compiles for" in done.stderr:
        pytest.skip(f"CUDA 13 compiles for sm_75 and newer, not for {architecture}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 1000
