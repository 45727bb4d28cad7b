"""The notation of sharding specs: a printer, and a parser that points at what it cannot read.

The notation is the paper's ("Sharding spec"): one ``R`` or ``S`` per array dimension, an ``S``
followed by the mesh axes that cut it, major first. Grammar::

    spec      = [dimension {[","] dimension}]        white space between dimensions is free
    dimension = "R" | "S" ["^"] (digit {digit} | "{" axes "}")
    axes      = digit {digit} | axis {"," axis} [","]
    axis      = number | name

Digits without a comma are axes of one digit each (``S01``, ``S{10}``: one, then zero); with a
comma they are whole numbers (``S{10,11}``), so axis ten alone is ``S{10,}``.
"""

from __future__ import annotations

from collections.abc import Iterator

from xmesh.errors import SpecError, explain

Axis = int | str
"""A mesh axis: its index or its name."""

_DIGITS = "0123456789"


def format_dimension(entry: tuple[Axis, ...]) -> str:
    """The canonical text of a dimension cut by the axes of ``entry``, major first."""
    if not entry:
        return "R"
    if all(isinstance(axis, int) and axis < 10 for axis in entry):
        return "S" + "".join(map(str, entry))
    # A comma says that digits are one number; a lone axis 10 needs it as a 1-tuple does.
    comma = "," if len(entry) == 1 and isinstance(entry[0], int) else ""
    return "S{" + ",".join(map(str, entry)) + comma + "}"


def caret(text: str, place: int) -> str:
    """The text, and under it a caret that points at ``place``."""
    # White space other than blanks would push the caret away from its place.
    line = "".join(" " if c.isspace() else c for c in text)
    return f"{line}\n{' ' * place}^"


def _refuse(text: str, place: int, rule: str, remedy: str) -> SpecError:
    return SpecError(explain(rule, values=caret(text, place), remedy=remedy))


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def parse_dimensions(text: str) -> Iterator[list[tuple[Axis, int]]]:
    """Read a spec: for each dimension, the axes that cut it, each with its place in the text.

    Whether the axes go together is not looked at here.

    Raises:
        SpecError: the text cannot be read; the error has a caret under the place.
    """
    place = _skip_space(text, 0)
    while place < len(text):
        letter = text[place]
        if letter == "R":
            place += 1
            yield []
        elif letter == "S":
            entry, place = _cut(text, place)
            yield entry
        else:
            raise _unexpected(text, place)
        place = _skip_space(text, place)
        if place < len(text) and text[place] == ",":
            comma, place = place, _skip_space(text, place + 1)
            if place == len(text) or text[place] == ",":
                raise _refuse(
                    text,
                    comma if place == len(text) else place,
                    "a comma stands between two dimensions",
                    "drop the comma, or write the missing dimension as R or S...",
                )


def _unexpected(text: str, place: int) -> SpecError:
    letter = text[place]
    if letter in "rs":
        return _refuse(
            text, place, "R and S are upper case", f"write {letter.upper()} for {letter}"
        )
    remedy = 'write one R or S per dimension, for example "S01 R" or "S{dp,tp} R"'
    if letter in _DIGITS:
        remedy = "axes stand right after their S, without a space, and R takes none"
    elif letter in "{}^":
        remedy = 'braces and ^ stand right after an S, for example "S{0,1} R" or "S^{01} R"'
    elif letter in "()'\"":
        remedy = 'a JAX-style tuple is passed as a tuple, not as text: ("dp", None)'
    return _refuse(text, place, "a dimension begins with R or S", remedy)


def _cut(text: str, start: int) -> tuple[list[tuple[Axis, int]], int]:
    """The axes of the S at ``start``, with their places, and the place after them."""
    place = start + 1
    if text[place : place + 1] == "^":
        place += 1
    if text[place : place + 1] == "{":
        close = text.find("}", place)
        if close < 0 or "{" in text[place + 1 : close]:
            raise _refuse(text, place, "a brace must be closed", "write } after the last axis")
        return _braced(text, place + 1, close), close + 1
    end = place
    while end < len(text) and text[end] in _DIGITS:
        end += 1
    if end == place:
        raise _refuse(
            text,
            place if text[place : place + 1].strip() else start,
            "S needs the mesh axes that cut the dimension",
            "write S0, S01 or S{dp,tp}; a dimension that no axis cuts is R",
        )
    return [(int(text[i]), i) for i in range(place, end)], end


def _braced(text: str, start: int, stop: int) -> list[tuple[Axis, int]]:
    body = text[start:stop]
    if not body.strip():
        raise _refuse(
            text, start, "braces hold at least one axis", "a dimension that no axis cuts is R"
        )
    if all(c in _DIGITS for c in body.strip()):
        return [(int(c), start + i) for i, c in enumerate(body) if c in _DIGITS]
    entry: list[tuple[Axis, int]] = []
    place = start
    pieces = body.split(",")
    if len(pieces) > 1 and not pieces[-1].strip():
        pieces.pop()  # the comma that makes digits one number: S{10,}
    for piece in pieces:
        name = piece.strip()
        here = _skip_space(text, place)
        if name and all(c in _DIGITS for c in name):
            entry.append((int(name), here))
        elif name.isidentifier():
            entry.append((name, here))
        else:
            raise _refuse(
                text,
                min(here, stop),
                "an axis is an index or a name",
                "separate axes by commas; a name is an identifier such as dp",
            )
        place += len(piece) + 1
    return entry
