"""Runs of schedules, simulated or measured: in characters, as a Chrome trace, as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xmesh.figure import figure_class, save_figure, time_unit
from xmesh.pipeline.schedule import PipelineSchedule
from xmesh.pipeline.simulate import PipelineSimulation, PipelineSpan
from xmesh.report import apart, metadata_event

#: What fills the rest of a computation in characters.
_FILL = {"F": "-", "B": "=", "I": "=", "W": "~"}
_COLOUR = {"F": "C0", "B": "C2", "I": "C1", "W": "C4", "SEND": "C7"}
_MEANING = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "SEND": "transfer",
}
_MICROSECONDS = 1e6


def text_timeline(simulation: PipelineSimulation, width: int = 160) -> list[str]:
    """A line for each group over time: ``F3--B0=====``, blank where the group waits.

    Args:
        simulation: what to draw.
        width: characters of a line, at the most; where few, names shrink to their ops.
    """
    spans = [span for span in simulation.timeline if span.peer is None]
    shortest_s = min((s.end_s - s.start_s for s in spans if s.end_s > s.start_s), default=0)
    end_s = simulation.makespan_s
    if shortest_s == 0:
        return ["  nothing takes any time"]
    names = max(len(_name(span)) for span in spans)
    head = len(str(simulation.schedule.num_groups)) + 2
    columns = max(10, min(width - head, round(end_s / shortest_s * (names + 1))))
    rows = [[" "] * columns for _ in range(simulation.schedule.num_groups)]
    for span in spans:
        first, stop = (round(columns * t / end_s) for t in (span.start_s, span.end_s))
        name = _name(span) if len(_name(span)) <= stop - first else span.action.op
        rows[span.group][first:stop] = name.ljust(stop - first, _FILL[span.action.op])[
            : stop - first
        ]
    lines = [f"{g:>{head - 2}}: {''.join(row).rstrip()}" for g, row in enumerate(rows)]
    return [*lines, f"{'':{head}}0{f'{float(end_s):.6g} s':>{columns - 1}}"]


def _name(span: PipelineSpan) -> str:
    """Op and micro-batch."""
    return f"{span.action.op}{span.action.microbatch}"


def chrome_trace(
    simulation: PipelineSimulation, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A run as a process for each stage group: a thread computes, one sends to each other group.

    Args:
        simulation: what ran.
        about: what a reader should know, kept as the trace's ``otherData``.

    Returns:
        Plain data for ``json.dump``; times in microseconds, as the format asks.
    """
    schedule = simulation.schedule
    processes = {
        group_name(schedule, group): [span for span in simulation.timeline if span.group == group]
        for group in range(schedule.num_groups)
    }
    return trace_of(processes, about)


def group_name(schedule: PipelineSchedule, group: int) -> str:
    """What traces call a group."""
    return f"group {group} (stage {', '.join(map(str, schedule.stages_of_group(group)))})"


def trace_of(
    processes: Mapping[str, Sequence[PipelineSpan]], about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Spans as a Chrome trace: a process for each name, its threads compute and send.

    Args:
        processes: name -> what it does.
        about: what a reader should know, kept as the trace's ``otherData``.
    """
    events: list[dict[str, Any]] = []
    thread = 0
    for process, (title, spans) in enumerate(processes.items(), start=1):
        events.append(metadata_event("process_name", process, 0, name=title))
        events.append(metadata_event("process_sort_index", process, 0, sort_index=process))
        for peer in sorted({-1 if span.peer is None else span.peer for span in spans}):
            mine = [span for span in spans if peer == (-1 if span.peer is None else span.peer)]
            # The format has no place for transfers that overlap on a thread.
            for row in apart(mine):
                thread += 1
                name = f"to group {peer}" if peer >= 0 else "compute"
                events.append(metadata_event("thread_name", process, thread, name=name))
                events.append(
                    metadata_event("thread_sort_index", process, thread, sort_index=thread)
                )
                events += [_event(span, process, thread) for span in row]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}


def _event(span: PipelineSpan, process: int, thread: int) -> dict[str, Any]:
    action = span.action
    return {
        "name": str(action),
        "cat": _MEANING[action.op],
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": float(span.start_s) * _MICROSECONDS,
        "dur": float(span.end_s - span.start_s) * _MICROSECONDS,
        "args": {
            "stage": action.stage,
            "microbatch": action.microbatch,
            **({"edge": action.edge} if action.edge else {}),
        },
    }


def draw(simulation: PipelineSimulation, path: str, kind: str = "simulated") -> None:
    """Draw a row for what each group computes and one for what it sends.

    Args:
        simulation: what to draw.
        path: the file; its ending says which format, .png, .svg or .pdf for example.
        kind: what the title calls it: "measured" for what ``Driver.measured`` gives.

    Raises:
        OptionError: matplotlib is not installed, or cannot write the file.
    """
    made = figure_class()
    schedule = simulation.schedule
    unit, factor = time_unit(float(simulation.makespan_s))
    figure = made(figsize=(11, 1.4 + 0.5 * schedule.num_groups), layout="constrained")
    axes = figure.subplots()
    for op, colour in _COLOUR.items():
        spans = [span for span in simulation.timeline if span.action.op == op]
        for group in {span.group for span in spans}:
            mine = [span for span in spans if span.group == group]
            axes.broken_barh(
                [(float(s.start_s) * factor, float(s.end_s - s.start_s) * factor) for s in mine],
                (group + 0.32, 0.14) if op == "SEND" else (group - 0.42, 0.7),
                facecolor=colour,
                edgecolor="white",
                linewidth=0.3 if len(mine) < 200 else 0,
                alpha=0.6 if op == "SEND" else 1,
            )
            for span in mine if op != "SEND" and len(mine) <= 32 else ():
                middle = float(span.start_s + span.end_s) / 2 * factor
                label = str(span.action.microbatch)
                axes.text(middle, group - 0.07, label, fontsize=6, ha="center", va="center")
        if spans:
            axes.plot([], [], color=colour, linewidth=6, label=_MEANING[op])
    axes.set_yticks(
        range(schedule.num_groups), [f"group {g}" for g in range(schedule.num_groups)], fontsize=7
    )
    axes.set_ylim(schedule.num_groups - 0.4, -0.6)
    axes.set_xlim(0, float(simulation.makespan_s) * factor or 1)
    axes.set_xlabel(f"time [{unit}]")
    axes.set_title(
        f"{schedule.name}, {schedule.num_stages} stages, {schedule.num_microbatches} "
        f"micro-batches, {kind}",
        fontsize=9,
    )
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=5)
    save_figure(figure, path)
