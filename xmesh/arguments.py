"""What a rank hands to a call: checked against the plan, then seen as plain elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmesh.arrays import host_array
from xmesh.box import Box
from xmesh.dtypes import dtype_name
from xmesh.errors import ArrayError, explain
from xmesh.planner.plans import Plan
from xmesh.program import Program


def check_local(plan: Plan, program: Program, local: Any) -> list[NDArray[Any]]:
    """The source arrays of a rank, one for each box that it holds.

    Args:
        plan: says what the rank holds.
        program: of the rank whose argument it is.
        local: an array; a sequence of arrays where the rank holds several boxes; None on ranks
            that hold nothing.

    Raises:
        ArrayError: something else than that, or the wrong dtype or shape.
    """
    rank, boxes = program.rank, program.held
    if local is None and all(box.empty for box in boxes):
        return [np.empty(box.shape, plan.dtype) for box in boxes]
    if not boxes:
        raise ArrayError(
            explain(
                "a rank outside the source layout passes None",
                values=f"{type(local).__name__}",
                context=_where(plan, rank, f"source ranks {_some(plan.src.ranks)}"),
                remedy="pass the array only on ranks of the source mesh",
            )
        )
    if local is None:
        raise ArrayError(
            explain(
                "a source rank must pass its local array",
                values="None",
                context=_where(plan, rank, f"holds {_boxes(boxes)}"),
                remedy=f"pass an array of shape {boxes[0].shape} and dtype {plan.dtype}",
            )
        )
    return _check(plan, rank, "local", local, boxes, program.held_shapes)


def check_out(plan: Plan, program: Program, out: Any) -> list[NDArray[Any]]:
    """The destination arrays of a rank: those passed as ``out``, or new ones.

    Raises:
        ArrayError: wrong dtype or shape, not writable, or given on a rank that needs nothing.
    """
    rank, boxes = program.rank, program.needed
    if out is None:
        return [np.empty(shape, plan.dtype) for shape in program.needed_shapes]
    if not boxes:
        raise ArrayError(
            explain(
                "a rank outside the destination layout passes out=None",
                values=f"{type(out).__name__}",
                context=_where(plan, rank, f"destination ranks {_some(plan.dst.ranks)}"),
                remedy="pass out only on ranks of the destination mesh",
            )
        )
    arrays = _check(plan, rank, "out", out, boxes, program.needed_shapes)
    for i, array in enumerate(arrays):
        if i and any(_overlap(array, other) for other in arrays[:i]):
            raise ArrayError(
                explain(
                    "arrays of out must not share memory with each other",
                    values=f"array {i} of shape {array.shape} shares memory with one before it",
                    context=_where(plan, rank),
                    remedy="pass another array for each box, or leave out=None",
                )
            )
        if not array.flags.writeable:
            raise ArrayError(
                explain(
                    "out must be writable",
                    values=f"a read-only array of shape {array.shape}",
                    context=_where(plan, rank),
                    remedy="pass an array that owns its memory, or leave out=None",
                )
            )
        if 0 in array.strides and array.size and _repeats(array):
            raise ArrayError(
                explain(
                    "each element of out must have memory of its own",
                    values=f"shape {array.shape} with strides {array.strides}",
                    context=_where(plan, rank),
                    remedy="pass an array that was not broadcast, or leave out=None",
                )
            )
    return arrays


def _repeats(array: NDArray[Any]) -> bool:
    return any(stride == 0 and n > 1 for stride, n in zip(array.strides, array.shape, strict=True))


def sinks(plan: Plan, program: Program) -> list[NDArray[Any]]:
    """Arrays of the right shapes that take no memory: all their elements are one and the same."""
    cell = np.empty((), plan.dtype)
    return [
        np.lib.stride_tricks.as_strided(cell, box.shape, (0,) * box.ndim) for box in program.needed
    ]


def check_overlap(
    plan: Plan, rank: int, sources: Sequence[NDArray[Any]], outs: Sequence[NDArray[Any]]
) -> None:
    """Refuse an ``out`` that shares memory with ``local``: it would change while it is sent.

    Raises:
        ArrayError: they share memory.
    """
    for source in sources:
        for out in outs:
            if _overlap(source, out):
                raise ArrayError(
                    explain(
                        "out must not share memory with local",
                        values=f"local of shape {source.shape}, out of shape {out.shape}",
                        context=_where(plan, rank),
                        remedy="pass another buffer, or leave out=None",
                    )
                )


def _overlap(first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Some element is in both; also where that would take long to find out."""
    if not (first.size and second.size and np.may_share_memory(first, second)):
        return False
    effort: Any = 10_000  # the type stubs know of none and all only
    try:
        # Two columns of one array lie in each other's bounds without sharing an element.
        return np.shares_memory(first, second, max_work=effort)
    except RuntimeError:  # numpy.exceptions.TooHardError
        return True


def _check(
    plan: Plan,
    rank: int,
    what: str,
    value: Any,
    boxes: Sequence[Box],
    shapes: Sequence[tuple[int, ...]],
) -> list[NDArray[Any]]:
    if len(boxes) == 1:
        values: Sequence[Any] = [value]
    elif isinstance(value, (list, tuple)) and len(value) == len(boxes):
        values = value
    else:
        given = f"{len(value)} arrays" if isinstance(value, (list, tuple)) else type(value).__name__
        raise ArrayError(
            explain(
                f"{what} must be a sequence of one array for each box of the rank",
                values=given,
                context=_where(plan, rank, f"its {len(boxes)} boxes: {_boxes(boxes)}"),
                remedy="pass the arrays in the order of layout.boxes(rank)",
            )
        )
    arrays = []
    for item, box, shape in zip(values, boxes, shapes, strict=True):
        array = item
        if type(item) is not np.ndarray:
            try:
                array = host_array(item, what, writable=what == "out")
            except ArrayError as error:
                raise ArrayError(f"{error}\n  context: {_where(plan, rank)}") from None
        if array.dtype != plan.dtype:
            raise ArrayError(
                explain(
                    f"{what} must have the dtype of the plan",
                    values=f"{dtype_name(array.dtype)}, the plan has {dtype_name(plan.dtype)}",
                    context=_where(plan, rank),
                    remedy="convert it with astype, or plan for its dtype",
                )
            )
        if array.shape != shape:
            raise ArrayError(
                explain(
                    f"{what} must have the shape of the rank's box",
                    values=f"shape {array.shape}, the layout gives {box.shape} for {box}",
                    context=_where(plan, rank),
                    remedy="pass layout.local_shape(rank) elements; halos and padding must be cut",
                )
            )
        arrays.append(array)
    return arrays


def _where(plan: Plan, rank: int, more: str = "") -> str:
    text = f"rank {rank}, tensor {plan.name!r}, {plan.src} -> {plan.dst}"
    return f"{text}; {more}" if more else text


def _boxes(boxes: Sequence[Box]) -> str:
    return " ".join(map(str, boxes[:4])) + (" ..." if len(boxes) > 4 else "")


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
