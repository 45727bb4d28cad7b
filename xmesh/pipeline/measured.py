"""What a step really did: times of its computations and transfers, gathered on one clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xmesh.clocks import now_s, read_clock, to_axis
from xmesh.errors import OptionError, explain
from xmesh.pipeline.action import Action
from xmesh.pipeline.memory import peak_activations
from xmesh.pipeline.pipe import Pipeline
from xmesh.pipeline.simulate import PipelineSimulation, PipelineSpan
from xmesh.pipeline.timeline import group_name, trace_of
from xmesh.pipeline.wiring import Message

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.request import Request


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


@dataclass(frozen=True)
class Measured:
    """A step of all ranks, on the clock of rank 0 of the World.

    Attributes:
        pipe: what ran.
        times: rank -> its times, and what takes its clock to that of rank 0.
        error_s: clocks are compared up to this.
    """

    pipe: Pipeline
    times: dict[int, tuple[Times, float]]
    error_s: float

    @property
    def zero_s(self) -> float:
        """When the first rank began."""
        return min(times.began_s + shift_s for times, shift_s in self.times.values())

    def timeline(self) -> PipelineSimulation:
        """The step as the first rank of each group saw it, in the form of a simulation."""
        schedule = self.pipe.schedule
        first = [
            self.pipe.stages[schedule.stages_of_group(group)[0]].ranks[0]
            for group in range(schedule.num_groups)
        ]
        found = [self.times[rank] for rank in first]
        spans = [span for rank in first for span in self.spans(rank)]
        spans.sort(key=lambda span: (span.start_s, span.group))
        busy: dict[tuple[int, int], float] = {}
        for span in spans:
            if span.peer is not None:
                link = span.group, span.peer
                busy[link] = busy.get(link, 0.0) + span.end_s - span.start_s
        return PipelineSimulation(
            schedule=schedule,
            makespan_s=max(times.ended_s + shift_s for times, shift_s in found) - self.zero_s,
            busy_s=tuple(
                sum(ended - began for _, began, ended in times.computed) for times, _ in found
            ),
            peak_activations=peak_activations(schedule),
            peak_nbytes=None,
            link_busy_s=busy,
            timeline=tuple(spans),
        )

    def spans(self, rank: int) -> list[PipelineSpan]:
        """What one rank computed and sent.

        A transfer lasts from when the rank started it to when the first rank of the group that it
        goes to saw that it was over.
        """
        times, shift_s = self.times[rank]
        shift_s -= self.zero_s
        group = self.pipe.group_of_rank(rank)
        assert group is not None
        spans = [
            PipelineSpan(began_s + shift_s, ended_s + shift_s, group, action)
            for action, began_s, ended_s in times.computed
        ]
        for message, at_s in times.started.items():
            source, destination = self.pipe.wiring.link(message)
            receiver = self.pipe.stages[message.receiver].ranks[0]
            there, other_s = self.times[receiver]
            if source == group != destination and message in there.over:
                end_s = there.over[message] + other_s - self.zero_s
                begin_s = min(at_s + shift_s, end_s)
                action = message.action("SEND")
                spans.append(PipelineSpan(begin_s, end_s, group, action, destination))
        return spans

    def chrome_trace(self) -> dict[str, Any]:
        """All ranks as a Chrome trace: a process for each, its threads compute and send."""
        schedule = self.pipe.schedule
        processes = {}
        for rank in sorted(self.times):
            group = self.pipe.group_of_rank(rank)
            assert group is not None
            processes[f"rank {rank}, {group_name(schedule, group)}"] = self.spans(rank)
        run = self.timeline()
        return trace_of(
            processes,
            {
                "schedule": schedule.name,
                "measured_s": run.makespan_s,
                "overlap": run.overlap,
                "clock_error_bound_s": self.error_s,
            },
        )


def gather(pipe: Pipeline, comm: MPI.Intracomm, recorder: Recorder | None) -> Measured | None:
    """The last step of all ranks, on rank 0; all ranks call it.

    Raises:
        OptionError: on all ranks: a rank of the pipeline has recorded nothing.
    """
    private = comm.Dup()
    try:
        reading = read_clock(private)
        shift_s = to_axis([reading])(0.0)
        mine = None
        if recorder is not None and recorder.times.ended_s:
            mine = recorder.times
        missing = private.allgather(mine is None)
        everyone = private.gather((mine, shift_s, reading.error_s))
    finally:
        private.Free()
    absent = [rank for rank in pipe.ranks if missing[rank]]
    if absent:
        raise OptionError(
            explain(
                "a step must have been recorded",
                values=f"rank {absent[0]} has no times",
                remedy="make the Driver with record=True, and call step before",
            )
        )
    if everyone is None:
        return None
    times = {
        rank: (found, shift)
        for rank, (found, shift, _) in enumerate(everyone)
        if found is not None and rank in pipe.ranks
    }
    return Measured(pipe, times, max(error_s for *_, error_s in everyone))
