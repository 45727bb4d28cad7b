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

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence

from xmesh.errors import OptionError, explain
from xmesh.pipeline.action import Action, program_lines
from xmesh.pipeline.edges import Edge
from xmesh.pipeline.rendezvous import stuck_at
from xmesh.pipeline.schedule import PipelineSchedule
from xmesh.pipeline.wiring import Message, Program, Wiring

#: Receives that a group keeps posted for each edge, at the least: one comes in, one is next.
WINDOW = 2


def lower(
    schedule: PipelineSchedule, edges: Sequence[Edge] | None = None, *, window: int | None = None
) -> Program:
    """All actions of each stage group.

    Args:
        schedule: what they compute.
        edges: what goes between stages; None for a chain of the stages.
        window: receives that a group keeps posted for each edge, which bounds its buffers. None
            takes ``WINDOW``, or as many as the schedule needs to run with zero buffering. With 0 a
            receive is posted when it is waited for, which is slow, and often ends in a deadlock.

    Between two stages of one group, RECV stands right before SEND: a resharding within one mesh
    starts as a whole.

    Returns:
        One tuple for each group. Nothing is checked here but the edges: ``check`` does the rest.

    Raises:
        ScheduleError: edges that make no pipeline of these stages.
        OptionError: a negative window.
    """
    if window is not None and window < 0:
        raise OptionError(
            explain("window is an int >= 0", values=f"{window}", remedy="leave it out")
        )
    wiring = Wiring(schedule, edges)
    incoming = _incoming(wiring)
    longest = max((len(queue) for queues in incoming for queue in queues.values()), default=0)
    width = WINDOW if window is None else window
    while True:
        program = tuple(
            tuple(_lower_group(wiring, group, incoming[group], width))
            for group in range(schedule.num_groups)
        )
        # Where posting everything would not help, the schedule itself is at fault.
        if window is not None or width >= longest or not stuck_at(program, wiring):
            return program
        width *= 2


def program_digest(program: Program, edges: Sequence[Edge]) -> bytes:
    """SHA-256 of a program and its edges: ranks that would run another one have another."""
    lines = [*map(repr, edges), *program_lines(program)]
    return hashlib.sha256("\n".join(lines).encode()).digest()


def _incoming(wiring: Wiring) -> list[dict[int, list[Message]]]:
    """For each group the messages from each other group, in the order in which it sends them."""
    queues: list[dict[int, list[Message]]] = [{} for _ in wiring.schedule.groups]
    for actions in wiring.schedule.groups:
        for action in actions:
            for message in wiring.makes(action):
                sender, receiver = wiring.link(message)
                if sender != receiver:
                    queues[receiver].setdefault(sender, []).append(message)
    return queues


def _lower_group(
    wiring: Wiring, group: int, incoming: dict[int, list[Message]], window: int
) -> Iterator[Action]:
    queues = {source: deque(messages) for source, messages in incoming.items()}
    posted: set[Message] = set()  # and not yet waited for
    within: set[Message] = set()  # posted, between stages of this group

    def post(source: int, wanted: Message | None = None) -> Iterator[Action]:
        """Post receives of a link until ``wanted`` is among them, or the next edge has enough."""
        queue = queues.get(source)
        while queue and (
            wanted not in posted
            if wanted is not None
            else sum(message.edge == queue[0].edge for message in posted) < window
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
            elif message not in within:  # made later, or never: `check` says who waits for whom
                within.add(message)
                yield message.action("RECV")
        for message in needs:
            posted.discard(message)
            yield message.action("WAIT")
        for source in dict.fromkeys(sources):
            yield from post(source)
        yield action
        for message in wiring.makes(action):
            if wiring.link(message) == (group, group) and message not in within:
                within.add(message)
                yield message.action("RECV")
            yield message.action("SEND")
        if last[action.stage, action.microbatch] == place:
            yield Action("FREE", action.stage, action.microbatch)
    if not wiring.schedule.forward_only:
        for stage in wiring.schedule.stages_of_group(group):
            yield Action("REDUCE", stage)
