"""What ``xmesh doctor`` says of GPUs: what each rank has, and how arrays there would travel.

CuPy is imported where it is installed, and asked for its current device, as a ``Resharder`` does;
what does not work says why.
"""

from __future__ import annotations

import glob
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xmesh.commands.doctor_text import Report, ranks_named
from xmesh.commands.probes import groups, installed, probe, reason
from xmesh.device.gpu import Gpu, current_device, load_cupy
from xmesh.nccl.library import can_split, load_nccl, version_text
from xmesh.transport.cuda_aware import find_out, probe_on, query_cuda_support

_WHEELS = (
    *(f"cupy{kind}" for kind in ("", "-cuda11x", "-cuda12x", "-cuda13x", "-rocm-7-0")),
    *(f"nvidia-nccl-cu{major}" for major in (11, 12, 13)),
)
_HINTS = (
    "CUDA_VISIBLE_DEVICES",
    "XMESH_CUDA_AWARE",
    "MPICH_GPU_SUPPORT_ENABLED",
    "MPIR_CVAR_ENABLE_GPU",
    "OMPI_MCA_opal_cuda_support",
    "OMPI_MCA_pml",
    "I_MPI_OFFLOAD",
    "MV2_USE_CUDA",
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "NCCL_DEBUG",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
)
#: What launchers set for the ranks that they start; without it a process is a rank by itself.
_OF_LAUNCHERS = (
    *("PMI_", "PMIX_", "PALS_", "HYDI_", "HYDRA_", "SLURM_", "PRTE_"),
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_prte"),
)
_TRIAL_TIMEOUT_S = 60
_TRIAL = "from xmesh.commands.doctor_gpu import try_here; try_here({ordinal})"
_BEGAN, _ENDED = "xmesh-trial-began", "xmesh-trial-ended:"


class NotTriedError(Exception):
    """Why no trial was made."""


# --- One rank -------------------------------------------------------------------------------------


def gpu_facts(has_mpi: bool, environ: Mapping[str, str]) -> Report:
    """What one rank has; plain data.

    Args:
        has_mpi: MPI is initialised in this process.
        environ: of this process.
    """
    cupy = _cupy()
    device = {"missing": cupy["missing"]} if "missing" in cupy else _found(_device)
    nccl = {"missing": cupy["missing"]} if "missing" in cupy else _found(_nccl)
    aware: Report = {"aware": None, "why": "no MPI"}
    if has_mpi:
        aware = _cuda_awareness(device.get("ordinal"), environ)
    return {
        "device_files": probe(lambda: len(glob.glob("/dev/nvidia[0-9]*"))),
        "device": device,
        "cupy": cupy,
        "nccl": nccl,
        "wheels": installed(_WHEELS),
        "cuda_aware_mpi": aware,
        "hints": {name: environ[name] for name in _HINTS if name in environ},
    }


def _found(look: Callable[[], Report]) -> Report:
    try:
        return look()
    except Exception as error:
        return {"missing": _in_short(error)}


def _in_short(error: Exception) -> str:
    """The values of an error of ours, else all of it."""
    values = re.search(r"^ +values: +(.*)$", str(error), re.MULTILINE)
    return values.group(1) if values else reason(error)


def _cupy() -> Report:
    try:
        if importlib.util.find_spec("cupy") is None:
            return {
                "missing": "CuPy is not installed: pip install 'cupy-cuda12x[ctk]', or that of "
                "your CUDA"
            }
    except (ImportError, ValueError) as error:
        return {"missing": f"CuPy is not installed ({error})"}
    return _found(lambda: {"version": str(load_cupy().__version__)})


def _device() -> Report:
    cupy = load_cupy()
    ordinal = current_device(cupy)
    runtime = cupy.cuda.runtime
    with cupy.cuda.Device(ordinal):
        free, total = runtime.memGetInfo()
        name = runtime.getDeviceProperties(ordinal)["name"]
        return {
            "ordinal": ordinal,
            "name": name.decode(errors="replace") if isinstance(name, bytes) else str(name),
            "pci_bus_id": str(runtime.deviceGetPCIBusId(ordinal)),
            "free_nbytes": int(free),
            "total_nbytes": int(total),
            "visible": int(runtime.getDeviceCount()),
        }


def _nccl() -> Report:
    nccl = load_nccl()
    return {
        "runtime": version_text(int(nccl.get_version())),
        "build": version_text(int(nccl.get_build_version())),
        "can_split": can_split(nccl),
    }


# --- Whether MPI takes device pointers ------------------------------------------------------------


def _cuda_awareness(ordinal: int | None, environ: Mapping[str, str]) -> Report:
    def trial() -> str:
        if ordinal is None:
            raise NotTriedError("there is no GPU to try it with")
        return try_elsewhere(ordinal, environ)

    try:
        found = find_out(environ, query_cuda_support, trial)
    except NotTriedError as why:
        return {"aware": None, "why": f"{query_cuda_support()[1]}; not tried: {why}"}
    except Exception as error:
        return {"aware": None, "why": reason(error)}
    return {"aware": found.aware, "why": found.why}


def try_elsewhere(ordinal: int, environ: Mapping[str, str]) -> str:
    """Have a process of its own send bytes of a GPU to itself, as a wrong MPI ends it.

    Returns:
        What went wrong; "" when nothing did.

    Raises:
        NotTriedError: that process did not come as far.
    """
    alone = {name: value for name, value in environ.items() if not name.startswith(_OF_LAUNCHERS)}
    try:
        child = subprocess.run(
            [sys.executable, "-c", _TRIAL.format(ordinal=ordinal)],
            env=alone,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NotTriedError(reason(error)) from error
    lines = child.stdout.splitlines()
    for line in lines:
        if line.startswith(_ENDED):
            return line.removeprefix(_ENDED)
    said = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    # An error of xmesh ends with a remedy, and has what broke it on a line before that.
    values = [line.partition(":")[2].strip() for line in said if line.startswith("values:")]
    last = [*said[-1:], *values[-1:]][-1] if said else ""
    text = f"its process ended with status {child.returncode}" + (f": {last}" if last else "")
    if _BEGAN in lines:
        return text
    raise NotTriedError(text)


def try_here(ordinal: int) -> None:
    """The trial itself; prints how it went."""
    import mpi4py.MPI  # noqa: F401  # initialises MPI

    look = probe_on(Gpu(ordinal))
    print(_BEGAN, flush=True)
    print(f"{_ENDED}{look()}".replace("\n", "; "), flush=True)


# --- All ranks ------------------------------------------------------------------------------------


def shared_gpus(everyone: Sequence[Report]) -> list[Report]:
    """GPUs that several ranks use.

    Args:
        everyone: `process` of every rank, in order.
    """
    found: dict[tuple[Any, str], list[int]] = {}
    for rank, own in enumerate(everyone):
        if "missing" not in own["gpu"]["device"]:
            host = own["processor_name"] or own["host_name"]
            found.setdefault((host, own["gpu"]["device"]["pci_bus_id"]), []).append(rank)
    return [
        {"host": host, "pci_bus_id": name, "ranks": ranks}
        for (host, name), ranks in found.items()
        if len(ranks) > 1
    ]


def device_use(everyone: Sequence[Report], has_mpi: bool) -> Report:
    """How device arrays would travel, and why.

    Args:
        everyone: `process` of every rank, in order.
        has_mpi: else all is loopback.

    Returns:
        ``device_arrays`` in words, and of what they were made: ``nccl`` and ``device_messages``.
    """
    problem = "there is no MPI to start it with" if not has_mpi else _no_nccl(everyone)
    ways = [
        {"way": way, "why": why, "ranks": ranks}
        for (way, why), ranks in groups(_messages(own, has_mpi) for own in everyone)
    ]
    nccl = {"usable": not problem, "why": problem or _why_nccl(everyone)}
    if all(way["way"] == "none" for way in ways):
        text = f"none: {_by_ranks((way['why'], way['ranks']) for way in ways)}"
    else:
        messages = _by_ranks((_in_words(way), way["ranks"]) for way in ways)
        kind = "mpi" if has_mpi else "loopback"
        if nccl["usable"]:
            text = f"nccl where all ranks say like=, because {nccl['why']}; else {kind}, {messages}"
        else:
            text = f"{kind}, {messages}; not nccl, because {nccl['why']}"
    return {"device_arrays": text, "nccl": nccl, "device_messages": ways}


def _no_nccl(everyone: Sequence[Report]) -> str:
    """What keeps ranks from NCCL; "" when nothing does."""
    for what in ("device", "nccl"):
        lacking = [(own["gpu"][what].get("missing", ""), own["rank"]) for own in everyone]
        for why, ranks in groups(why for why, _ in lacking):
            if why:
                return f"{ranks_named(ranks)}: {why}"
    return "; ".join(
        f"{ranks_named(row['ranks'])} share GPU {row['pci_bus_id']} of {row['host']}"
        for row in shared_gpus(everyone)
    )


def _why_nccl(everyone: Sequence[Report]) -> str:
    versions = sorted({own["gpu"]["nccl"]["runtime"] for own in everyone})
    return f"NCCL {' and '.join(versions)} is there and each rank has a GPU of its own"


def _messages(own: Report, has_mpi: bool) -> tuple[str, str]:
    """How messages of one rank carry device arrays, and why."""
    gpu = own["gpu"]
    if "missing" in gpu["device"]:
        return "none", gpu["device"]["missing"]
    if not has_mpi:
        return "staged", "the host copies what goes from rank to rank in this process"
    aware = gpu["cuda_aware_mpi"]
    way = {True: "aware", False: "staged", None: "unknown"}[aware["aware"]]
    return way, aware["why"]


def _in_words(way: Report) -> str:
    words = {
        "aware": "device pointers given to it",
        "staged": "staged through pinned memory",
        "unknown": "which way is not known",
        "none": "no device arrays",
    }
    return f"{words[way['way']]}, because {way['why']}"


def _by_ranks(texts: Any) -> str:
    rows = list(texts)
    if len(rows) == 1:
        return str(rows[0][0])
    return "; ".join(f"{ranks_named(ranks)}: {text}" for text, ranks in rows[:16])
