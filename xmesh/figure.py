"""Timelines as figures, by matplotlib, which is imported here alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmesh.errors import OptionError, explain
from xmesh.planner.plans import Plan
from xmesh.planner.simulate import Simulation
from xmesh.timeline import busiest_nics, by_lane, crossing, lane_names, utilisation

#: Messages that are drawn one by one; a picture with more is a blur, and takes minutes.
MAX_BARS = 50_000
_BINS = 400


def draw(plan: Plan, simulation: Simulation, path: str, most: int = 16) -> str:
    """Draw who sends and receives when, and how busy all NICs are over time.

    Args:
        plan: what was simulated.
        simulation: of it.
        path: the file; its ending says which format, .png, .svg or .pdf for example.
        most: NICs with bars of their own, the busiest; each has one row for what it sends and one
            for what it receives, and a colour for each transfer.

    Returns:
        What was left out, in words; empty when nothing was.

    Raises:
        OptionError: matplotlib is not installed, or cannot write the file.
    """
    kind = figure_class()
    topology = plan.topology
    end_s = simulation.makespan_s
    messages = crossing(simulation.messages, topology, plan.cost)
    nics = busiest_nics(simulation, most)
    rows = by_lane(messages, topology, nics)
    names = lane_names(nics, topology)
    height = 2.6 + 0.22 * max(len(rows), 4)
    figure = kind(figsize=(11, height), layout="constrained")
    bars, load = figure.subplots(2, 1, sharex=True, height_ratios=[height - 2.6, 1.4])
    orders = sorted({message.order for message in simulation.messages})
    colour = {order: f"C{i % 10}" for i, order in enumerate(orders)}
    unit, factor = time_unit(end_s)
    left = MAX_BARS
    for place, found in enumerate(rows.values()):
        shown = found[: max(left, 0)]
        left -= len(found)
        bars.broken_barh(
            [(m.start_s * factor, (m.end_s - m.start_s) * factor) for m in shown],
            (place - 0.42, 0.84),
            facecolors=[colour[m.order] for m in shown],
            edgecolor="white",
            linewidth=0.2 if len(shown) < 200 else 0,
        )
    labels = [f"{names[lane.nic]} {'in' if lane.incoming else 'out'}" for lane in rows]
    bars.set_yticks(range(len(rows)), labels, fontsize=7)
    bars.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    bars.set_title(
        f"{plan.src.describe()} -> {plan.dst.describe()}, {plan.strategy}, simulated", fontsize=9
    )
    middles = [(i + 0.5) * end_s * factor / _BINS for i in range(_BINS)]
    for incoming, text in ((False, "NICs that send"), (True, "NICs that receive")):
        share = utilisation(messages, topology, plan.cost, end_s, _BINS, incoming)
        load.plot(middles, share, label=text, linewidth=1, linestyle="--" if incoming else "-")
    load.axvline(plan.lower_bound_s * factor, color="grey", linestyle=":", label="lower bound")
    load.axvline(end_s * factor, color="black", linewidth=0.8, label="end, inside hosts too")
    load.set_xlim(left=0)
    load.set_ylim(0, 1.05)
    load.set_ylabel("bytes per second,\nof the possible", fontsize=8)
    load.set_xlabel(f"time [{unit}]")
    load.legend(fontsize=7, loc="lower left", ncols=4)
    save_figure(figure, path)
    total = sum(s > 0 for s in map(max, simulation.nic_out_busy_s, simulation.nic_in_busy_s))
    texts = []
    if total > len(nics):
        texts.append(f"the {len(nics)} busiest of {total:,} NICs have rows")
    if left < 0:
        texts.append(f"{-left:,} messages of the last rows are not drawn")
    return "; ".join(texts)


def figure_class() -> Any:
    """Matplotlib's ``Figure``.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        # The Figure alone, without pyplot: no window system is asked for, Agg or SVG by file name.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            explain(
                "figures need matplotlib",
                values=str(error),
                remedy="pip install 'xmesh[figures]', or write a --trace for ui.perfetto.dev",
            )
        ) from error
    return Figure


def save_figure(figure: Any, path: str) -> None:
    """Write a figure in the format that the name of the file ends in.

    Raises:
        OptionError: it cannot be written.
    """
    try:
        figure.savefig(Path(path), dpi=150)
    except (OSError, ValueError) as error:
        raise OptionError(
            explain(
                "--figure must name a file that can be written, of a kind that matplotlib knows",
                values=str(error),
                remedy="choose a folder that is there and yours, and end the name in .png or .svg",
            )
        ) from error


def time_unit(span_s: float) -> tuple[str, float]:
    """A unit in which a span of seconds reads well, and how many of it make a second."""
    return ("s", 1.0) if span_s >= 1 else ("ms", 1e3) if span_s >= 1e-3 else ("us", 1e6)
