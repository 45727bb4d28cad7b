"""``xmesh plan``: make a plan from two layouts and show it."""

from __future__ import annotations

import argparse
import sys

from xmesh.commands.described import CLUSTER_HELP
from xmesh.commands.resharding import LAYOUT_HELP, add_resharding_arguments, plan_of
from xmesh.planner.describe import seconds_text

_EXAMPLE = f"""\
{LAYOUT_HELP}
  xmesh plan "S01R@(2,4)" "RS0@(2,4)" --shape 1024,512 --ranks-per-host 4

{CLUSTER_HELP}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.epilog = _EXAMPLE
    parser.add_argument("src", metavar="SRC", help="layout that holds the array")
    parser.add_argument("dst", metavar="DST", help="layout that needs it")
    add_resharding_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="the plan as JSON, and nothing else, on stdout"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="add the time of a simulation by messages"
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    made = plan_of(args, args.src, args.dst)
    print(made.to_json() if args.json else made)
    if args.simulate:
        from xmesh.planner.simulate import simulate

        simulated_s = simulate(made).makespan_s
        line = f"  simulated   {seconds_text(simulated_s)} with latencies, message by message"
        print(line, file=sys.stderr if args.json else sys.stdout)
    return 0
