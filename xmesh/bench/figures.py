"""Figures of a cluster's measurements, as PNG and SVG; the only module that imports matplotlib."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmesh.bench.rows import Row
from xmesh.errors import XmeshError, explain
from xmesh.planner.describe import nbytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours that people with any colour vision tell apart (Okabe and Ito), by method.
_COLOURS = {
    "auto": "#000000",
    "broadcast": "#0072B2",
    "broadcast/load_balance": "#56B4E9",
    "broadcast/naive": "#9DD3F5",
    "global_allgather": "#009E73",
    "local_allgather": "#7FD1AE",
    "send_recv": "#D55E00",
    "send_recv/naive": "#F0A070",
    "mpi_alltoallw": "#CC79A7",
    "mpi_bcast": "#8C4A72",
    "mpi_isend": "#E6B8D2",
}
_OTHER = "#999999"
_FORMATS = ("png", "svg")


def require_matplotlib() -> None:
    """Refuse to begin what could not be drawn in the end.

    Raises:
        XmeshError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise XmeshError(
            explain(
                "figures are drawn by matplotlib",
                values="it is not installed",
                remedy="pip install 'xmesh[figures]'",
            )
        )


def draw(n_to_m: Sequence[Row], one_to_m: Sequence[Row], folder: Path, title: str) -> list[Path]:
    """Draw all figures that there are rows for.

    Args:
        n_to_m: rows of ``xmesh bench paper``.
        one_to_m: rows of ``xmesh bench multicast``.
        folder: where the files go; it exists.
        title: of the cluster, above each figure.

    Returns:
        The files.

    Raises:
        XmeshError: no matplotlib.
    """
    require_matplotlib()
    import matplotlib

    files = []
    # Text stays text in an SVG, and the same rows give the same file.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "xmesh", "font.size": 9, "axes.axisbelow": True}
    ):
        if n_to_m:
            files += _save(_bandwidths(n_to_m, title), folder / "n-to-m")
        if any(row.predicted_s is not None for row in (*n_to_m, *one_to_m)):
            files += _save(_predictions(n_to_m, one_to_m, title), folder / "prediction")
        if one_to_m:
            files += _save(_multicasts(one_to_m, title), folder / "one-to-m")
    return files


def _figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display
    figure.suptitle(title, fontsize=11)
    return figure


def _save(figure: Figure, stem: Path) -> list[Path]:
    files = []
    for kind in _FORMATS:
        path = stem.with_suffix(f".{kind}")
        metadata: Mapping[str, Any] = {"Date": None} if kind == "svg" else {}
        figure.savefig(os.fspath(path), dpi=150, metadata=dict(metadata))
        files.append(path)
    return files


def _bandwidths(rows: Sequence[Row], title: str) -> Figure:
    """Small multiples: for each case a bar for each method, as a share of what the NICs allow."""
    cases = list(dict.fromkeys(row.case for row in rows))
    methods = [name for name in _COLOURS if any(row.method == name for row in rows)]
    methods += sorted({row.method for row in rows} - set(methods))
    columns = min(3, len(cases))
    lines = -(-len(cases) // columns)
    height = 0.7 + lines * (0.7 + 0.17 * len(methods))
    sizes = ", ".join(sorted({nbytes_text(row.nbytes) for row in rows}))
    figure = _figure(4 * columns + 1, height, f"{title}\nn to m, arrays of {sizes}")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, case in zip(grid.flat, cases, strict=False):
        own = {row.method: row for row in rows if row.case == case}
        first = next(iter(own.values()))
        axes.set_title(f"{case}: {first.src} \u2192 {first.dst}", fontsize=8, loc="left")
        for place, name in enumerate(methods):
            row = own.get(name)
            if row is None:
                axes.text(
                    0.02, place, "nothing to multicast", va="center", fontsize=6, color=_OTHER
                )
                continue
            share = row.bound_s / row.time_s
            axes.barh(place, share, color=_COLOURS.get(name, _OTHER))
            axes.text(1.24, place, f"{share:.2f}", va="center", ha="right", fontsize=7)
            if row.predicted_s:
                predicted = row.bound_s / row.predicted_s
                axes.plot(predicted, place, "|", color="red", markersize=9, markeredgewidth=1.5)
        _bound(axes)
    for axes in list(grid.flat)[len(cases) :]:
        axes.set_visible(False)
    first_axes = grid.flat[0]
    first_axes.set_yticks(range(len(methods)), methods)
    first_axes.invert_yaxis()
    first_axes.set_xlim(0, 1.25)
    figure.supxlabel(
        "bandwidth reached, as a share of what the NICs allow (dashed line); red: predicted",
        fontsize=9,
    )
    return figure


def _bound(axes: Axes) -> None:
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", linewidth=0.3)


def _multicasts(rows: Sequence[Row], title: str) -> Figure:
    """Time against receivers: measured as bars, the paper's formula and the NIC bound as marks."""
    cases = list(dict.fromkeys(row.case for row in rows))
    methods = [name for name in _COLOURS if any(row.method == name for row in rows)]
    size = nbytes_text(rows[0].nbytes)
    figure = _figure(10, 5, f"{title}\n1 to m, an array of {size}")
    axes = figure.subplots()
    width = 0.85 / len(methods)
    for number, name in enumerate(methods):
        axes.bar(0, 0, color=_COLOURS[name], label=name)  # for the legend
        for row in rows:
            if row.method != name:
                continue
            at = cases.index(row.case) + (number - (len(methods) - 1) / 2) * width
            axes.bar(at, row.time_s / row.bound_s, width * 0.92, color=_COLOURS[name])
            if row.formula_s is not None:
                formula = row.formula_s / row.bound_s
                axes.plot([at - width / 2, at + width / 2], [formula] * 2, color="red", lw=1.5)
    axes.plot([], [], color="red", lw=1.5, label="formula of the paper")
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="NIC bound")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(
        range(len(cases)),
        [str(case).removeprefix("1 to ").replace("x", "\u00d7") for case in cases],
    )
    axes.set_xlabel("receivers: hosts \u00d7 ranks of each")
    axes.set_ylabel("time / NIC bound")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(loc="upper left", fontsize=8, ncols=2)
    return figure


def _predictions(n_to_m: Sequence[Row], one_to_m: Sequence[Row], title: str) -> Figure:
    """Every plan's prediction over what was measured, by method."""
    planned = {row.method for row in (*n_to_m, *one_to_m) if row.predicted_s is not None}
    methods = [name for name in _COLOURS if name in planned]
    figure = _figure(8, 1.4 + 0.4 * len(methods), f"{title}\nprediction / measured, each case")
    axes = figure.subplots()
    axes.axvspan(0.9, 1.1, color="#dddddd", label="within 10 %")
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    for place, name in enumerate(methods):
        for marker, shift, rows, what in (
            ("o", -0.12, n_to_m, "n to m"),
            ("^", 0.12, one_to_m, "1 to m"),
        ):
            ratios = [
                row.predicted_s / row.time_s
                for row in rows
                if row.method == name and row.predicted_s is not None
            ]
            axes.plot(
                ratios,
                [place + shift] * len(ratios),
                marker,
                color=_COLOURS[name],
                markersize=5,
                alpha=0.7,
                label=None if place else what,
            )
    axes.set_yticks(range(len(methods)), methods)
    axes.invert_yaxis()
    axes.set_xlabel("predicted / measured")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", linewidth=0.3)
    axes.legend(loc="upper left", fontsize=8)
    return figure
