"""Slurm: the host of every rank, read from the variables that srun sets.

Pure text in, hosts out, so that a job's placement can be known, and tested, without MPI. Variables
and node lists are those of the srun(1) manual, sections OUTPUT ENVIRONMENT VARIABLES and
--distribution.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from xmesh.errors import TopologyError, explain

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # commas inside brackets belong to the item
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_FALL_BACK = "pass Topology(host_of_rank=[...]), one host per rank"


def host_of_rank_from_slurm(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The host name of each rank of a job step.

    Args:
        environ: the environment of a rank, ``os.environ`` for example.

    Returns:
        Host names, index = rank; None outside of a step started by srun. (In a batch script that
        calls mpirun Slurm knows the nodes but not which rank mpirun puts where: None, too.)

    Raises:
        TopologyError: variables that cannot be read or that contradict each other, or an
            arbitrary distribution.
    """
    nodelist = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST"))
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if nodelist is None or tasks_per_node is None or "SLURM_PROCID" not in environ:
        return None
    nodes = expand_nodelist(nodelist)
    counts = _expand_counts(tasks_per_node)
    if len(nodes) != len(counts):
        raise TopologyError(
            explain(
                "Slurm must give a number of tasks for each node",
                values=f"nodes {nodelist!r}: {len(nodes)}, "
                f"SLURM_STEP_TASKS_PER_NODE {tasks_per_node!r}: {len(counts)}",
                remedy=f"start the ranks by srun itself, or {_FALL_BACK}",
            )
        )
    node_of_rank = list(_distribute(counts, _plane_size(environ)))
    total = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS"))
    if total is not None and _number("number of tasks", total) != len(node_of_rank):
        raise TopologyError(
            explain(
                "the tasks per node must add up to the number of tasks",
                values=f"SLURM_STEP_TASKS_PER_NODE {tasks_per_node!r} is {len(node_of_rank)} "
                f"tasks, Slurm's number of tasks {total}",
                remedy=f"start the ranks by srun itself, or {_FALL_BACK}",
            )
        )
    _check_own_place(environ, nodes, node_of_rank)
    return tuple(nodes[node] for node in node_of_rank)


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Names in a Slurm node list: ``"n[08-10,12],login0"`` is n08, n09, n10, n12, login0.

    Raises:
        TopologyError: the list cannot be read.
    """
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise _bad_nodelist(text, "brackets and commas do not match")
    return tuple(name for item in items for name in _expand_item(item, text))


def _expand_item(item: str, text: str) -> Iterator[str]:
    # Split at brackets: every second piece is the inside of a pair; each pair multiplies.
    pieces = re.split(r"\[([^\]]*)\]", item.strip())
    choices = [
        [piece] if i % 2 == 0 else list(_expand_ranges(piece, text))
        for i, piece in enumerate(pieces)
    ]
    return map("".join, itertools.product(*choices))


def _expand_ranges(inside: str, text: str) -> Iterator[str]:
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _bad_nodelist(text, f"{part!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _bad_nodelist(text, f"range {part!r} runs backwards")
        # The first number's zeros say how wide all of them are written.
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def _bad_nodelist(text: str, why: str) -> TopologyError:
    return TopologyError(
        explain(
            "a Slurm node list is names with ranges in brackets, such as n[01-03,7],login0",
            values=f"{text!r}: {why}",
            remedy=f"look at SLURM_JOB_NODELIST and SLURM_STEP_NODELIST, or {_FALL_BACK}",
        )
    )


def _expand_counts(text: str) -> list[int]:
    """Tasks of each node: ``"2(x3),1"`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise TopologyError(
                explain(
                    "SLURM_STEP_TASKS_PER_NODE is counts with repetitions, such as 2(x3),1",
                    values=f"{text!r}: {part!r} is no count",
                    remedy=_FALL_BACK,
                )
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _plane_size(environ: Mapping[str, str]) -> int | None:
    """How many consecutive ranks a node gets at a time; None: as many as it has room for."""
    # Past the first ":" or "," stands how ranks go to sockets, cores and whether nodes are packed.
    text = environ.get("SLURM_DISTRIBUTION", "block")
    method, _, size = re.split("[:,]", text)[0].strip().lower().partition("=")
    if method in ("", "*", "block", "unknown", "pack", "nopack"):
        return None
    if method == "cyclic":
        return 1
    plane = _number("plane size", size or environ.get("SLURM_DIST_PLANESIZE", "0"))
    if method == "plane" and plane > 0:
        return plane
    raise TopologyError(
        explain(
            "ranks can be placed where Slurm's distribution is block, cyclic or plane=<size>",
            values=f"SLURM_DISTRIBUTION {text!r}",
            remedy=_FALL_BACK,
        )
    )


def _distribute(counts: list[int], plane: int | None) -> Iterator[int]:
    """The node of each rank in turn: round after round, ``plane`` ranks for each node with room."""
    left = list(counts)
    while any(left):
        for node, room in enumerate(left):
            taken = room if plane is None else min(room, plane)
            left[node] -= taken
            yield from itertools.repeat(node, taken)


def _check_own_place(
    environ: Mapping[str, str], nodes: tuple[str, ...], node_of_rank: list[int]
) -> None:
    """The one rank whose node is known for sure must be where the variables put it."""
    rank = _number("SLURM_PROCID", environ["SLURM_PROCID"])
    if rank >= len(node_of_rank):
        raise TopologyError(
            explain(
                "a rank must be one of its step's tasks",
                values=f"SLURM_PROCID {rank}, {len(node_of_rank)} tasks",
                remedy=f"start the ranks by srun itself, or {_FALL_BACK}",
            )
        )
    own = environ.get("SLURM_NODEID")
    if own is not None and _number("SLURM_NODEID", own) != node_of_rank[rank]:
        node = node_of_rank[rank]
        raise TopologyError(
            explain(
                "a rank must be on the node that Slurm's variables place it on",
                values=f"SLURM_NODEID is {own}, "
                f"SLURM_DISTRIBUTION {environ.get('SLURM_DISTRIBUTION', 'block')!r} says node "
                f"{node} ({nodes[node]})",
                context=f"rank {rank}",
                remedy=f"set SLURM_DISTRIBUTION as srun was called, or {_FALL_BACK}",
            )
        )


def _number(what: str, text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        raise TopologyError(
            explain(f"Slurm's {what} is a number", values=f"{text!r}", remedy=_FALL_BACK)
        )
    return int(text)
