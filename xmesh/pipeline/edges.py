"""Edges: the reshardings between stages of a pipeline, each with a name, a shape and two specs."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmesh.dtypes import as_dtype
from xmesh.errors import ScheduleError, explain
from xmesh.pipeline.action import EDGE_NAME
from xmesh.spec import ShardingSpec


@dataclass(frozen=True)
class Edge:
    """An array that goes from one stage to another with every micro-batch.

    The activation goes from source to destination after the source's forward; its gradient comes
    back after the destination's backward, cut as the activation was. Stages need not be neighbours.

    Args:
        name: what schedules and error texts call it; unique, without white space, ``(``, ``)``,
            ``:`` and ``#``.
        src_stage: the stage that makes the activation.
        dst_stage: the stage that needs it.
        src: how it is cut over the mesh of the source; None where only the schedule is of interest.
        dst: how it is cut over the mesh of the destination.
        shape: extents of the activation of one micro-batch.
        dtype: its elements.
        differentiable: a gradient comes back; False for masks and labels.

    Raises:
        ScheduleError: a name that cannot be written, a stage that is its own neighbour, a shape
            that does not go with the specs.
        SpecError: a spec that cannot be read.
        PlanError: no such dtype.
    """

    name: str
    src_stage: int
    dst_stage: int
    src: ShardingSpec | str | None = None
    dst: ShardingSpec | str | None = None
    shape: tuple[int, ...] | None = None
    dtype: Any = "float32"
    differentiable: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(EDGE_NAME, self.name):
            raise self._refuse("an edge has a name that a schedule can print", f"{self.name!r}")
        try:
            stages = operator.index(self.src_stage), operator.index(self.dst_stage)
        except TypeError:
            stages = (-1, -1)
        if min(stages) < 0 or stages[0] == stages[1]:
            raise self._refuse(
                "an edge goes from one stage to another, each an int >= 0",
                f"from {self.src_stage!r} to {self.dst_stage!r}",
            )
        ends = {
            end: ShardingSpec.coerce(spec)
            for end, spec in (("src", self.src), ("dst", self.dst))
            if spec is not None
        }
        if self.shape is not None:
            shape = tuple(operator.index(extent) for extent in self.shape)
            if min(shape, default=0) < 0:
                raise self._refuse("extents are >= 0", f"shape {shape}")
            object.__setattr__(self, "shape", shape)
            for end, spec in ends.items():
                if spec.ndim != len(shape):
                    raise self._refuse(
                        "spec and shape have as many dimensions as each other",
                        f"{end} {spec} and shape {shape}",
                    )
        for end, spec in ends.items():
            object.__setattr__(self, end, spec)
        object.__setattr__(self, "dtype", as_dtype(self.dtype))

    def _refuse(self, rule: str, values: str) -> ScheduleError:
        return ScheduleError(
            explain(
                rule,
                values=values,
                context=f"edge {self.name!r}",
                remedy='for example Edge("hidden", 0, 1, src="S0RR", dst="S0RR", shape=(8, 64, 9))',
            )
        )

    @property
    def nbytes(self) -> int | None:
        """Bytes of the activation of a micro-batch, all shards together; None without a shape."""
        if self.shape is None:
            return None
        return math.prod(self.shape) * int(np.dtype(self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.name}: {self.src_stage} -> {self.dst_stage}"


def chain(num_stages: int) -> tuple[Edge, ...]:
    """An edge from every stage to the next, named ``0-1``, ``1-2`` and so on, of no shape."""
    return tuple(Edge(f"{i}-{i + 1}", i, i + 1) for i in range(num_stages - 1))


def check_edges(edges: Sequence[Edge], num_stages: int) -> None:
    """Raise unless edges have different names, stages that exist, and no way round in a circle.

    Raises:
        ScheduleError: naming the edges.
    """
    seen: dict[str, Edge] = {}
    for edge in edges:
        if edge.name in seen:
            raise _bad("every edge has a name of its own", f"{seen[edge.name]} and {edge}")
        seen[edge.name] = edge
        if max(edge.src_stage, edge.dst_stage) >= num_stages:
            raise _bad(f"stages are numbered 0 to {num_stages - 1}", str(edge))
    # Take away stages that nothing leads to, until none is left: what stays goes in a circle.
    rest = list(edges)
    while rest:
        entered = {edge.dst_stage for edge in rest}
        kept = [edge for edge in rest if edge.src_stage in entered]
        if len(kept) == len(rest):
            raise _bad(
                "activations go forward: no edges lead back to where they came from",
                ", ".join(map(str, rest)),
            )
        rest = kept


def _bad(rule: str, values: str) -> ScheduleError:
    return ScheduleError(
        explain(rule, values=values, remedy="an edge is a name, its source stage, its destination")
    )
