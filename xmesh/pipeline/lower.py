"""From what stage groups compute to all that they do: sends, receives, waits, frees, reductions.

Around each computation a group does, in this order:

1. WAIT for what it needs; its RECV was posted before;
2. RECV, posting as many receives again as were waited for: the next message then comes in while the
   group computes, and no send stands behind a receive that it has nothing to do with, since all
   sends that were ready have started;
3. the computation;
4. SEND what it made: activations after F, gradients after B or I, before W begins;
5. FREE, when nobody uses the micro-batch any more.

Receives are posted link by link in the order in which the other side sends, so links may be FIFO.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xmesh.errors import OptionError, explain
from xmesh.pipeline.action import Action
from xmesh.pipeline.edges import Edge, chain, check_edges
from xmesh.pipeline.schedule import PipelineSchedule

#: Receives that a group keeps posted for each link. Eager 1F1B sends two micro-batches ahead.
WINDOW = 3

Program = tuple[tuple[Action, ...], ...]


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


def lower(
    schedule: PipelineSchedule, edges: Sequence[Edge] | None = None, *, window: int = WINDOW
) -> Program:
    """All actions of each stage group.

    Args:
        schedule: what they compute.
        edges: what goes between stages; None for a chain of the stages.
        window: receives that a group keeps posted for each link. With 0 a receive is posted when
            it is waited for, which is slow, and with zero buffering often never ends. Between two
            stages of one group, RECV stands right before SEND: a resharding within one mesh starts
            as a whole.

    Returns:
        One tuple for each group. Nothing is checked here but the edges: ``check`` does the rest.

    Raises:
        ScheduleError: edges that make no pipeline of these stages.
        OptionError: a negative window.
    """
    if window < 0:
        raise OptionError(
            explain("window is an int >= 0", values=f"{window}", remedy=f"leave it at {WINDOW}")
        )
    wiring = Wiring(schedule, edges)
    return tuple(tuple(_lower_group(wiring, group, window)) for group in range(schedule.num_groups))


def _incoming(wiring: Wiring, group: int) -> dict[int, deque[Message]]:
    """Messages from each other group, in the order in which it sends them."""
    queues: dict[int, deque[Message]] = {}
    for other, actions in enumerate(wiring.schedule.groups):
        if other == group:
            continue
        for action in actions:
            for message in wiring.makes(action):
                if wiring.link(message)[1] == group:
                    queues.setdefault(other, deque()).append(message)
    return queues


def _lower_group(wiring: Wiring, group: int, window: int) -> Iterator[Action]:
    queues = _incoming(wiring, group)
    posted: set[Message] = set()  # and not yet waited for

    def post(source: int, wanted: Message | None = None) -> Iterator[Action]:
        """Post the receives of a link until ``wanted`` is among them, or the window is full."""
        queue = queues.get(source)
        while queue and (
            wanted not in posted
            if wanted is not None
            else sum(wiring.link(message)[0] == source for message in posted) < window
        ):
            message = queue.popleft()
            posted.add(message)
            yield message.action("RECV")

    for source in queues:
        yield from post(source)
    actions = wiring.schedule.groups[group]
    last = {(action.stage, action.microbatch): place for place, action in enumerate(actions)}
    for place, action in enumerate(actions):
        needs = wiring.needs(action)
        sources = [wiring.link(message)[0] for message in needs]
        for source, message in zip(sources, needs, strict=True):
            if source != group:
                yield from post(source, message)
        for message in needs:
            posted.discard(message)
            yield message.action("WAIT")
        for source in dict.fromkeys(sources):
            yield from post(source)
        yield action
        for message in wiring.makes(action):
            if wiring.link(message) == (group, group):
                yield message.action("RECV")
            yield message.action("SEND")
        if last[action.stage, action.microbatch] == place:
            yield Action("FREE", action.stage, action.microbatch)
    if not wiring.schedule.forward_only:
        for stage in wiring.schedule.stages_of_group(group):
            yield Action("REDUCE", stage)
