"""Which messages each computation needs and makes, over the edges of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xmesh.pipeline.action import Action
from xmesh.pipeline.edges import Edge, chain, check_edges
from xmesh.pipeline.schedule import PipelineSchedule

Program = tuple[tuple[Action, ...], ...]
"""All that each stage group does, in order."""


class Message(NamedTuple):
    """What one SEND, its RECV and its WAIT are about."""

    edge: str
    microbatch: int
    sender: int
    receiver: int

    def action(self, op: str) -> Action:
        """The SEND, RECV or WAIT of it."""
        stage = self.sender if op == "SEND" else self.receiver
        return Action(op, stage, self.microbatch, self.edge)


class Wiring:
    """What each computation receives and sends, for the edges of a pipeline.

    Args:
        schedule: which computations there are.
        edges: None for a chain of the stages.

    Raises:
        ScheduleError: edges that make no pipeline of these stages.
    """

    def __init__(self, schedule: PipelineSchedule, edges: Sequence[Edge] | None = None) -> None:
        self.schedule = schedule
        self.edges = tuple(chain(schedule.num_stages) if edges is None else edges)
        check_edges(self.edges, schedule.num_stages)
        self._by_name = {edge.name: edge for edge in self.edges}
        self._into: dict[int, list[Edge]] = {}
        self._out_of: dict[int, list[Edge]] = {}
        for edge in self.edges:
            self._into.setdefault(edge.dst_stage, []).append(edge)
            self._out_of.setdefault(edge.src_stage, []).append(edge)

    def needs(self, action: Action) -> list[Message]:
        """Messages that must have come in before a computation."""
        if action.op == "F":
            return [_activation(edge, action) for edge in self._into.get(action.stage, ())]
        if action.op in "BI":
            edges = self._out_of.get(action.stage, ())
            return [_gradient(edge, action) for edge in edges if edge.differentiable]
        return []

    def makes(self, action: Action) -> list[Message]:
        """Messages that a computation gives."""
        if action.op == "F":
            return [_activation(edge, action) for edge in self._out_of.get(action.stage, ())]
        if action.op in "BI":
            edges = self._into.get(action.stage, ())
            return [_gradient(edge, action) for edge in edges if edge.differentiable]
        return []

    def message(self, action: Action) -> Message | None:
        """What a SEND, RECV or WAIT is about; None when its edge is not one of its stage's."""
        edge = self._by_name.get(action.edge)
        if edge is None or action.stage not in (edge.src_stage, edge.dst_stage):
            return None
        forward = (action.op == "SEND") == (action.stage == edge.src_stage)
        return (_activation if forward else _gradient)(edge, action)

    def edge(self, message: Message) -> Edge:
        """The edge of a message."""
        return self._by_name[message.edge]

    def link(self, message: Message) -> tuple[int, int]:
        """Groups that a message leaves and enters."""
        home = self.schedule.group_of_stage
        return home(message.sender), home(message.receiver)


def _activation(edge: Edge, action: Action) -> Message:
    return Message(edge.name, action.microbatch, edge.src_stage, edge.dst_stage)


def _gradient(edge: Edge, action: Action) -> Message:
    return Message(edge.name, action.microbatch, edge.dst_stage, edge.src_stage)
