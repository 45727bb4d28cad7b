"""The schedules that people use, by name.

All but the interleaved one give each stage group one stage. Stage i of n, m micro-batches;
warm-up is what a stage sends forward before its first backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import pairwise

from xmesh.errors import OptionError, explain
from xmesh.pipeline.action import Action
from xmesh.pipeline.schedule import PipelineSchedule

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "inference")


def schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    weight_delay: bool = False,
    chunks: int | None = None,
) -> PipelineSchedule:
    """Make a schedule.

    - ``gpipe``: all forwards, then all backwards.
    - ``1f1b``: min(m, n - i) forwards of warm-up, then a backward and a forward in turn.
    - ``eager-1f1b``: the same with min(m, 2(n - i) - 1), so that transfers have a whole forward
      and backward of time (Zhuang et al., MLSys 2023, arXiv 2211.05322).
    - ``interleaved-1f1b``: group i has the stages i, i + n, i + 2n, ... (Narayanan et al., SC 2021,
      arXiv 2104.04473, section 2.2), for any m.
    - ``zb-h1``: 1F1B whose weight gradients fill the bubbles, without more memory (Qi et al.,
      arXiv 2401.10241, section 2.1).
    - ``inference``: forwards alone.

    Args:
        name: one of ``SCHEDULES``.
        num_stages: stage groups. With ``chunks`` the groups have that many stages each, so that
            actions number ``num_stages * chunks`` stages.
        num_microbatches: m.
        weight_delay: the backward is written as I and W, so that the gradient of the inputs
            travels while that of the weights is computed. ``zb-h1`` does so anyhow.
        chunks: stages of each group of ``interleaved-1f1b``, 2 unless given.

    Raises:
        OptionError: no such schedule, a number below 1, or chunks where there are none.
    """
    if name not in _BUILDERS:
        raise _refuse(f"a schedule is one of {', '.join(SCHEDULES)}", f"{name!r}")
    if chunks is None:
        chunks = 2 if name == "interleaved-1f1b" else 1
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "chunks": chunks}
    for what, count in counts.items():
        try:
            enough = operator.index(count) >= 1
        except TypeError:
            enough = False
        if not enough:
            raise _refuse(f"{what} is an int >= 1", f"{count!r}")
    if chunks > 1 and name != "interleaved-1f1b":
        raise _refuse("only interleaved-1f1b has chunks", f"{name}, chunks={chunks}")
    groups = tuple(
        tuple(_BUILDERS[name](group, num_stages, num_microbatches, chunks))
        for group in range(num_stages)
    )
    if weight_delay and any(action.op == "B" for found in groups for action in found):
        groups = tuple(tuple(_split(actions)) for actions in groups)
        name += "+weight-delay"
    return PipelineSchedule(groups, num_stages * chunks, num_microbatches, name)


def _refuse(rule: str, values: str) -> OptionError:
    return OptionError(
        explain(rule, values=values, remedy='for example schedule("eager-1f1b", 4, 16)')
    )


def _split(actions: tuple[Action, ...]) -> Iterator[Action]:
    """The same with I and W in place of each B."""
    for action in actions:
        if action.op == "B":
            yield action._replace(op="I")
            yield action._replace(op="W")
        else:
            yield action


def _in_turn(forwards: list[Action], backwards: list[Action], warm_up: int) -> Iterator[Action]:
    """Forwards of warm-up, a backward and a forward in turn, the backwards that are left."""
    yield from forwards[:warm_up]
    for place, backward in enumerate(backwards):
        yield backward
        yield from forwards[warm_up + place : warm_up + place + 1]


def _one_stage(stage: int, microbatches: int, warm_up: int) -> Iterator[Action]:
    every = range(microbatches)
    forwards = [Action("F", stage, k) for k in every]
    return _in_turn(forwards, [Action("B", stage, k) for k in every], min(warm_up, microbatches))


def _gpipe(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    return _one_stage(stage, microbatches, microbatches)


def _1f1b(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    return _one_stage(stage, microbatches, stages - stage)


def _eager(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    return _one_stage(stage, microbatches, 2 * (stages - stage) - 1)


def _interleaved(group: int, groups: int, microbatches: int, chunks: int) -> Iterator[Action]:
    # In a round of micro-batches, chunk after chunk. Rounds are as long as there are groups, or
    # longer where m does not divide: a shorter one would starve the groups that wait for it.
    rounds = max(1, microbatches // groups)
    firsts = [microbatches * i // rounds for i in range(rounds + 1)]
    order = [
        (chunk, k)
        for first, stop in pairwise(firsts)
        for chunk in range(chunks)
        for k in range(first, stop)
    ]
    forwards = [Action("F", group + chunk * groups, k) for chunk, k in order]
    backwards = [Action("B", group + (chunks - 1 - chunk) * groups, k) for chunk, k in order]
    longest = -(-microbatches // rounds)
    warm_up = 2 * (groups - group) - 1 + (chunks - 1) * longest
    return _in_turn(forwards, backwards, min(warm_up, len(order)))


def _zb_h1(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    # Weight gradients lag behind by as many micro-batches as 1F1B's warm-up is shorter than that
    # of stage 0: all stages then hold as much as stage 0, and have W left to fill the end with.
    done = 0
    for action in _1f1b(stage, stages, microbatches, chunks):
        if action.op == "F":
            yield action
            continue
        yield Action("I", stage, action.microbatch)
        if action.microbatch >= stage:
            yield Action("W", stage, done)
            done += 1
    for k in range(done, microbatches):
        yield Action("W", stage, k)


def _inference(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    return (Action("F", stage, k) for k in range(microbatches))


_BUILDERS: dict[str, Callable[[int, int, int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "eager-1f1b": _eager,
    "interleaved-1f1b": _interleaved,
    "zb-h1": _zb_h1,
    "inference": _inference,
}
