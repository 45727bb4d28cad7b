"""What a schedule takes: every computation and transfer, when nothing disturbs it.

Groups do their actions in order. A link joins two groups, one for each direction, and carries one
message at a time in the order in which they were sent; a transfer starts when it was sent, its
receive is posted, and the link is free.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from xmesh.errors import OptionError, explain
from xmesh.pipeline.action import Action
from xmesh.pipeline.check import check_order, check_program
from xmesh.pipeline.edges import Edge
from xmesh.pipeline.lower import lower
from xmesh.pipeline.memory import peak_activations, peak_nbytes
from xmesh.pipeline.schedule import PipelineSchedule
from xmesh.pipeline.wiring import Message, Program, Wiring

#: "async": a group goes on while its messages travel; "blocking": it stands until each has arrived.
TRANSFERS = ("async", "blocking")

_OPTION = {"F": "forward_s", "B": "backward_s", "I": "input_grad_s", "W": "weight_grad_s"}

PerStage = float | Sequence[float]
PerEdge = float | Mapping[str, float | tuple[float, float]]


class PipelineSpan(NamedTuple):
    """A computation or a transfer, from when to when.

    Attributes:
        start_s: seconds from the start of the run.
        end_s: the same.
        group: the stage group that computes or sends.
        action: F, B, I or W; or the SEND.
        peer: the group that a transfer goes to; None for a computation.
    """

    start_s: float
    end_s: float
    group: int
    action: Action
    peer: int | None = None


@dataclass(frozen=True)
class PipelineSimulation:
    """A simulated run of a schedule.

    Attributes:
        schedule: what ran.
        makespan_s: from the start to the end of the last computation or transfer, in seconds.
        busy_s: seconds that each group computes.
        peak_activations: micro-batches whose activations a group holds at one time, at the most.
        peak_nbytes: bytes of activations and receive buffers of each group, at the most; None
            where neither was told.
        link_busy_s: (sending, receiving group) -> seconds in which messages travel.
        timeline: all computations and transfers that take any time, by start.
    """

    schedule: PipelineSchedule
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_activations: tuple[float, ...]
    peak_nbytes: tuple[int, ...] | None
    link_busy_s: Mapping[tuple[int, int], float]
    timeline: tuple[PipelineSpan, ...]

    @property
    def bubble_s(self) -> float:
        """Makespan less the time that the busiest group computes, in seconds."""
        return self.makespan_s - max(self.busy_s)

    @property
    def overlap(self) -> float:
        """Of all the time that transfers take, the part in which their receivers compute.

        1 when all is hidden, or nothing moves.
        """
        total = hidden = 0.0
        for sent in self.timeline:
            if sent.peer is not None:
                total += sent.end_s - sent.start_s
                hidden += sum(
                    max(0.0, min(sent.end_s, span.end_s) - max(sent.start_s, span.start_s))
                    for span in self.timeline
                    if span.peer is None and span.group == sent.peer
                )
        return hidden / total if total else 1.0


def simulate(
    schedule: PipelineSchedule,
    edges: Sequence[Edge] | None = None,
    *,
    forward_s: PerStage = 1,
    backward_s: PerStage = 2,
    input_grad_s: PerStage | None = None,
    weight_grad_s: PerStage | None = None,
    transfer_s: PerEdge = 0,
    transfers: str = "async",
    activation_nbytes: int | Sequence[int] | None = None,
    window: int | None = None,
) -> PipelineSimulation:
    """Run a schedule on an ideal machine.

    Times are for one micro-batch: one number for all, or one for each stage. Where groups have
    several stages (chunks), one number, or one for each group, is the time of the whole group, of
    which each of its stages takes an equal part; schedules then compare at the same work.
    Arithmetic is that of the numbers given: ints stay ints, fractions stay fractions.

    Args:
        schedule: what each group computes.
        edges: what goes between stages; None for a chain of the stages.
        forward_s: seconds of F.
        backward_s: seconds of B.
        input_grad_s: seconds of I; by default what ``weight_grad_s`` leaves of ``backward_s``, or
            half of it.
        weight_grad_s: seconds of W; by default what I leaves of B.
        transfer_s: seconds of every transfer between groups, or by name of the edge: one number,
            or a pair for activation and gradient. Edges not named, and transfers within a group,
            take none.
        transfers: one of ``TRANSFERS``.
        activation_nbytes: bytes that F of a stage keeps for its backward, for ``peak_nbytes``.
        window: as for ``lower``.

    Raises:
        ScheduleError: the schedule cannot run.
        OptionError: times of no meaning.
    """
    check_order(schedule)
    wiring = Wiring(schedule, edges)
    program = lower(schedule, wiring.edges, window=window)
    check_program(schedule, program, wiring)
    if transfers not in TRANSFERS:
        raise _refuse(f"transfers are {' or '.join(TRANSFERS)}", f"{transfers!r}")
    given = {"F": forward_s, "B": backward_s, "I": input_grad_s, "W": weight_grad_s}
    compute_s = {
        op: _seconds(schedule, _OPTION[op], value)
        for op, value in given.items()
        if value is not None
    }
    for op, other in (("I", "W"), ("W", "I")):
        if op not in compute_s:
            compute_s[op] = _rest(compute_s["B"], compute_s.get(other))
    run = _Run(program, wiring, compute_s, _per_edge(wiring, transfer_s), transfers == "blocking")
    nbytes = None
    if activation_nbytes is not None or any(edge.nbytes is not None for edge in wiring.edges):
        kept, _ = _per_stage(
            schedule, "activation_nbytes", 0 if activation_nbytes is None else activation_nbytes
        )
        nbytes = peak_nbytes(program, wiring, [operator.index(count) for count in kept])
    busy: list[float] = [0] * len(program)
    links: dict[tuple[int, int], float] = {}
    for span in run.spans:
        if span.peer is None:
            busy[span.group] += span.end_s - span.start_s
        else:
            link = span.group, span.peer
            links[link] = links.get(link, 0) + span.end_s - span.start_s
    return PipelineSimulation(
        schedule,
        max((span.end_s for span in run.spans), default=0),
        tuple(busy),
        peak_activations(schedule),
        nbytes,
        links,
        tuple(sorted(run.spans, key=lambda span: (span.start_s, span.end_s, span.group))),
    )


class _Run:
    """The run itself: ``spans`` is what happened."""

    def __init__(
        self,
        program: Program,
        wiring: Wiring,
        compute_s: Mapping[str, Sequence[float]],
        transfer_s: Mapping[str, tuple[float, float]],
        blocking: bool,
    ) -> None:
        self.spans: list[PipelineSpan] = []
        self._wiring = wiring
        self._transfer_s = transfer_s
        self._sent_s: dict[Message, float] = {}
        self._posted_s: dict[Message, float] = {}
        self._arrived_s: dict[Message, float] = {}
        self._queues: dict[tuple[int, int], deque[Message]] = {}
        self._free_s: dict[tuple[int, int], float] = {}
        # Each group goes as far as what arrived lets it. A link has one sender, so the order of its
        # messages is known whoever goes first, and times need no common clock.
        active = [
            self._follow(g, actions, compute_s, blocking) for g, actions in enumerate(program)
        ]
        while active:
            # A generator yields where it must wait, and ends when it is done.
            active = [steps for steps in active if next(steps, None) is not None]

    def _follow(
        self,
        group: int,
        actions: Sequence[Action],
        compute_s: Mapping[str, Sequence[float]],
        blocking: bool,
    ) -> Iterator[Action]:
        now_s: float = 0
        for action in actions:
            if action.computes:
                end_s = now_s + compute_s[action.op][action.stage]
                self.spans.append(PipelineSpan(now_s, end_s, group, action))
                now_s = end_s
            message = self._wiring.message(action)
            if message is None:
                continue
            if action.op == "SEND":
                self._sent_s[message] = now_s
                self._queues.setdefault(self._wiring.link(message), deque()).append(message)
            elif action.op == "RECV":
                self._posted_s[message] = now_s
            if action.op != "WAIT":
                self._start(self._wiring.link(message))
            if action.op == "WAIT" or (action.op == "SEND" and blocking):
                while message not in self._arrived_s:
                    yield action
                now_s = max(now_s, self._arrived_s[message])

    def _start(self, link: tuple[int, int]) -> None:
        """Start the messages at the head of a link's queue that are sent and posted."""
        queue = self._queues.get(link)
        while queue and queue[0] in self._posted_s:
            message = queue.popleft()
            start_s = max(self._sent_s[message], self._posted_s[message], self._free_s.get(link, 0))
            edge = self._wiring.edge(message)
            duration_s: float = 0
            if link[0] != link[1]:
                duration_s = self._transfer_s[edge.name][message.sender != edge.src_stage]
            end_s = start_s + duration_s
            self._arrived_s[message] = self._free_s[link] = end_s
            if duration_s:
                self.spans.append(
                    PipelineSpan(start_s, end_s, link[0], message.action("SEND"), link[1])
                )


def _rest(whole: Sequence[float], part: Sequence[float] | None) -> list[float]:
    """What a part leaves of each, half of it where there is none."""
    if part is None:
        return [seconds / 2 for seconds in whole]
    return [max(total - seconds, 0) for total, seconds in zip(whole, part, strict=True)]


def _per_stage(schedule: PipelineSchedule, name: str, value: Any) -> tuple[list[Any], bool]:
    """One number for each stage, and whether they were given for groups."""
    given = list(value) if hasattr(value, "__len__") else [value]
    if len(given) == schedule.num_stages:
        return given, False
    if len(given) == schedule.num_groups:
        home = schedule.group_of_stage
        return [given[home(stage)] for stage in range(schedule.num_stages)], True
    if len(given) == 1:
        return given * schedule.num_stages, True
    raise _refuse(
        f"{name} is one number, or one for each of {schedule.num_stages} stages", f"{value}"
    )


def _seconds(schedule: PipelineSchedule, name: str, value: PerStage) -> list[float]:
    """Seconds of each stage; the stages of a group share what is said of it."""
    seconds, of_groups = _per_stage(schedule, name, value)
    for stage, duration_s in enumerate(seconds):
        _require_time(name, duration_s)
        parts = len(schedule.stages_of_group(schedule.group_of_stage(stage)))
        if of_groups and parts > 1:
            seconds[stage] = duration_s / parts
    return seconds


def _per_edge(wiring: Wiring, value: PerEdge) -> dict[str, tuple[float, float]]:
    """Seconds of each edge, forward and back."""
    if not isinstance(value, Mapping):
        _require_time("transfer_s", value)
        return {edge.name: (value, value) for edge in wiring.edges}
    names = [edge.name for edge in wiring.edges]
    unknown = [name for name in value if name not in names]
    if unknown:
        raise _refuse(f"transfer_s names edges: {', '.join(names)}", ", ".join(map(str, unknown)))
    seconds: dict[str, tuple[float, float]] = dict.fromkeys(names, (0, 0))
    for name, given in value.items():
        pair = tuple(given) if isinstance(given, Sequence) else (given, given)
        if len(pair) != 2:
            raise _refuse("an edge takes one time, or one forward and one back", f"{name}: {given}")
        for duration_s in pair:
            _require_time(f"transfer_s[{name!r}]", duration_s)
        seconds[name] = pair
    return seconds


def _require_time(name: str, duration_s: Any) -> None:
    try:
        good = 0 <= duration_s < float("inf")
    except TypeError:
        good = False
    if not good:
        raise _refuse(f"{name} is in seconds, 0 or more", f"{duration_s!r}")


def _refuse(rule: str, values: str) -> OptionError:
    return OptionError(explain(rule, values=values, remedy="for example forward_s=1, backward_s=2"))
