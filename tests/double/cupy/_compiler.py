"""Compiles kernels for the host."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cupy import _settings
from cupy._errors import CUDADriverError, explained

_HERE = Path(__file__).parent
_ANY_FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fno-gnu-unique")
_FLAGS = (
    *(*_ANY_FLAGS, "-w", "-fno-strict-aliasing"),
    # NVRTC finds no header of the host; nodefaultlibs: the sanitizer's run time is _launch.h.
    *("-nostdinc", "-nodefaultlibs", "-fsanitize=alignment"),
)
#: Options of NVRTC that change nothing here.
_WITHOUT_EFFECT = re.compile(r"--?(use_fast_math|lineinfo|generate-line-info|restrict|fmad=.*)$")
_KERNEL = re.compile(
    r"__global__\s+(?:void\s+)?(?:__launch_bounds__\s*\([^()]*\)\s*)?(?:void\s+)?(\w+)\s*\("
)


class CompileException(Exception):
    """The compiler has refused a kernel."""


class Kernel:
    """One compiled kernel.

    Attributes:
        parameters: of each its size, its alignment and whether it is a pointer.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        try:
            getattr(library, name)  # as CUDA: by the name that the linker sees
            self.run = getattr(library, f"double_launch_{name}")
        except AttributeError:
            raise explained(CUDADriverError, 500, f'no extern "C" kernel {name!r}') from None
        facts = (ctypes.c_int * 3 * 1024)()
        count = getattr(library, f"double_describe_{name}")(facts)
        self.parameters = [(row[0], row[1], bool(row[2])) for row in facts[:count]]
        self.name = name


def kernel(code: str, options: tuple[str, ...], name: str) -> Kernel:
    """A kernel of some source."""
    names = set(_KERNEL.findall(code)) | {name}  # others of the same source come at no cost
    try:
        return Kernel(_library(code, options, tuple(sorted(names))), name)
    except CompileException:
        if re.search(rf"\b{re.escape(name)}\b", code):
            raise
        raise explained(CUDADriverError, 500, f"{name!r} is not in the source") from None


@functools.cache
def _library(code: str, options: tuple[str, ...], names: tuple[str, ...]) -> ctypes.CDLL:
    source = "\n".join(
        [
            f'#include "{_HERE / "_cuda.h"}"',
            '#line 1 "kernel.cu"',
            code,
            f'#include "{_HERE / "_launch.h"}"',
            *(f"DOUBLE_KERNEL({name})" for name in names),
        ]
    )
    flags = [*_FLAGS, *_host_options(options)]
    _threads()
    return ctypes.CDLL(str(_built(source, flags, "_cuda.h", "_launch.h")))


@functools.cache
def _threads() -> ctypes.CDLL:
    """What kernels call to run the threads of a block, for them all."""
    return ctypes.CDLL(
        str(_built((_HERE / "_threads.cpp").read_text(), _ANY_FLAGS)), ctypes.RTLD_GLOBAL
    )


def _built(source: str, flags: Sequence[str], *headers: str) -> Path:
    """A shared library, made unless there is one."""
    parts = [*flags, *((_HERE / name).read_text() for name in headers), source]
    path = _folder() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"
    if not path.exists():
        _compile(source, flags, path)
    return path


def _host_options(options: tuple[str, ...]) -> list[str]:
    kept = []
    for option in options:
        if option.startswith("-D"):
            kept.append(option)
        elif option.startswith(("-std=", "--std=")):
            kept.append("-std=" + option.partition("=")[2])
        elif not _WITHOUT_EFFECT.match(option):
            raise CompileException(f"the double does not know the option {option}")
    return kept


def _compile(source: str, flags: Sequence[str], path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CompileException("the double compiles kernels by g++, which is not there")
    # Ranks may compile the same kernel at once; each sees a whole file or none.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        done = subprocess.run(
            [compiler, *flags, "-", "-o", str(output)],
            input=source,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise CompileException(done.stderr)
        output.replace(path)


@functools.cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="double-of-cupy-")  # removed at exit


def _folder() -> Path:
    if not _settings.CACHE:
        return Path(_private_folder().name)
    folder = Path(_settings.CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
