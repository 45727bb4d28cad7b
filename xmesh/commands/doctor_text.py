"""The report of ``xmesh doctor`` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xmesh.planner.describe import ranks_text

_WIDTH = 16

Report = dict[str, Any]


def report_text(report: Report) -> str:
    """The report of `gather`, for people to read."""
    python, mpi, gpu, use = (report[key] for key in ("python", "mpi", "gpu", "would_use"))
    lines = [f"xmesh {python['xmesh']}"]
    lines += _section(
        "Python",
        {
            "version": python["version"],
            "executable": python["executable"],
            "platform": python["platform"],
            "numpy": python["numpy"],
        },
    )
    wheels = ", ".join(f"{name} {number}" for name, number in mpi["wheels"].items())
    if len(mpi["wheels"]) > 1:
        wheels += ": an environment should hold one MPI"
    facts = {"mpi4py": python["mpi4py"], "MPI wheels": wheels or "none installed"}
    if "missing" in mpi:
        facts["not usable"] = mpi["missing"]
    else:
        facts |= {
            "library": mpi["library"],
            "file": mpi["file"],
            "standard": mpi["standard"],
            "thread level": mpi["thread_level"],
            "TAG_UB": mpi["tag_ub"],
            "ranks": mpi["ranks"],
        }
    lines += _section("MPI", facts)
    hosts = report["hosts"]
    lines += _section(
        "Hosts",
        {
            "shared memory": _groups_text(hosts["shared_memory"], leaders=True),
            "processor name": _groups_text(hosts["processor_name"]),
            "Slurm": _groups_text(hosts["slurm"]),
        },
    )
    lines += _section("Cores", {str(row["host"]): _cores_text(row) for row in report["cores"]})
    lines += _section(
        "GPU",
        {
            "devices": gpu["devices"],
            "CUDA-aware MPI": {True: "yes", False: "no"}.get(
                gpu["cuda_aware_mpi"], gpu["cuda_aware_mpi"]
            ),
            "CuPy": _installed_text(gpu["cupy"]),
            "NCCL": _installed_text(gpu["nccl"]),
            "environment": " ".join(f"{k}={v}" for k, v in gpu["hints"].items()) or "no hints",
        },
    )
    if report["differences"]:
        lines += ["", "Ranks differ", *(f"  {line}" for line in report["differences"])]
    lines += _section(
        "Would be used",
        {
            "transport": use["transport"],
            "device arrays": use["device_arrays"],
            "topology": use["topology"],
        },
    )
    return "\n".join(lines)


def _section(title: str, facts: Mapping[str, object]) -> list[str]:
    width = max(_WIDTH, *(len(name) + 1 for name in facts)) if facts else _WIDTH
    return ["", title, *(f"  {name:<{width}}{value}" for name, value in facts.items())]


def _groups_text(groups: Any, leaders: bool = False) -> str:
    if isinstance(groups, str):
        return groups
    texts = [
        ranks_named(ranks) if leaders else f"{name}: {ranks_named(ranks)}" for name, ranks in groups
    ]
    count = f"{len(groups)} host{'s' if len(groups) > 1 else ''}"
    return f"{count} ({'; '.join(texts[:16])}{'; ...' if len(texts) > 16 else ''})"


def _cores_text(row: Report) -> str:
    if row["ranks_per_core"] is None:
        return f"{ranks_named(row['ranks'])}; cores {row['cores']}"
    verdict = "oversubscribed: waits must yield" if row["oversubscribed"] else "not oversubscribed"
    cores = f"{row['cores']} core{'s' if row['cores'] > 1 else ''}"
    return (
        f"{ranks_named(row['ranks'])} on {cores}, {row['ranks_per_core']:.3g} per core: {verdict}"
    )


def _installed_text(found: Any) -> str:
    if isinstance(found, str):
        return found
    return ", ".join(f"{name} {number}" for name, number in found.items())


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks in words: ``"rank 3"``, ``"ranks 0-3"``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks)}"
