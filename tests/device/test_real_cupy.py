"""Every public name of the double is one of the real CuPy, with the same parameters.

Both are described in processes of their own, for only one can have the name ``cupy``. The real one
needs no GPU for that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
DOUBLE = HERE.parent / "double"

#: Parameters that CuPy 13 lacks; the double refuses them where it stands for CuPy 13.
SINCE_14 = {
    *(("cuda.Stream", "priority"), ("cuda.stream.Stream", "priority")),
    ("cuda.nccl.NcclCommunicator", "config"),
}

#: CuPy has these names only where the library can be loaded.
NCCL = "cuda.nccl."


def describe(*, double):
    """The names of a CuPy, as describe_cupy.py prints them; None where it is not installed.

    Of the double where it stands for a version, if ``double`` is one.
    """
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [entry for entry in path if Path(entry).resolve() != DOUBLE]
    done = subprocess.run(
        [sys.executable, str(HERE / "describe_cupy.py"), *(["--own"] if double else [])],
        env={
            **os.environ,
            "DOUBLE_CUPY_VERSION": double or "",
            "PYTHONPATH": os.pathsep.join([str(DOUBLE), *path] if double else path),
        },
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
        if os.environ.get("CI") == "true":
            pytest.fail("in CI nothing may be skipped for want of cupy")
        pytest.skip("cupy is not installed")
    return described


def differences(ours, theirs):
    """What is wrong with the double's names, as text."""
    is_13 = theirs["__version__"].startswith("13.")
    has_nccl = bool(theirs["names"].get(f"{NCCL}available", {}).get("value"))
    for name, mine in ours["names"].items():
        if name.startswith(NCCL) and not has_nccl and os.environ.get("CI") != "true":
            continue
        if name not in theirs["names"]:
            holder, _, attribute = name.rpartition(".")
            # What CuPy's Python classes give their objects is in the docstring alone.
            if f".{attribute} (" not in theirs["names"].get(holder, {}).get("doc", ""):
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
