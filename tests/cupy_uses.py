"""What xmesh's own sources use of CuPy: names, and how they are called; found by reading them.

Variables are told by their names: `runtime` is `cupy.cuda.runtime`, `handle` a communicator.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

XMESH = Path(__file__).resolve().parents[1] / "xmesh"

#: Last names of expressions that stand for something of CuPy.
ROOTS = {
    **dict.fromkeys(("cupy", "_cupy"), ""),
    "cuda": "cuda",
    "runtime": "cuda.runtime",
    **dict.fromkeys(("nccl", "_nccl"), "cuda.nccl"),
    "handle": "cuda.nccl.NcclCommunicator",
    **dict.fromkeys(("stream", "lane", "outgoing", "incoming", "ours"), "cuda.Stream"),
    "event": "cuda.Event",
}
#: Roots that are variables only: as attributes they belong to `cupy`, or to something of xmesh's.
MODULES = {"cuda", "runtime", "nccl"}
#: Where `_cupy` is no module but the kind of arrays that CuPy makes.
NOT_CUPY = {"_Other"}


class Use(NamedTuple):
    """One place.

    Attributes:
        where: file and line.
        name: below `cupy`.
        call: number of positional arguments, and names of the others; None where it is not called.
    """

    where: str
    name: str
    call: tuple[int, tuple[str, ...]] | None


def sources() -> list[Path]:
    return [
        *sorted((XMESH / "device").glob("*.py")),
        *sorted((XMESH / "nccl").glob("*.py")),
        XMESH / "transport" / "cuda_aware.py",
        XMESH / "like.py",
    ]


def uses_of(source: str, where: str) -> Iterator[Use]:
    """All of a source's uses."""
    tree = ast.parse(source)
    nodes = [node for top in tree.body if not _other(top) for node in ast.walk(top)]
    aliases = dict(_aliases(nodes))
    called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if not isinstance(node, (ast.Attribute, ast.Name)):
            continue
        call = called.get(id(node))
        if isinstance(node, ast.Name):
            names = aliases.get(node.id, []) if call is not None else []
        else:
            names = [name for name in [_name(node)] if name is not None]
        for name in names:
            yield Use(f"{where}:{node.lineno}", name, None if call is None else _arguments(call))


def _other(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and node.name in NOT_CUPY


def _aliases(nodes: list[ast.AST]) -> Iterator[tuple[str, list[str]]]:
    """Variables that are one of several functions."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            found = [_name(each) for each in (node.value.body, node.value.orelse)]
            for target in node.targets:
                if isinstance(target, ast.Name) and None not in found:
                    yield target.id, [name for name in found if name is not None]


def _name(node: ast.expr) -> str | None:
    """The name below `cupy` that an expression stands for, if it does and is not `cupy` itself."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        if words and node.attr in ROOTS and node.attr not in MODULES:
            return ".".join(filter(None, [ROOTS[node.attr], *words]))
        words.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in ROOTS and words:
        return ".".join(filter(None, [ROOTS[node.id], *words]))
    return None


def _arguments(call: ast.Call) -> tuple[int, tuple[str, ...]] | None:
    if any(isinstance(each, ast.Starred) for each in call.args):
        return None
    return len(call.args), tuple(each.arg or "**" for each in call.keywords)
