"""``xmesh layout``: draw which rank holds which part of an array."""

from __future__ import annotations

import argparse
import colorsys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from xmesh.box import Box
from xmesh.commands.parse import has_start, parse_layout, parse_shape
from xmesh.errors import LayoutError, MeshError, explain
from xmesh.layout import UNEVEN_RULES, Layout
from xmesh.planner.describe import MAX_ROWS, ranks_text, table_lines

if TYPE_CHECKING:
    from rich.console import Console

_EXAMPLE = """\
  xmesh layout "S01R@(2,4)" --shape 8,16
  xmesh layout "S{dp}S{tp}@(2,2)" --axis-names dp,tp --shape 6,6
  xmesh layout "RRS0S1@(2,2)" --shape 4,4,8,8 --dims 2,3 --fix 0=1
"""
#: Rows of boxes that a picture shows, and lines that it takes about.
_MAX_PARTS = 12
_LINES = 16
_GAP = "..."


class Piece(NamedTuple):
    """A piece of a line; ``box`` is the index of the box whose colour it has, -1 for none."""

    text: str
    box: int = -1


Line = list[Piece]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.epilog = _EXAMPLE
    parser.add_argument("layout", metavar="SPEC@MESH", help="mesh: (2,4), (2,4)+8 or [[0,1],[2,3]]")
    parser.add_argument("--shape", required=True, help="extents of the array: 8,16")
    parser.add_argument("--start", type=int, help="first rank of the mesh (0)")
    parser.add_argument(
        "--uneven", default="ceil", choices=UNEVEN_RULES, help="for extents that do not divide"
    )
    parser.add_argument("--axis-names", metavar="A,B", help="names of the mesh's axes")
    parser.add_argument("--dims", metavar="D,E", help="dimensions to draw: down, across (0,1)")
    parser.add_argument(
        "--fix",
        metavar="D=I",
        nargs="+",
        action="extend",
        default=[],
        help="draw at index I of dimension D (0)",
    )
    parser.add_argument("--all", action="store_true", help="list every rank, however many")
    parser.add_argument("--no-color", action="store_true", help="plain text on terminals, too")


def run(args: argparse.Namespace) -> int:
    """Draw and print."""
    from rich.console import Console

    console = Console(highlight=False, no_color=True if args.no_color else None)
    layout = _layout(args)
    dims, at = _slice(args, layout)
    unicode = console.encoding.lower().startswith("utf")
    lines = picture(layout, dims, at, console.width, "─│┌┬┐├┼┤└┴┘" if unicode else "-|+++++++++")
    listed = rank_table(layout, None if args.all else MAX_ROWS)
    _print(console, [[Piece(headline(layout, dims, at))], [], *lines, [], *listed])
    return 0


def headline(layout: Layout, dims: Sequence[int], at: Mapping[int, int]) -> str:
    """The layout in words, and what of it the picture shows."""
    boxes, ranks = len(layout.holders), len(layout.ranks)
    text = (
        f"{layout.describe()}, shape {layout.shape}: {boxes} distinct "
        f"{'box' if boxes == 1 else 'boxes'} on {ranks} {'rank' if ranks == 1 else 'ranks'}"
    )
    if layout.ndim > 2:
        where = [":" if d in dims else str(at[d]) for d in range(layout.ndim)]
        text += f"; drawn: [{', '.join(where)}], dimension {dims[0]} down, {dims[1]} across"
    return text


def picture(
    layout: Layout, dims: Sequence[int], at: Mapping[int, int], width: int, border: str
) -> list[Line]:
    """A slice of a layout as a grid of its boxes, each with the ranks that hold it.

    Boxes are drawn to scale where there is room; rows and columns that do not fit are left out.

    Args:
        layout: what to draw.
        dims: at most two dimensions: down and across; a lone one goes across.
        at: index in every other dimension.
        width: columns of the terminal.
        border: characters to draw with: horizontal, vertical, then corners row by row.
    """
    cells: dict[tuple[tuple[int, int], tuple[int, int]], tuple[int, str]] = {}
    for index, (box, ranks) in enumerate(layout.holders.items()):
        if all(box.start[d] <= i < box.stop[d] for d, i in at.items()):
            spans = [(box.start[d], box.stop[d]) for d in dims]
            down, across = [(0, 1), (0, 1), *spans][-2:]
            cells[down, across] = (index, ranks_text(ranks, most=3))
    if not cells:
        return [[Piece("  no rank holds an element")]]
    rows = sorted({down for down, _ in cells})
    columns = sorted({across for _, across in cells})
    row_rulers = [_span_text(span) if len(dims) == 2 else "" for span in rows]
    column_rulers = [_span_text(span) if dims else "" for span in columns]
    left = max(map(len, row_rulers)) + 2
    least = [
        max(len(ruler), *(len(cells[row, column][1]) for row in rows)) + 2
        for ruler, column in zip(column_rulers, columns, strict=True)
    ]
    widths = _fit([b - a for a, b in columns], least, width - left - 1)
    heights = _heights([b - a for a, b in rows])

    def edge(corners: str) -> Line:
        strokes = [border[0] * w for _, w in widths]
        return [Piece(" " * left + corners[0] + corners[1].join(strokes) + corners[2])]

    ruler = "".join(
        " " + f"{_GAP if c is None else column_rulers[c]:^{w}}" for c, w in widths
    ).rstrip()
    lines: list[Line] = [[Piece(" " * left + ruler)], edge(border[2:5])]
    for r, height in heights:
        for k in range(height):
            middle = k == height // 2
            head = row_rulers[r] if r is not None and middle else ""
            line = [Piece(f"{head:>{left - 1}} {border[1]}")]
            for c, w in widths:
                if r is None or c is None:
                    line.append(Piece(f"{_GAP if middle else '':^{w}}"))
                else:
                    index, label = cells[rows[r], columns[c]]
                    line.append(Piece(f"{label if middle else '':^{w}}", index))
                line.append(Piece(border[1]))
            lines.append(line)
        lines.append(edge(border[5:8]))
    lines[-1] = edge(border[8:11])
    return lines


def rank_table(layout: Layout, most: int | None) -> list[Line]:
    """Rank, place in the mesh, box and local shape, a line each."""
    number = {box: index for index, box in enumerate(layout.holders)}
    mesh = layout.mesh
    names = ",".join(mesh.axis_names or ()) if mesh is not None else ""
    header = ("rank", f"({names})" if names else "place", "box", "local shape")
    ranks = layout.ranks[:most]
    held = [_only(layout.boxes(rank)) for rank in ranks]
    rows = [
        (rank, mesh.coordinates(rank) if mesh is not None else "", box, box.shape)
        for rank, box in zip(ranks, held, strict=True)
    ]
    head, *texts = table_lines(header, rows, "><<<")
    lines = [[Piece(head)]]
    end = 2 + max(len("rank"), *(len(str(rank)) for rank in ranks))
    for box, text in zip(held, texts, strict=True):
        lines.append([Piece("  "), Piece(text[2:end], number.get(box, -1)), Piece(text[end:])])
    if len(ranks) < len(layout.ranks):
        hidden = len(layout.ranks) - len(ranks)
        lines.append([Piece(f"  ... {hidden:,} more (--all lists them)")])
    return lines


def _only(boxes: Sequence[Box]) -> Box:
    return boxes[0]  # a layout of mesh and spec has one box per rank


def _span_text(span: tuple[int, int]) -> str:
    return f"{span[0]}:{span[1]}"


def _fit(extents: Sequence[int], least: Sequence[int], width: int) -> list[tuple[int | None, int]]:
    """Columns to draw and their widths; None stands for those left out in the middle."""
    count = len(extents)
    if sum(least) + count > width:
        most = count - 1
        while most > 2 and _taken(least, most) > width:
            most -= 1
        return [(c, len(_GAP) if c is None else least[c]) for c in _ends_of(count, most)]
    scale = min(4.0, (width - count) / sum(extents))
    widths = [max(w, round(n * scale)) for n, w in zip(extents, least, strict=True)]
    while sum(widths) + count > width:
        widest = max(range(count), key=lambda c: widths[c] - least[c])
        widths[widest] -= 1
    return list(enumerate(widths))


def _taken(least: Sequence[int], most: int) -> int:
    """Width of a picture that shows at most ``most`` columns."""
    shown = _ends_of(len(least), most)
    return sum(len(_GAP) if c is None else least[c] for c in shown) + len(shown)


def _heights(extents: Sequence[int]) -> list[tuple[int | None, int]]:
    """Rows to draw and their heights; None stands for those left out in the middle."""
    scale = min(1.0, _LINES / sum(extents))
    return [
        (r, 1 if r is None else max(1, round(extents[r] * scale)))
        for r in _ends_of(len(extents), _MAX_PARTS)
    ]


def _ends_of(count: int, most: int) -> list[int | None]:
    if count <= most:
        return list(range(count))
    return [*range(-(-most // 2)), None, *range(count - most // 2, count)]


def _layout(args: argparse.Namespace) -> Layout:
    if args.start is not None and has_start(args.layout.partition("@")[2]):
        raise MeshError(
            explain(
                "the first rank is given once",
                values=f"--start {args.start}, and {args.layout!r} says its ranks",
                remedy="leave --start out",
            )
        )
    names = None if args.axis_names is None else args.axis_names.replace(" ", "").split(",")
    return parse_layout(args.layout, parse_shape(args.shape), args.start, args.uneven, names)


def _slice(args: argparse.Namespace, layout: Layout) -> tuple[tuple[int, ...], dict[int, int]]:
    """Dimensions to draw, and the index in each of the others."""
    dims = tuple(range(min(2, layout.ndim)))
    if args.dims is not None:
        words = args.dims.split(",")
        dims = tuple(_dimension(word, layout, f"--dims {args.dims}") for word in words)
        if len(set(dims)) != min(2, layout.ndim) or len(dims) != len(set(dims)):
            raise LayoutError(
                explain(
                    "a picture has two different dimensions, or all that the array has",
                    values=f"--dims {args.dims}, array of {layout.ndim} dimensions",
                    remedy="write --dims 0,1: the first goes down, the second across",
                )
            )
    at = {d: 0 for d in range(layout.ndim) if d not in dims}
    for text in args.fix:
        where = f"--fix {text}"
        name, _, index = text.partition("=")
        d = _dimension(name, layout, where)
        if not index.isdecimal() or not 0 <= int(index) < layout.shape[d] or d in dims:
            raise LayoutError(
                explain(
                    "--fix gives an index of a dimension that is not drawn",
                    values=where,
                    context=f"shape {layout.shape}, dimensions drawn: {dims}",
                    remedy="write --fix 2=3 for index 3 of dimension 2",
                )
            )
        at[d] = int(index)
    return dims, at


def _dimension(word: str, layout: Layout, where: str) -> int:
    if not word.strip().isdecimal() or int(word) >= layout.ndim:
        raise LayoutError(
            explain(
                "a dimension is given by its index",
                values=f"{word!r} in {where}",
                context=f"array of {layout.ndim} dimensions",
                remedy=f"give an index from 0 to {layout.ndim - 1}"
                if layout.ndim
                else "leave it out: a scalar has no dimensions",
            )
        )
    return int(word)


def _print(console: Console, lines: Sequence[Line]) -> None:
    """In colour on a terminal, else as plain text; never wrapped."""
    if not console.is_terminal or console.no_color or console.color_system is None:
        for line in lines:
            print("".join(piece.text for piece in line).rstrip())
        return
    from rich.style import Style
    from rich.text import Text

    styles: dict[int, Style] = {}
    for line in lines:
        text = Text(no_wrap=True, overflow="ignore")
        for piece in line:
            if piece.box >= 0 and piece.box not in styles:
                styles[piece.box] = Style.parse(f"black on {_colour(piece.box)}")
            text.append(piece.text, styles.get(piece.box))
        console.print(text, crop=False)


def _colour(index: int) -> str:
    # Steps of the golden ratio never come back to a hue, and keep neighbours apart.
    hue = index * 0.6180339887 % 1
    lightness = (0.62, 0.78, 0.70)[index % 3]
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.65)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
