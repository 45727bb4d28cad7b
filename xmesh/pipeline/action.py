"""Actions of a pipeline schedule, and their text: ``2F0``, ``2SEND(hidden)0``, ``2REDUCE``.

An action is written as stage, op, edge in parentheses where the op has one, micro-batch. A program
is one line of actions for each stage group; what cannot be read is shown with a caret under it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xmesh.errors import ScheduleError, explain
from xmesh.notation import caret

#: Forward, full backward, gradient of the inputs, gradient of the weights; B is I and W in one.
COMPUTE_OPS = ("F", "B", "I", "W")
#: Start to send on an edge, post the receive, wait until what was to be received is there.
EDGE_OPS = ("SEND", "RECV", "WAIT")
OPS = (*COMPUTE_OPS, *EDGE_OPS, "FREE", "REDUCE")
#: The micro-batch of a REDUCE, which is of all of them.
ALL = -1

EDGE_NAME = r"[^\s():#]+"
_ACTION = re.compile(rf"([0-9]+)([A-Z]+)(?:\(({EDGE_NAME})\))?([0-9]+)?")
_LABEL = re.compile(r"\s*([0-9]+):")


class Action(NamedTuple):
    """One thing that a stage does.

    Attributes:
        op: one of ``OPS``. FREE gives back all that the stage holds of a micro-batch; REDUCE sums
            the weight gradients of a stage with those of its copies, once all are there.
        stage: which stage does it.
        microbatch: of which micro-batch; ``ALL`` for REDUCE.
        edge: name of the edge of SEND, RECV and WAIT. Which of its two directions is meant follows
            from the stage: its source sends activations and receives gradients.
    """

    op: str
    stage: int
    microbatch: int = ALL
    edge: str = ""

    @property
    def computes(self) -> bool:
        """True for F, B, I and W."""
        return self.op in COMPUTE_OPS

    def __str__(self) -> str:
        edge = f"({self.edge})" if self.edge else ""
        return f"{self.stage}{self.op}{edge}{'' if self.microbatch == ALL else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of ``str``.

        Raises:
            ScheduleError: the text is no action.
        """
        actions = list(parse_actions(text))
        if len(actions) != 1:
            raise _refuse(text, 0, f"one action was expected, and {len(actions)} are there")
        return actions[0]


def parse_actions(text: str, start: int = 0) -> Iterator[Action]:
    """Read actions with white space between them, from a place of a line on.

    Raises:
        ScheduleError: with a caret under what is no action.
    """
    for word in re.finditer(r"\S+", text[start:]):
        place = start + word.start()
        found = _ACTION.fullmatch(word[0])
        if found is None:
            raise _refuse(text, place, "an action is stage, op, edge if it has one, micro-batch")
        stage, op, edge, microbatch = found.groups()
        after = place + len(stage)
        if op not in OPS:
            raise _refuse(text, after, f"an op is one of {' '.join(OPS)}")
        if (edge is not None) != (op in EDGE_OPS):
            raise _refuse(text, after, f"{' '.join(EDGE_OPS)} name an edge, and no other op does")
        if (microbatch is None) != (op == "REDUCE"):
            raise _refuse(text, after, "every op but REDUCE is of one micro-batch")
        yield Action(op, int(stage), ALL if microbatch is None else int(microbatch), edge or "")


def parse_program(lines: Iterable[str]) -> tuple[tuple[Action, ...], ...]:
    """Read one line of actions for each stage group, as ``program_lines`` writes them.

    A line may begin with the group's number and a colon; empty lines, and what stands behind a
    ``#``, say nothing.

    Raises:
        ScheduleError: with a caret under what cannot be read.
    """
    groups: list[tuple[Action, ...]] = []
    for line in lines:
        text = line.partition("#")[0].rstrip()
        if not text.strip():
            continue
        label = _LABEL.match(text)
        if label is not None and int(label[1]) != len(groups):
            raise _refuse(text, label.start(1), f"here begins the line of group {len(groups)}")
        groups.append(tuple(parse_actions(text, label.end() if label else 0)))
    return tuple(groups)


def program_lines(
    groups: Sequence[Sequence[Action]], marked: Iterable[tuple[int, int]] = ()
) -> list[str]:
    """One line for each group, its actions in columns.

    Args:
        groups: actions of each group.
        marked: (group, place) of the actions to put in brackets; such lines cannot be read back.
    """
    brackets = set(marked)
    rows = [
        [f"[{action}]" if (g, i) in brackets else str(action) for i, action in enumerate(actions)]
        for g, actions in enumerate(groups)
    ]
    width = max((len(word) for row in rows for word in row), default=0)
    label = len(str(len(rows)))
    return [
        f"{g:>{label}}: {' '.join(word.ljust(width) for word in row)}".rstrip()
        for g, row in enumerate(rows)
    ]


def _refuse(text: str, place: int, rule: str) -> ScheduleError:
    return ScheduleError(
        explain(
            rule,
            values=caret(text, place),
            remedy="write 2F0 for the forward of micro-batch 0 on stage 2, 2SEND(hidden)0 for "
            "what it sends on edge hidden; a line for each stage group",
        )
    )
