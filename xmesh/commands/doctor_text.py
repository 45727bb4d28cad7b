"""The report of ``xmesh doctor`` as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xmesh.planner.describe import ranks_text

_WIDTH = 16
_MOST_ROWS = 16

Report = dict[str, Any]


def report_text(report: Report) -> str:
    """The report of `gather`, for people to read."""
    python, mpi, use = (report[key] for key in ("python", "mpi", "would_use"))
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
    lines += _section("GPU", _gpu_texts(report))
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


def _gpu_texts(report: Report) -> dict[str, str]:
    """Ranks that have the same are put together."""
    gpus = [rank["gpu"] for rank in report["ranks"]]
    facts = _devices_texts(gpus)
    for row in report["shared_gpus"]:
        facts[f"{row['pci_bus_id']}"] = (
            f"shared by {ranks_named(row['ranks'])} of {row['host']}: NCCL wants a GPU for each"
        )
    return facts | {
        "CuPy": _by_ranks(gpu["cupy"].get("version") or gpu["cupy"]["missing"] for gpu in gpus),
        "NCCL": _by_ranks(_nccl_text(gpu["nccl"]) for gpu in gpus),
        "wheels": _by_ranks(
            ", ".join(f"{name} {version}" for name, version in gpu["wheels"].items())
            or "neither of CuPy nor of NCCL"
            for gpu in gpus
        ),
        "CUDA-aware MPI": _by_ranks(_aware_text(gpu["cuda_aware_mpi"]) for gpu in gpus),
        "environment": _by_ranks(
            " ".join(f"{name}={value}" for name, value in gpu["hints"].items()) or "no hints"
            for gpu in gpus
        ),
    }


def _devices_texts(gpus: Sequence[Report]) -> dict[str, str]:
    """Free memory aside, which is never the same."""
    found: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        found.setdefault(_device_text(gpu), []).append(rank)
    facts = {}
    for text, ranks in list(found.items())[:_MOST_ROWS]:
        free = [gpus[r]["device"]["free_nbytes"] for r in ranks if "ordinal" in gpus[r]["device"]]
        facts[ranks_named(ranks)] = f"{text}, {_gib(free)} free" if free else text
    if len(found) > _MOST_ROWS:
        facts["..."] = f"{len(found) - _MOST_ROWS} more (--json has them)"
    return facts


def _device_text(gpu: Report) -> str:
    device = gpu["device"]
    if "missing" in device:
        return f"none: {device['missing']} (device files: {gpu['device_files']})"
    return (
        f"{device['name']}, device {device['ordinal']} of {device['visible']} "
        f"(PCI {device['pci_bus_id']}), {device['total_nbytes'] / 2**30:.1f} GiB"
    )


def _gib(sizes: Sequence[int]) -> str:
    low, high = (f"{nbytes / 2**30:.1f}" for nbytes in (min(sizes), max(sizes)))
    return low if low == high else f"{low} to {high}"


def _nccl_text(nccl: Report) -> str:
    if "missing" in nccl:
        return f"none: {nccl['missing']}"
    split = "can" if nccl["can_split"] else "cannot"
    return f"{nccl['runtime']} (CuPy built with {nccl['build']}), communicators {split} be split"


def _aware_text(found: Report) -> str:
    return f"{ {True: 'yes', False: 'no', None: 'unknown'}[found['aware']] }: {found['why']}"


def _by_ranks(texts: Iterable[str]) -> str:
    """One text where all ranks have the same."""
    found: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        found.setdefault(text, []).append(rank)
    if len(found) == 1:
        return next(iter(found))
    rows = [f"{ranks_named(ranks)}: {text}" for text, ranks in found.items()]
    return "; ".join(rows[:_MOST_ROWS]) + ("; ..." if len(rows) > _MOST_ROWS else "")


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks in words: ``"rank 3"``, ``"ranks 0-3"``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks)}"
