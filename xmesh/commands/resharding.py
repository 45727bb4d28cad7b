"""Options that describe a resharding, for the commands that plan one."""

from __future__ import annotations

import argparse

from xmesh.commands.described import add_cluster_arguments, cost_of, topology_of
from xmesh.commands.parse import parse_layout, parse_shape
from xmesh.errors import OptionError, explain
from xmesh.layout import UNEVEN_RULES
from xmesh.planner.make_plan import plan
from xmesh.planner.plans import Plan
from xmesh.planner.schedulers import BY_NAME
from xmesh.planner.strategy import STRATEGIES

LAYOUT_HELP = """\
A layout is SPEC@MESH. Meshes are written (2,4), (2,4)+8 to begin at rank 8, or [[0,1],[2,3]].
The source begins at rank 0, the destination right after the source's last rank.
"""
_NOT_OF_A_PLAN = ("hosts", "ranks_per_host", "nics_per_host", "topology")


def add_resharding_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is moved, how it is planned, and on which cluster; the layouts come apart."""
    moved = parser.add_argument_group("resharding")
    moved.add_argument("--shape", help="extents of the array: 1024,512")
    moved.add_argument("--dtype", help="element type (float32)")
    moved.add_argument("--uneven", choices=UNEVEN_RULES, help="for extents that do not divide")
    moved.add_argument("--strategy", choices=("auto", *STRATEGIES))
    moved.add_argument("--scheduler", choices=tuple(BY_NAME))
    moved.add_argument("--seed", type=int, help="of the randomised scheduler (0)")
    moved.add_argument("--chunk-mbytes", type=float, metavar="M", help="largest chunk, in MiB (4)")
    add_cluster_arguments(parser)


def plan_of(args: argparse.Namespace, src_text: str, dst_text: str) -> Plan:
    """The plan that the options ask for.

    Args:
        args: with the options of ``add_resharding_arguments``.
        src_text: SPEC@MESH that holds the array.
        dst_text: SPEC@MESH that needs it.

    Raises:
        XmeshError: of what cannot be read, or planned.
    """
    if args.shape is None:
        raise OptionError(
            explain(
                "a resharding needs the extents of its array",
                values=f"{src_text} {dst_text} without --shape",
                remedy="add --shape 1024,512, for example",
            )
        )
    shape, uneven = parse_shape(args.shape), args.uneven or "ceil"
    src = parse_layout(src_text, shape, uneven=uneven)
    dst = parse_layout(dst_text, shape, start=max(src.ranks) + 1, uneven=uneven)
    options = {
        name: getattr(args, name)
        for name in ("dtype", "strategy", "scheduler", "seed")
        if getattr(args, name) is not None
    }
    if args.chunk_mbytes is not None:
        options["chunk_nbytes"] = int(args.chunk_mbytes * 2**20)
    topology = topology_of(args, max(*src.ranks, *dst.ranks) + 1)
    return plan(src, dst, topology=topology, cost=cost_of(args), **options)


def refuse_with_a_plan(args: argparse.Namespace) -> None:
    """A plan that is there brings its resharding and its hosts along.

    Raises:
        OptionError: an option wants them otherwise.
    """
    names = ("shape", "dtype", "uneven", "strategy", "scheduler", "seed", "chunk_mbytes")
    given = [name for name in (*names, *_NOT_OF_A_PLAN) if getattr(args, name) is not None]
    if given:
        raise OptionError(
            explain(
                "a plan from a file is simulated as it is; only rates can be others",
                values=", ".join(f"--{name.replace('_', '-')}" for name in given),
                remedy="give SRC DST in place of PLAN.json, or leave these out",
            )
        )
