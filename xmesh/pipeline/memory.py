"""How much each stage group holds at the most: it follows from the order alone, not from times."""

from __future__ import annotations

from collections.abc import Sequence

from xmesh.pipeline.schedule import PipelineSchedule
from xmesh.pipeline.wiring import Program, Wiring


def peak_activations(schedule: PipelineSchedule) -> tuple[float, ...]:
    """Micro-batches whose activations a group holds at one time, at the most.

    An activation lives from its F to its B or W, in inference to the end of its F. A group of
    several stages holds a part of a micro-batch with each: they count as 1 / stages.

    Returns:
        For each group; whole numbers where groups have one stage.
    """
    peaks: list[float] = []
    for group, actions in enumerate(schedule.groups):
        live = most = 0
        last = {(action.stage, action.microbatch): i for i, action in enumerate(actions)}
        for place, action in enumerate(actions):
            live += action.op == "F"
            most = max(most, live)
            live -= last[action.stage, action.microbatch] == place
        parts = max(1, len(schedule.stages_of_group(group)))
        peaks.append(most if parts == 1 else most / parts)
    return tuple(peaks)


def peak_nbytes(
    program: Program, wiring: Wiring, activation_nbytes: Sequence[int]
) -> tuple[int, ...]:
    """Bytes of activations and of posted or filled receive buffers, at the most.

    Weight gradients are not in it: they are added up in one buffer for each weight, whatever the
    number of micro-batches.

    Args:
        program: all actions of each group.
        wiring: of its schedule; edges without a shape count nothing.
        activation_nbytes: for each stage, what its F keeps for the backward of one micro-batch.

    Returns:
        For each group, over all its ranks together.
    """
    peaks = []
    for actions in program:
        held: dict[tuple[int, int], int] = {}
        live = most = 0
        for action in actions:
            key, nbytes = (action.stage, action.microbatch), 0
            if action.op == "F":
                nbytes = activation_nbytes[action.stage]
            elif action.op == "RECV":
                message = wiring.message(action)
                nbytes = (wiring.edge(message).nbytes or 0) if message else 0
            elif action.op == "FREE":
                nbytes = -held.pop(key, 0)
            if nbytes > 0:
                held[key] = held.get(key, 0) + nbytes
            live += nbytes
            most = max(most, live)
        peaks.append(most)
    return tuple(peaks)
