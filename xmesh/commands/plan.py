"""``xmesh plan``: make a plan from two layouts and show it."""

from __future__ import annotations

import argparse
import json
import sys

from xmesh.commands.parse import parse_layout, parse_shape
from xmesh.errors import PlanError, explain
from xmesh.layout import UNEVEN_RULES
from xmesh.planner.cost import CostModel
from xmesh.planner.describe import seconds_text
from xmesh.planner.make_plan import plan
from xmesh.planner.plans import Plan
from xmesh.planner.schedulers import BY_NAME
from xmesh.planner.strategy import STRATEGIES
from xmesh.topology import Topology

_EXAMPLE = """\
A layout is SPEC@MESH. Meshes are written (2,4), (2,4)+8 to begin at rank 8, or [[0,1],[2,3]].
The source begins at rank 0, the destination right after the source's last rank.

  xmesh plan "S01R@(2,4)" "RS0@(2,4)" --shape 1024,512 --ranks-per-host 4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.epilog = _EXAMPLE
    parser.add_argument("src", metavar="SRC", help="layout that holds the array")
    parser.add_argument("dst", metavar="DST", help="layout that needs it")
    parser.add_argument("--shape", required=True, help="extents of the array: 1024,512")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument(
        "--ranks-per-host",
        type=int,
        metavar="N",
        help="hosts of N consecutive ranks (each rank is a host of its own)",
    )
    parser.add_argument("--strategy", default="auto", choices=("auto", *STRATEGIES))
    parser.add_argument("--scheduler", default="auto", choices=tuple(BY_NAME))
    parser.add_argument("--seed", type=int, default=0, help="of the randomised scheduler (0)")
    parser.add_argument(
        "--uneven", default="ceil", choices=UNEVEN_RULES, help="for extents that do not divide"
    )
    parser.add_argument(
        "--cost",
        metavar="FILE.json",
        help="cost model: an object with any of " + ", ".join(CostModel().to_json()),
    )
    parser.add_argument(
        "--json", action="store_true", help="the plan as JSON, and nothing else, on stdout"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="add the time of a simulation by messages"
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    made = _plan(args)
    print(made.to_json() if args.json else made)
    if args.simulate:
        from xmesh.planner.simulate import simulate

        simulated_s = simulate(made).makespan_s
        line = f"  simulated   {seconds_text(simulated_s)} with latencies, message by message"
        print(line, file=sys.stderr if args.json else sys.stdout)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    shape = parse_shape(args.shape)
    src = parse_layout(args.src, shape, uneven=args.uneven)
    dst = parse_layout(args.dst, shape, start=max(src.ranks) + 1, uneven=args.uneven)
    topology = None
    if args.ranks_per_host is not None:
        topology = Topology.uniform(max(*src.ranks, *dst.ranks) + 1, args.ranks_per_host)
    return plan(
        src,
        dst,
        dtype=args.dtype,
        topology=topology,
        strategy=args.strategy,
        scheduler=args.scheduler,
        seed=args.seed,
        cost=None if args.cost is None else _cost(args.cost),
    )


def _cost(path: str) -> CostModel:
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        return CostModel(**{name: float(value) for name, value in data.items()})
    except PlanError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise PlanError(
            explain(
                "a cost model is a JSON object of numbers, any of "
                + ", ".join(CostModel().to_json()),
                values=str(error),
                context=f"--cost {path}",
                remedy='write {"nic_bandwidth_Bps": 1.25e9}, for example',
            )
        ) from error
