"""What a rank hands to a call: checked against the plan, then seen as plain elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmesh.box import Box
from xmesh.device.array import DeviceArray
from xmesh.dtypes import dtype_name
from xmesh.errors import ArrayError, explain
from xmesh.interop import AnyArray, as_memory
from xmesh.like import NUMPY, Kind
from xmesh.planner.plans import Plan
from xmesh.program import Program


def check_local(
    plan: Plan, program: Program, local: Any, device: int | None = None
) -> list[AnyArray]:
    """The source arrays of a rank, one for each box that it holds.

    Args:
        plan: says what the rank holds.
        program: of the rank whose argument it is.
        local: an array; a sequence of arrays where the rank holds several boxes; None on ranks
            that hold nothing.
        device: ordinal of the GPU that device arrays must lie on; None for any.

    Raises:
        ArrayError: something else than that, the wrong dtype or shape, or the wrong GPU.
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
    return _check(plan, rank, "local", local, boxes, program.held_shapes, device)


def check_out(
    plan: Plan, program: Program, out: Any, kind: Kind = NUMPY, device: int | None = None
) -> list[AnyArray]:
    """The destination arrays of a rank: those passed as ``out``, or new ones.

    Args:
        plan: says what the rank needs.
        program: of the rank whose argument it is.
        out: as ``local`` of ``check_local``; None for new arrays.
        kind: of new arrays.
        device: as for ``check_local``.

    Raises:
        ArrayError: wrong dtype, shape or GPU, not writable, or given on a rank that needs nothing.
    """
    rank, boxes = program.rank, program.needed
    if out is None:
        try:
            return kind.empty(program.needed_shapes, plan.dtype)
        except ArrayError as error:
            raise ArrayError(f"{error}\n  context: {_where(plan, rank)}") from error
    if not boxes:
        raise ArrayError(
            explain(
                "a rank outside the destination layout passes out=None",
                values=f"{type(out).__name__}",
                context=_where(plan, rank, f"destination ranks {_some(plan.dst.ranks)}"),
                remedy="pass out only on ranks of the destination mesh",
            )
        )
    arrays = _check(plan, rank, "out", out, boxes, program.needed_shapes, device)
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
        addresses = _addresses(array)
        if not _writable(array):
            raise ArrayError(
                explain(
                    "out must be writable",
                    values=f"a read-only array of shape {array.shape}",
                    context=_where(plan, rank),
                    remedy="pass an array that owns its memory, of a library whose arrays may be "
                    "written to and which lends them by DLPack 1.0 or later, or leave out=None",
                )
            )
        if 0 in addresses.strides and addresses.size and _repeats(addresses):
            raise ArrayError(
                explain(
                    "each element of out must have memory of its own",
                    values=f"shape {array.shape} with strides {addresses.strides}",
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
    plan: Plan, rank: int, sources: Sequence[AnyArray], outs: Sequence[AnyArray]
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


def check_same_memory(
    plan: Plan, rank: int, sources: Sequence[AnyArray], outs: Sequence[AnyArray]
) -> None:
    """Refuse an ``out``, given or new, in another memory than ``local``.

    Raises:
        ArrayError: one lies in host memory and one on a GPU, or on two GPUs.
    """
    pair = _apart([*sources, *outs])
    if pair is not None:
        raise ArrayError(
            explain(
                "local and out of a rank must lie in the same memory",
                values=f"local {_place(pair[0])}, out {_place(pair[1])}",
                context=_where(plan, rank),
                remedy="pass both on the host or both on one GPU; like= says where new arrays lie",
            )
        )


def _apart(arrays: Sequence[AnyArray]) -> tuple[AnyArray, AnyArray] | None:
    """Two arrays that are known to lie in different memories; without elements they lie in none."""
    first: AnyArray | None = None
    for array in arrays:
        if type(array) is np.ndarray and type(first) is not DeviceArray:
            first = array if array.size else first
            continue
        if not _addresses(array).size:
            continue
        if first is not None and not _same_place(first, array):
            return first, array
        if first is None or (isinstance(first, DeviceArray) and first.device < 0):
            first = array
    return None


def _same_place(first: AnyArray, second: AnyArray) -> bool:
    if isinstance(first, DeviceArray) and isinstance(second, DeviceArray):
        return first.device == second.device or min(first.device, second.device) < 0
    return isinstance(first, DeviceArray) == isinstance(second, DeviceArray)


def _place(array: AnyArray) -> str:
    if not isinstance(array, DeviceArray):
        return "in host memory"
    return f"on GPU {array.device}" if array.device >= 0 else "in device memory"


def _addresses(array: AnyArray) -> NDArray[Any]:
    return array.addresses if isinstance(array, DeviceArray) else array


def _writable(array: AnyArray) -> bool:
    return array.writable if isinstance(array, DeviceArray) else array.flags.writeable


def overlap(some: Sequence[AnyArray], others: Sequence[AnyArray]) -> bool:
    """Some element is in an array of both."""
    return any(_overlap(one, other) for one in some for other in others)


def _overlap(one: AnyArray, other: AnyArray) -> bool:
    """Some element is in both; also where that would take long to find out."""
    first, second = _addresses(one), _addresses(other)  # no two memories have one address
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
    device: int | None,
) -> list[AnyArray]:
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
    arrays: list[AnyArray] = []
    for item, box, shape in zip(values, boxes, shapes, strict=True):
        array = item
        if type(item) is not np.ndarray:
            try:
                array = as_memory(item, what, writable=what == "out")
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
        if device is not None and isinstance(array, DeviceArray) and array.device != device:
            _require_device(plan, rank, what, array, device)
        arrays.append(array)
    if len(arrays) > 1 and (pair := _apart(arrays)) is not None:
        raise ArrayError(
            explain(
                f"arrays of {what} must all lie in one memory",
                values=f"one {_place(pair[0])}, one {_place(pair[1])}",
                context=_where(plan, rank),
                remedy="pass them all on the host, or all on one GPU",
            )
        )
    return arrays


def check_device(plan: Plan, rank: int, arrays: Sequence[AnyArray], device: int) -> None:
    """Refuse arrays on another GPU than this rank's.

    Raises:
        ArrayError: one lies elsewhere.
    """
    for array in arrays:
        if isinstance(array, DeviceArray) and array.device != device:
            _require_device(plan, rank, "an array", array, device)


def _require_device(plan: Plan, rank: int, what: str, array: DeviceArray, device: int) -> None:
    if array.device >= 0 and array.addresses.size:  # -1: its library does not say
        raise ArrayError(
            explain(
                f"{what} must lie on this rank's GPU",
                values=f"it lies on GPU {array.device}, this rank's is GPU {device}",
                context=_where(plan, rank),
                remedy="copy it to that GPU, or set the device before arrays are made",
            )
        )


def _where(plan: Plan, rank: int, more: str = "") -> str:
    text = f"rank {rank}, tensor {plan.name!r}, {plan.src} -> {plan.dst}"
    return f"{text}; {more}" if more else text


def _boxes(boxes: Sequence[Box]) -> str:
    return " ".join(map(str, boxes[:4])) + (" ..." if len(boxes) > 4 else "")


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
