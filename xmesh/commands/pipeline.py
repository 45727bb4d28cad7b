"""``xmesh pipeline``: a pipeline schedule, checked, simulated and drawn."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from xmesh.errors import OptionError, ScheduleError, explain
from xmesh.pipeline import SCHEDULES, PipelineSchedule, chain, schedule
from xmesh.pipeline.simulate import TRANSFERS, PipelineSimulation, simulate
from xmesh.planner.describe import nbytes_text, table_lines

_EXAMPLE = f"""\
schedules: {", ".join(SCHEDULES)}
Times are in seconds, one for all stages or one for each: --forward-s 1,1,2,1

  xmesh pipeline eager-1f1b --stages 4 --microbatches 16 --transfer-s 1 --timeline
  xmesh pipeline interleaved-1f1b --stages 4 --microbatches 16 --chunks 2 --grid > mine.txt
  xmesh pipeline mine.txt --backward-s 3"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "schedule", metavar="SCHEDULE", help="a name, or a file with a schedule as text; - is stdin"
    )
    parser.add_argument("--stages", type=int, metavar="P", help="stage groups (of a name)")
    parser.add_argument("--microbatches", type=int, metavar="M", help="micro-batches (of a name)")
    parser.add_argument("--chunks", type=int, metavar="V", help="stages of each group, interleaved")
    parser.add_argument(
        "--weight-delay",
        action="store_true",
        help="compute weight gradients while those of the inputs travel",
    )
    for option, default, what in (
        ("--forward-s", "1", "a forward"),
        ("--backward-s", "2", "a backward"),
        ("--input-grad-s", None, "its part for the inputs (half)"),
        ("--weight-grad-s", None, "its part for the weights (half)"),
        ("--transfer-s", "0", "a transfer between neighbours"),
    ):
        parser.add_argument(option, default=default, metavar="T", help=f"seconds of {what}")
    parser.add_argument(
        "--transfers", choices=TRANSFERS, default=TRANSFERS[0], help="does a sender stand still?"
    )
    parser.add_argument("--grid", action="store_true", help="the schedule, and nothing else")
    parser.add_argument(
        "--timeline", action="store_true", help="print who computes when, a line for each group"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write the timeline as a Chrome trace, which Perfetto opens"
    )
    parser.add_argument(
        "--figure", metavar="FILE", help="draw the timeline: .png, .svg or .pdf (by matplotlib)"
    )


def run(args: argparse.Namespace) -> int:
    """Make or read a schedule, simulate it, and print what it takes."""
    made = _schedule(args)
    if args.grid:
        from xmesh.pipeline.check import check

        check(made)
        print(made)
        return 0
    if args.figure:
        from xmesh.figure import figure_class

        figure_class()  # said now, and not after the simulation
    options = {
        name: _times(name, getattr(args, name))
        for name in ("forward_s", "backward_s", "input_grad_s", "weight_grad_s")
        if getattr(args, name) is not None
    }
    found = simulate(
        made,
        **options,  # type: ignore[arg-type]
        transfer_s=_transfers(made, _times("transfer_s", args.transfer_s)),
        transfers=args.transfers,
    )
    print(made, "", *_summary(found), sep="\n")
    if args.timeline:
        from xmesh.pipeline.timeline import text_timeline

        print("", *text_timeline(found, shutil.get_terminal_size((160, 0)).columns), sep="\n")
    if args.trace:
        from xmesh.pipeline.timeline import chrome_trace

        _write(args.trace, json.dumps(chrome_trace(found, {"schedule": str(made)})))
        print(f"  wrote {args.trace}: open it at ui.perfetto.dev")
    if args.figure:
        from xmesh.pipeline.timeline import draw

        draw(found, args.figure)
        print(f"  wrote {args.figure}")
    return 0


def _schedule(args: argparse.Namespace) -> PipelineSchedule:
    if args.schedule in SCHEDULES:
        if args.stages is None or args.microbatches is None:
            raise _refuse("a schedule by name needs --stages and --microbatches", args.schedule)
        return schedule(
            args.schedule,
            args.stages,
            args.microbatches,
            weight_delay=args.weight_delay,
            chunks=args.chunks,
        )
    for option in ("stages", "microbatches", "chunks", "weight_delay"):
        if getattr(args, option):
            raise _refuse(
                "a schedule from a file says all of this itself",
                f"{args.schedule} --{option.replace('_', '-')}",
            )
    try:
        text = sys.stdin.read() if args.schedule == "-" else Path(args.schedule).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            explain(
                f"a schedule is one of {', '.join(SCHEDULES)}, or a file that can be read",
                values=str(error),
                remedy="write one by: xmesh pipeline 1f1b --stages 2 --microbatches 4 --grid",
            )
        ) from error
    return PipelineSchedule.parse(text)


def _times(name: str, text: str) -> list[float]:
    """The numbers in ``"1"`` or ``"1,2,1"``."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        option = f"--{name.replace('_', '-')}"
        raise _refuse("times are seconds with commas between them", f"{option} {text}") from None


def _transfers(made: PipelineSchedule, seconds: list[float]) -> float | dict[str, float]:
    """Seconds of all edges between neighbours, or of each."""
    if len(seconds) == 1:
        return seconds[0]
    names = [edge.name for edge in chain(made.num_stages)]
    if len(seconds) != len(names):
        raise _refuse(
            f"--transfer-s is one time, or one time for each of {len(names)} edges",
            ",".join(map(str, seconds)),
        )
    return dict(zip(names, seconds, strict=True))


def _summary(found: PipelineSimulation) -> list[str]:
    made = found.schedule
    lines = [f"  makespan  {found.makespan_s:.6g} s"]
    share = f", {found.bubble_s / found.makespan_s:.1%} of the makespan" if found.makespan_s else ""
    lines.append(f"  bubble    {found.bubble_s:.6g} s{share}")
    rows: list[tuple[str, ...]] = []
    for group in range(made.num_groups):
        row = [
            str(group),
            ",".join(map(str, made.stages_of_group(group))),
            f"{found.busy_s[group]:.6g} s",
            f"{found.peak_activations[group]:.6g}",
        ]
        if found.peak_nbytes is not None:
            row.append(nbytes_text(found.peak_nbytes[group]))
        rows.append(tuple(row))
    header = ["group", "stages", "computes", "peak activations", "peak memory"][: len(rows[0])]
    return [*lines, "", *table_lines(header, rows, "><>>>"[: len(header)])]


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refuse("--trace must name a file that can be written", str(error)) from error


def _refuse(rule: str, values: str) -> OptionError:
    return OptionError(
        explain(rule, values=values, remedy="xmesh pipeline --help shows how to write it")
    )
