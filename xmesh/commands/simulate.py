"""``xmesh simulate``: what a plan does, message by message, when nothing disturbs it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from xmesh.errors import OptionError, PlanError, explain
from xmesh.planner.describe import nbytes_text, seconds_text, table_lines
from xmesh.planner.plans import Plan
from xmesh.planner.simulate import simulate
from xmesh.report import chrome_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.epilog = '  xmesh plan "RS0@(4,)" "S0R@(4,)" --shape 64,64 --json | xmesh simulate'
    parser.add_argument(
        "plan", nargs="?", default="-", metavar="PLAN.json", help="by xmesh plan --json (stdin)"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write the timeline as a Chrome trace, which Perfetto opens"
    )


def run(args: argparse.Namespace) -> int:
    """Read a plan, simulate it, and print times and bytes."""
    plan = Plan.from_json(_text(args.plan))
    result = simulate(plan)
    topology = plan.topology
    print(f"plan {plan.name}: {plan.src.describe()} -> {plan.dst.describe()}, {plan.strategy}")
    print(
        f"  simulated   {seconds_text(result.makespan_s)}, {len(result.messages):,} messages\n"
        f"  makespan    {seconds_text(plan.makespan_s)} without latencies\n"
        f"  lower bound {seconds_text(plan.lower_bound_s)}"
    )
    rows = []
    for nic in range(topology.num_nics):
        out_s, in_s = result.nic_out_busy_s[nic], result.nic_in_busy_s[nic]
        if out_s or in_s:
            name = topology.host_names[topology.nic_host(nic)]
            busy = (f"{seconds / result.makespan_s:.0%}" for seconds in (out_s, in_s))
            rows.append((nic, name, *busy))
    if rows:
        print("", *table_lines(("NIC", "host", "sends", "receives"), rows, "><>>"), sep="\n")
    total = sum(result.host_out_nbytes)
    print(f"\n  between hosts {nbytes_text(total)}")
    if args.trace:
        text = json.dumps(chrome_trace(result.messages, topology))
        try:
            Path(args.trace).write_text(text, encoding="utf-8")
        except OSError as error:
            raise OptionError(
                explain(
                    "--trace must name a file that can be written",
                    values=str(error),
                    remedy="choose a folder that is there and yours",
                )
            ) from error
        print(f"  wrote {args.trace}: open it at ui.perfetto.dev")
    return 0


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
                remedy="write it by: xmesh plan ... --json > plan.json",
            )
        ) from error
