"""What a step really did: times of its computations and transfers, gathered on one clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xmesh.clocks import now_s, read_clock, to_axis
from xmesh.errors import OptionError, explain
from xmesh.pipeline.action import Action
from xmesh.pipeline.memory import peak_activations
from xmesh.pipeline.pipe import Pipeline
from xmesh.pipeline.simulate import PipelineSimulation, PipelineSpan
from xmesh.pipeline.wiring import Message

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.resharder import Request


@dataclass
class Times:
    """Of one rank in one step, by its own clock.

    Attributes:
        began_s: when it began.
        ended_s: when all was computed, and all that was sent had left.
        computed: (action, from, to).
        started: message -> when this rank started it, as a sender or as a receiver.
        over: message -> when this rank saw that it was over.
    """

    began_s: float = 0.0
    ended_s: float = 0.0
    computed: list[tuple[Action, float, float]] = field(default_factory=list)
    started: dict[Message, float] = field(default_factory=dict)
    over: dict[Message, float] = field(default_factory=dict)


class Recorder:
    """Notes the times of the current step; those of the one before are dropped."""

    def __init__(self) -> None:
        self.times = Times()

    def begin(self) -> None:
        """A step begins."""
        self.times = Times(began_s=now_s())

    def end(self) -> None:
        """All is computed and sent."""
        self.times.ended_s = now_s()

    def computed(self, action: Action, began_s: float, ended_s: float) -> None:
        """A callback has ended."""
        self.times.computed.append((action, began_s, ended_s))

    def started(self, message: Message, request: Request) -> None:
        """A transfer was started; the request will say when it is over."""
        times = self.times
        times.started[message] = now_s()
        request.when_over(lambda: times.over.setdefault(message, now_s()))


def gather(
    pipe: Pipeline, comm: MPI.Intracomm, recorder: Recorder | None
) -> PipelineSimulation | None:
    """A step as the first rank of each group saw it, on rank 0; all ranks call it.

    A transfer lasts from the moment when its sender started it to the one when its receiver saw
    that it was over.

    Raises:
        OptionError: on all ranks: a rank that is asked for has recorded nothing.
    """
    private = comm.Dup()
    try:
        reading = read_clock(private)
        axis = to_axis([reading])
        mine = None
        if recorder is not None and recorder.times.ended_s:
            mine = recorder.times, axis(recorder.times.began_s) - recorder.times.began_s
        everyone = private.allgather(mine)
    finally:
        private.Free()
    first = [
        pipe.stages[pipe.schedule.stages_of_group(group)[0]].ranks[0]
        for group in range(pipe.schedule.num_groups)
    ]
    found = [everyone[rank] for rank in first]
    missing = [rank for rank in first if everyone[rank] is None]
    if missing:
        raise OptionError(
            explain(
                "a step must have been recorded",
                values=f"rank {missing[0]} has no times",
                remedy="make the Driver with record=True, and call step before",
            )
        )
    return _timeline(pipe, [each for each in found if each is not None]) if not comm.rank else None


def _timeline(pipe: Pipeline, found: list[tuple[Times, float]]) -> PipelineSimulation:
    """Spans of all groups, from the moment when the first of them began."""
    zero_s = min(times.began_s + shift_s for times, shift_s in found)
    spans = []
    over: dict[Message, float] = {}
    for times, shift_s in found:
        for message, at_s in times.over.items():
            over[message] = max(over.get(message, at_s + shift_s), at_s + shift_s)
    for group, (times, shift_s) in enumerate(found):
        shift_s -= zero_s
        for action, began_s, ended_s in times.computed:
            spans.append(PipelineSpan(began_s + shift_s, ended_s + shift_s, group, action))
        for message, at_s in times.started.items():
            source, destination = pipe.wiring.link(message)
            if source == group != destination and message in over:
                action = message.action("SEND")
                end_s = over[message] - zero_s
                spans.append(
                    PipelineSpan(min(at_s + shift_s, end_s), end_s, group, action, destination)
                )
    spans.sort(key=lambda span: (span.start_s, span.group))
    busy: dict[tuple[int, int], float] = {}
    for span in spans:
        if span.peer is not None:
            link = span.group, span.peer
            busy[link] = busy.get(link, 0.0) + span.end_s - span.start_s
    return PipelineSimulation(
        schedule=pipe.schedule,
        makespan_s=max(times.ended_s + shift_s for times, shift_s in found) - zero_s,
        busy_s=tuple(
            sum(ended - began for _, began, ended in times.computed) for times, _ in found
        ),
        peak_activations=peak_activations(pipe.schedule),
        peak_nbytes=None,
        link_busy_s=busy,
        timeline=tuple(spans),
    )
