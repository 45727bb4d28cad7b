"""PipelineSchedule: in which order each stage group computes; pure data that prints and parses."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from xmesh.errors import ScheduleError, explain
from xmesh.notation import caret
from xmesh.pipeline.action import Action, parse_program, program_lines

if TYPE_CHECKING:
    from xmesh.pipeline.edges import Edge
    from xmesh.pipeline.simulate import PipelineSimulation

_HEADER = re.compile(r"\s*schedule\s+(\S+)(?:\s+stages=([0-9]+))?(?:\s+microbatches=([0-9]+))?\s*")


@dataclass(frozen=True)
class PipelineSchedule:
    """What each stage group computes, in order; communication follows from it (``lower``).

    A stage group is the ranks of one mesh. It has one stage, or several (chunks) when stages are
    interleaved. Schedules are equal when they compute the same in the same order.

    Args:
        groups: for each group its actions, of ops F, B, I and W.
        num_stages: stages of all groups; 0 takes the number that ``groups`` have.
        num_microbatches: likewise.
        name: what texts call it; no part of what it is.

    Raises:
        ScheduleError: an action that is no computation, a stage in two groups, or a number out of
            range. Whether the schedule can run, ``xmesh.pipeline.check`` says.
    """

    groups: tuple[tuple[Action, ...], ...]
    num_stages: int = 0
    num_microbatches: int = 0
    name: str = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        groups = tuple(tuple(Action(*action) for action in actions) for actions in self.groups)
        object.__setattr__(self, "groups", groups)
        actions = [action for found in groups for action in found]
        if not groups or not actions:
            raise _refuse("a schedule has a stage group, and something to compute", "none")
        for axis, most in (
            ("num_stages", 1 + max(action.stage for action in actions)),
            ("num_microbatches", 1 + max(action.microbatch for action in actions)),
        ):
            given = getattr(self, axis) or most
            if given < most:
                raise _refuse(f"actions are within {axis}", f"{axis}={given}, {most} are used")
            object.__setattr__(self, axis, given)
        home: dict[int, int] = {}
        for group, found in enumerate(groups):
            for place, action in enumerate(found):
                there = home.setdefault(action.stage, group)
                rule = ""
                if not action.computes or action.edge:
                    rule = "a schedule is of F, B, I and W alone; `lower` adds the rest"
                elif min(action.stage, action.microbatch) < 0:
                    rule = "stages and micro-batches are numbered from 0"
                elif there != group:
                    rule = f"a stage lives in one group, stage {action.stage} in group {there}"
                if rule:
                    raise _refuse(rule, "\n".join(program_lines(groups, [(group, place)])))

    @property
    def num_groups(self) -> int:
        """Number of stage groups."""
        return len(self.groups)

    @cached_property
    def _home(self) -> Mapping[int, int]:
        return {action.stage: g for g, found in enumerate(self.groups) for action in found}

    def stages_of_group(self, group: int) -> tuple[int, ...]:
        """Stages that a group computes, ascending."""
        return tuple(sorted({action.stage for action in self.groups[group]}))

    def group_of_stage(self, stage: int) -> int:
        """The group that computes a stage.

        Raises:
            ScheduleError: none does.
        """
        try:
            return self._home[stage]
        except KeyError:
            raise _refuse("every stage is computed by a group", f"stage {stage} by none") from None

    @cached_property
    def forward_only(self) -> bool:
        """True when nothing goes backward, as in inference."""
        return all(action.op == "F" for found in self.groups for action in found)

    def __str__(self) -> str:
        """A heading and a line for each group; ``parse`` reads it back."""
        head = f"schedule {self.name} stages={self.num_stages} microbatches={self.num_microbatches}"
        return "\n".join([head, *program_lines(self.groups)])

    @classmethod
    def parse(cls, text: str) -> PipelineSchedule:
        """Read a schedule as ``str`` writes it, or as a person does.

        The first line may be ``schedule NAME stages=P microbatches=M``; then comes a line of
        actions for each group, such as ``0F0 0F1 0B0 0B1``. ``#`` begins a comment.

        Raises:
            ScheduleError: with a caret under what cannot be read, or for what the class refuses.
        """
        lines = text.splitlines()
        written = [i for i, line in enumerate(lines) if line.partition("#")[0].strip()]
        name, stages, microbatches = "custom", 0, 0
        if written and lines[written[0]].split()[0] == "schedule":
            head = lines.pop(written[0])
            found = _HEADER.fullmatch(head.partition("#")[0])
            if found is None:
                raise ScheduleError(
                    explain(
                        "a heading is: schedule NAME stages=P microbatches=M",
                        values=caret(head, head.index("schedule")),
                        remedy="leave it out, or write for example: schedule mine stages=2",
                    )
                )
            name, stages, microbatches = found[1], int(found[2] or 0), int(found[3] or 0)
        return cls(parse_program(lines), stages, microbatches, name)

    def simulate(self, edges: Sequence[Edge] | None = None, **options: Any) -> PipelineSimulation:
        """Run it on an ideal machine: ``xmesh.pipeline.simulate.simulate``, and its options.

        Raises:
            ScheduleError: it cannot run.
            OptionError: times of no meaning.
        """
        from xmesh.pipeline.simulate import simulate

        return simulate(self, edges, **options)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of what is computed, and in which order: alike for equal schedules, no others."""
        text = str(PipelineSchedule(self.groups, self.num_stages, self.num_microbatches))
        return hashlib.sha256(text.encode()).digest()


def _refuse(rule: str, values: str) -> ScheduleError:
    return ScheduleError(
        explain(
            rule,
            values=values,
            remedy='write for example PipelineSchedule.parse("0F0 0B0\\n1F0 1B0")',
        )
    )
