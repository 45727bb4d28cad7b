"""A run of a program without any buffers: does it end, and where does it stand if not?

The strictest reading of MPI: a SEND holds its group until the receive is posted, a WAIT until the
other side has sent. A program that ends so ends under every MPI and every amount of buffering.
"""

from __future__ import annotations

from xmesh.pipeline.wiring import Message, Program, Wiring


def stuck_at(program: Program, wiring: Wiring) -> dict[int, int]:
    """Run all groups as far as they get.

    Args:
        program: all actions of each group.
        wiring: of its schedule.

    Returns:
        group -> place in its actions where it stands for ever; empty when all groups end.
    """
    places = [0] * len(program)
    posted: set[Message] = set()
    sent: set[Message] = set()
    #: Whom to look at again once a message is posted or sent.
    sleepers: dict[tuple[str, Message], int] = {}
    awake = list(range(len(program)))
    while awake:
        group = awake.pop()
        for place in range(places[group], len(program[group])):
            action = program[group][place]
            message = wiring.message(action)
            places[group] = place
            if message is not None:
                if action.op == "RECV":
                    posted.add(message)
                elif message not in (posted if action.op == "SEND" else sent):
                    wanted = "RECV" if action.op == "SEND" else "SEND"
                    sleepers[wanted, message] = group
                    break
                elif action.op == "SEND":
                    sent.add(message)
                if (action.op, message) in sleepers:
                    awake.append(sleepers.pop((action.op, message)))
        else:
            places[group] = len(program[group])
    return {g: place for g, place in enumerate(places) if place < len(program[g])}


def wait_cycle(program: Program, wiring: Wiring, stuck: dict[int, int]) -> list[tuple[int, int]]:
    """Groups that wait for each other in a circle, each with the place where it stands.

    Args:
        program: every send of which has its receive.
        wiring: of its schedule.
        stuck: by ``stuck_at``, not empty.
    """
    path: list[int] = []
    group = min(stuck)
    while group not in path:
        path.append(group)
        group = awaited(program, wiring, group, stuck[group])
    return [(g, stuck[g]) for g in path[path.index(group) :]]


def awaited(program: Program, wiring: Wiring, group: int, place: int) -> int:
    """The group for which a SEND or WAIT waits."""
    action = program[group][place]
    message = wiring.message(action)
    if message is None:
        return group
    sender, receiver = wiring.link(message)
    return receiver if action.op == "SEND" else sender
