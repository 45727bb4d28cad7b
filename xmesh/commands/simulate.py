"""``xmesh simulate``: what a plan does, message by message, when nothing disturbs it."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from xmesh.commands.described import CLUSTER_HELP, cost_of
from xmesh.commands.resharding import (
    LAYOUT_HELP,
    add_resharding_arguments,
    plan_of,
    refuse_with_a_plan,
)
from xmesh.errors import OptionError, PlanError, explain
from xmesh.planner.describe import nbytes_text, seconds_text, table_lines
from xmesh.planner.plans import Plan
from xmesh.planner.simulate import SHARING, Message, Simulation, simulate
from xmesh.planner.size import count_messages
from xmesh.report import both_ends, chrome_trace
from xmesh.timeline import busiest_nics, lane_names, text_timeline
from xmesh.topology import Topology

#: Messages that are simulated unless more are asked for: about a minute, and 1 GB of memory.
MAX_MESSAGES = 1_000_000
#: The same where they share NICs fairly, which takes longer the more flows there are.
MAX_FAIR_MESSAGES = 20_000
#: Messages of a whole trace; viewers open some hundred MB.
MAX_TRACED = 250_000
_EXAMPLE = f"""\
{LAYOUT_HELP}
  xmesh plan "RS0@(4,)" "S0R@(4,)" --shape 64,64 --json | xmesh simulate
  xmesh simulate "S0R@(2000,8)" "S0R@(1000,8)" --shape 64000,1024 --ranks-per-host 8

{CLUSTER_HELP}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.usage = "xmesh simulate [PLAN.json | SRC DST --shape SHAPE] [options]"
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "what",
        nargs="*",
        metavar="PLAN.json|SRC DST",
        help="a plan by xmesh plan --json (stdin), or two layouts to plan for",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write the timeline as a Chrome trace, which Perfetto opens"
    )
    parser.add_argument(
        "--figure", metavar="FILE", help="draw the timeline: .png, .svg or .pdf (by matplotlib)"
    )
    parser.add_argument(
        "--timeline", action="store_true", help="print the timeline, a line for each NIC"
    )
    parser.add_argument(
        "--sharing",
        choices=SHARING,
        default="exclusive",
        help="a message has its NICs to itself, as in the paper, or shares them, as in networks",
    )
    parser.add_argument(
        "--nics",
        type=int,
        default=16,
        metavar="N",
        help="show the N busiest NICs, where there are more (16)",
    )
    parser.add_argument(
        "--max-messages",
        type=int,
        metavar="N",
        help=f"refuse a plan of more messages ({MAX_MESSAGES:,}; {MAX_FAIR_MESSAGES:,} that share)",
    )
    add_resharding_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Read or make a plan, simulate it, and print times and bytes."""
    if args.nics < 1 or len(args.what) > 2:
        raise OptionError(
            explain(
                "simulate takes a plan or two layouts, and shows one NIC or more",
                values=f"{' '.join(args.what)} --nics {args.nics}",
                remedy="xmesh simulate --help shows how to write it",
            )
        )
    if len(args.what) == 2:
        plan = plan_of(args, *args.what)
    else:
        refuse_with_a_plan(args)
        made = Plan.from_json(_text(args.what[0] if args.what else "-"))
        # Not only the simulation: what it is compared with must be of the same rates.
        plan = replace(made, cost=cost_of(args, made.cost) or made.cost)
    most = MAX_FAIR_MESSAGES if args.sharing == "fair" else MAX_MESSAGES
    _require_size(plan, most if args.max_messages is None else args.max_messages)
    if args.figure:
        from xmesh.figure import figure_class

        figure_class()  # said now, and not after the simulation
    result = simulate(plan, sharing=args.sharing)
    print(f"plan {plan.name}: {plan.src.describe()} -> {plan.dst.describe()}, {plan.strategy}")
    print(
        f"  simulated   {seconds_text(result.makespan_s)}, {len(result.messages):,} messages\n"
        f"  makespan    {seconds_text(plan.makespan_s)} without latencies\n"
        f"  lower bound {seconds_text(plan.lower_bound_s)}"
    )
    print(*_nic_lines(result, plan.topology, args.nics), sep="\n")
    if args.timeline:
        width = shutil.get_terminal_size((100, 0)).columns
        print("", *text_timeline(plan, result, width, args.nics), sep="\n")
    print(f"\n  between hosts {nbytes_text(sum(result.host_out_nbytes))}")
    if args.trace:
        _write_trace(args.trace, plan, result, args.nics)
    if args.figure:
        from xmesh.figure import draw

        left_out = draw(plan, result, args.figure, args.nics)
        print(f"  wrote {args.figure}" + (f": {left_out}" if left_out else ""))
    return 0


def _require_size(plan: Plan, most: int) -> None:
    """Refuse what would take hours, or more memory than there is."""
    count, exact = count_messages(plan)
    if count > most:
        raise PlanError(
            explain(
                f"a simulation follows every message, up to {most:,}",
                values=f"{'' if exact else 'about '}{count:,} messages",
                context=f"{plan.src.describe()} -> {plan.dst.describe()}; a million messages, or "
                "twenty thousand that share NICs, take about a minute",
                remedy="describe fewer hosts, larger chunks (--chunk-mbytes), or layouts that cut "
                f"the array less finely; --max-messages {count} simulates it all the same",
            )
        )


def _nic_lines(result: Simulation, topology: Topology, most: int) -> list[str]:
    """How long NICs are busy: each, or the busiest and a summary."""
    pairs = list(zip(result.nic_out_busy_s, result.nic_in_busy_s, strict=True))
    used = [nic for nic, pair in enumerate(pairs) if any(pair)]
    if not used:
        return []
    shown = busiest_nics(result, most)
    names = lane_names(shown, topology)
    rows = [
        (nic, names[nic], *(f"{seconds / result.makespan_s:.0%}" for seconds in pairs[nic]))
        for nic in shown
    ]
    lines = ["", *table_lines(("NIC", "host", "sends", "receives"), rows, "><>>", len(used))]
    if len(used) > len(shown):
        for side, text in enumerate(("send", "receive")):
            shares = [pair[side] / result.makespan_s for pair in pairs if pair[side]]
            lines.append(f"  {_spread(shares)} {text}" if shares else f"  no NIC {text}s")
    return lines


def _spread(shares: Sequence[float]) -> str:
    return (
        f"{len(shares):,} NICs, busy {min(shares):.0%} to {max(shares):.0%} of the time, "
        f"{statistics.fmean(shares):.0%} in the mean,"
    )


def _write_trace(path: str, plan: Plan, result: Simulation, most: int) -> None:
    topology = plan.topology
    messages: Sequence[Message] = result.messages
    left_out = ""
    if len(messages) > MAX_TRACED:
        hosts = {topology.nic_host(nic) for nic in busiest_nics(result, most)}
        messages = [
            message
            for message in messages
            if not hosts.isdisjoint(map(topology.host, (message.source, message.destination)))
        ][:MAX_TRACED]
        left_out = f"; it has {len(messages):,} messages of the {len(hosts)} busiest hosts"
    text = json.dumps(
        chrome_trace({"simulated": both_ends(messages, topology, plan.cost)}, topology)
    )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            explain(
                "--trace must name a file that can be written",
                values=str(error),
                remedy="choose a folder that is there and yours",
            )
        ) from error
    print(f"  wrote {path}: open it at ui.perfetto.dev{left_out}")


def _text(path: str) -> str:
    if path == "-":
        return sys.stdin.read()
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            explain(
                "a plan is read from a file that can be read",
                values=str(error),
                remedy="write it by: xmesh plan ... --json > plan.json; or give two layouts",
            )
        ) from error
