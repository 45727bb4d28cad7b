"""Whether the MPI library takes pointers to GPU memory.

A library that does not, ends the process when it is given one. So it is asked first; only one that
says yes is tried out, for bytes that a rank sends to itself. The environment overrules both, by
``XMESH_CUDA_AWARE``.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from xmesh.device.gpu import Gpu
from xmesh.errors import OptionError, explain

#: Overrules what is found: 0 or 1; "auto" to find out.
VARIABLE = "XMESH_CUDA_AWARE"
_PROBE_NBYTES = 1 << 16
_PROBE_TIMEOUT_S = 20.0
_YES, _NO = ("1", "yes", "true", "on"), ("0", "no", "false", "off")


class CudaAwareness(NamedTuple):
    """What is known.

    Attributes:
        aware: device pointers may be given to MPI.
        why: how that is known.
    """

    aware: bool
    why: str


def find_out(
    environ: Mapping[str, str],
    query: Callable[[], tuple[bool | None, str]],
    probe: Callable[[], str],
) -> CudaAwareness:
    """Go by the environment, else by what the library says and a trial of it.

    Args:
        environ: of this process.
        query: see ``query_cuda_support``.
        probe: tries it out; "" when that went well, else what did not.

    Raises:
        OptionError: the environment variable has no meaning.
    """
    wanted = environ.get(VARIABLE, "auto").strip().lower()
    if wanted in _YES:
        return CudaAwareness(True, f"{VARIABLE}={wanted}")
    if wanted in _NO:
        return CudaAwareness(False, f"{VARIABLE}={wanted}")
    if wanted not in ("auto", ""):
        raise OptionError(
            explain(
                f"the variable {VARIABLE} must be 0, 1 or auto",
                values=f"{environ[VARIABLE]!r}",
                remedy="leave it unset: the MPI library is asked then, and tried out",
            )
        )
    says, who = query()
    if not says:
        return CudaAwareness(False, who)
    trouble = probe()
    if trouble:
        return CudaAwareness(False, f"{who}, but a trial failed: {trouble}")
    return CudaAwareness(True, f"{who}, and a trial went well")


def query_cuda_support() -> tuple[bool | None, str]:
    """What the MPI library of this process says: yes, no, or None where it does not say."""
    for library in _libraries():
        try:
            open_mpi = library.MPIX_Query_cuda_support
            open_mpi.restype, open_mpi.argtypes = ctypes.c_int, []
            found = bool(open_mpi())
            return found, f"MPIX_Query_cuda_support says {'yes' if found else 'no'}"
        except AttributeError:
            pass
        try:
            supported = ctypes.c_int(0)
            cuda = 0  # MPIX_GPU_SUPPORT_CUDA
            mpich = library.MPIX_GPU_query_support
            if mpich(ctypes.c_int(cuda), ctypes.byref(supported)) == 0:
                found = bool(supported.value)
                return found, f"MPIX_GPU_query_support says {'yes' if found else 'no'}"
        except AttributeError:
            pass
    return None, "the MPI library does not say whether it takes device pointers"


def loaded_files(prefix: str) -> list[str]:
    """Files that this process has mapped whose name begins with ``prefix`` (Linux)."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "/" in line}
    return sorted(path for path in paths if os.path.basename(path).startswith(prefix))


def _libraries() -> Iterator[ctypes.CDLL]:
    try:
        paths = loaded_files("libmpi")
    except OSError:
        return
    for path in paths:
        try:
            yield ctypes.CDLL(path)
        except OSError:
            continue


def probe_on(gpu: Gpu) -> Callable[[], str]:
    """A trial on one GPU, see ``find_out``: bytes that a rank sends to itself."""

    def probe() -> str:
        from mpi4py import MPI

        comm = MPI.COMM_SELF.Dup()
        try:
            trouble = _send_to_self(gpu, comm, MPI.BYTE)
        except Exception as error:  # of MPI, or of CUDA
            trouble = f"{type(error).__name__}: {error}"
        if not trouble:  # else something may be under way for ever
            comm.Free()
        return trouble

    return probe


def _send_to_self(gpu: Gpu, comm: Any, byte: Any) -> str:
    runtime = gpu.cupy.cuda.runtime
    host = gpu.pinned_bytes(_PROBE_NBYTES)
    source, target = gpu.device_bytes(_PROBE_NBYTES), gpu.device_bytes(_PROBE_NBYTES)
    expected = np.arange(_PROBE_NBYTES, dtype=np.uint32).view(np.uint8)[:_PROBE_NBYTES]
    host[:] = expected
    stream = gpu.outgoing
    with gpu.here():
        pointer = host.ctypes.data
        runtime.memcpyAsync(
            source.pointer, pointer, _PROBE_NBYTES, runtime.memcpyHostToDevice, stream.ptr
        )
        runtime.memsetAsync(target.pointer, 0, _PROBE_NBYTES, stream.ptr)
    deadline = time.monotonic() + _PROBE_TIMEOUT_S
    if not _wait(gpu.fence(stream), deadline):
        return f"the GPU did not copy {_PROBE_NBYTES} bytes within {_PROBE_TIMEOUT_S:g} s"
    receive, send = comm.Irecv([target, byte], 0, 0), comm.Isend([source, byte], 0, 0)
    while not (receive.Test() and send.Test()):
        if time.monotonic() > deadline:
            # MPI may still use them: they stay on a communicator that is never freed.
            key = type(comm).Create_keyval()
            comm.Set_attr(key, (receive, send, source, target))
            return f"{_PROBE_NBYTES} bytes did not arrive within {_PROBE_TIMEOUT_S:g} s"
        time.sleep(1e-4)
    host[:] = 0
    with gpu.here():
        runtime.memcpyAsync(
            pointer, target.pointer, _PROBE_NBYTES, runtime.memcpyDeviceToHost, stream.ptr
        )
    if not _wait(gpu.fence(stream), deadline):
        return f"the GPU did not copy {_PROBE_NBYTES} bytes within {_PROBE_TIMEOUT_S:g} s"
    return "" if np.array_equal(host, expected) else "other bytes arrived than were sent"


def _wait(fence: Any, deadline: float) -> bool:
    while not fence.done:
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-5)
    return True
