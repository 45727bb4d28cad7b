"""The notations of the command line: shapes, meshes and layouts, read from text.

A mesh is ``(2,4)`` (ranks 0 to 7, row-major), ``(2,4)+8`` (ranks 8 to 15) or all its ranks, as in
``[[0,1],[2,3]]``. A layout is a spec and a mesh: ``S01R@(2,4)``. What cannot be read is shown with
a caret under the place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from xmesh.errors import LayoutError, MeshError, explain
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.notation import caret

_MESH_REMEDY = "write (2,4), (2,4)+8 to begin at rank 8, or every rank: [[0,1],[2,3]]"
_TOKEN = re.compile(r"[0-9]+|\S")


def parse_shape(text: str) -> tuple[int, ...]:
    """The extents in ``"8,16"``, ``"(8, 16)"`` or ``"8x16"``; ``"()"`` is the shape of a scalar.

    Raises:
        LayoutError: the text is no list of ints >= 0.
    """
    inner = text.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1]
    offset = text.find(inner) if inner else 0
    extents = []
    if inner.strip():
        words = re.split("[,x]", inner)
        if len(words) > 1 and not words[-1].strip():
            words.pop()  # as in (8,)
        for word in words:
            if not re.fullmatch(r"\s*[0-9]+\s*", word):
                raise LayoutError(
                    explain(
                        "a shape is extents >= 0 with commas between them",
                        values=caret(text, offset + len(word) - len(word.lstrip())),
                        remedy="write 8,16 for an array of 8 rows and 16 columns",
                    )
                )
            extents.append(int(word))
            offset += len(word) + 1
    return tuple(extents)


def parse_mesh(
    text: str, start: int | None = None, axis_names: Sequence[str] | None = None, offset: int = 0
) -> DeviceMesh:
    """A mesh in one of the notations of this module.

    Args:
        text: what to read; it may have something before the mesh.
        start: first rank of a mesh written as extents alone; default 0.
        axis_names: names for its axes.
        offset: place in ``text`` where the mesh begins.

    Raises:
        MeshError: the text cannot be read, or is no mesh.
    """
    body = text[offset:]
    if body.lstrip().startswith("["):
        try:
            ranks = json.loads(body)
        except json.JSONDecodeError as error:
            raise _no_mesh(
                text, offset + error.pos, f"ranks stand in brackets: {error.msg}"
            ) from None
        return DeviceMesh(ranks, axis_names)
    shape, first = _extents(text, offset)
    return DeviceMesh.arange(shape, first if first is not None else start or 0, axis_names)


def parse_layout(
    text: str,
    shape: Sequence[int],
    start: int | None = None,
    uneven: str = "ceil",
    axis_names: Sequence[str] | None = None,
) -> Layout:
    """A layout written as SPEC@MESH.

    Args:
        text: what to read.
        shape: extents of the array.
        start: first rank of a mesh written as extents alone; default 0.
        uneven: rule for extents that do not divide.
        axis_names: names for the mesh's axes.

    Raises:
        LayoutError: no @ in it, or spec and shape do not go together.
        SpecError: the spec cannot be read, or does not fit the mesh.
        MeshError: the mesh cannot be read.
    """
    spec, at, _ = text.partition("@")
    if not at:
        raise LayoutError(
            explain(
                "a layout is a spec and a mesh with @ between them",
                values=caret(text, len(text)),
                remedy="write S01R@(2,4), or R@[[0,1],[2,3]] with every rank",
            )
        )
    mesh = parse_mesh(text, start, axis_names, offset=len(spec) + 1)
    return Layout(mesh, spec, shape, uneven)


def has_start(text: str) -> bool:
    """True when a layout's mesh says itself which ranks it has."""
    return "[" in text or "+" in text


def _extents(text: str, offset: int) -> tuple[tuple[int, ...], int | None]:
    """Shape and first rank of ``(2,4)`` or ``(2,4)+8``."""
    tokens = [(found.start(), found[0]) for found in _TOKEN.finditer(text, offset)]
    tokens.append((len(text.rstrip()), ""))
    rest = iter(tokens)

    def expect(wanted: str, what: str) -> str:
        place, token = next(rest)
        if not re.fullmatch(wanted, token):
            raise _no_mesh(text, place, what)
        return token

    expect(r"\(", "a mesh begins with ( or [")
    shape = [int(expect("[0-9]+", "an axis is an extent >= 1"))]
    while expect(r"[,)]", "extents stand in ( ) with commas between them") == ",":
        token = expect(r"[0-9]+|\)", "an axis is an extent >= 1")
        if token == ")":
            break
        shape.append(int(token))
    first = None
    if expect(r"\+|", "after the extents comes +RANK or nothing") == "+":
        first = int(expect("[0-9]+", "+ is followed by the first rank"))
        expect("", "a mesh ends after its first rank")
    if math.prod(shape) > 2**24:
        raise _no_mesh(
            text, tokens[0][0], f"{math.prod(shape):,} ranks are too many to draw or plan"
        )
    return tuple(shape), first


def _no_mesh(text: str, place: int, rule: str) -> MeshError:
    return MeshError(explain(rule, values=caret(text, place), remedy=_MESH_REMEDY))
