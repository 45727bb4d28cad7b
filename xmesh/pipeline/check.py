"""Does a schedule run, and to the right end? All that can be known before it is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from xmesh.errors import ScheduleError, explain
from xmesh.pipeline.action import Action, program_lines
from xmesh.pipeline.edges import Edge
from xmesh.pipeline.lower import lower
from xmesh.pipeline.rendezvous import awaited, stuck_at, wait_cycle
from xmesh.pipeline.schedule import PipelineSchedule
from xmesh.pipeline.wiring import Message, Program, Wiring

#: Actions of a line in an error text; of longer lines, those around the marked one.
_SHOWN = 16
_BACKWARDS = ({"B": 1}, {"I": 1, "W": 1})


def check(
    schedule: PipelineSchedule,
    edges: Sequence[Edge] | None = None,
    *,
    window: int | None = None,
) -> None:
    """Raise unless a schedule can run over some edges.

    Every micro-batch goes once through every stage, forward and (unless nothing goes backward)
    back, as B or as I and W, in the order F, I, W; and with zero buffering nobody waits in a
    circle.

    Args:
        schedule: what groups compute.
        edges: what goes between stages; None for a chain of the stages.
        window: as for ``lower``.

    Raises:
        ScheduleError: the text shows the grid with the offending actions in brackets, and for a
            deadlock who waits for whom.
    """
    check_order(schedule)
    wiring = Wiring(schedule, edges)
    check_program(schedule, lower(schedule, wiring.edges, window=window), wiring)


def check_order(schedule: PipelineSchedule) -> None:
    """Raise unless each stage computes each micro-batch once, in the order F, I, W or F, B.

    Raises:
        ScheduleError: with the grid.
    """
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for group, actions in enumerate(schedule.groups):
        for place, action in enumerate(actions):
            key = action.stage, action.microbatch
            places.setdefault(key, []).append((group, place))
    allowed = [{"F": 1}] if schedule.forward_only else [{"F": 1, **back} for back in _BACKWARDS]
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            found = places.get((stage, microbatch), [])
            ops = [schedule.groups[group][place].op for group, place in found]
            what = f"stage {stage} does {' '.join(ops) or 'nothing'} of micro-batch {microbatch}"
            if Counter(ops) not in map(Counter, allowed):
                raise _reject(
                    "every stage does every micro-batch once: one F, then one B or one I and one W"
                    if not schedule.forward_only
                    else "every stage does every micro-batch once: one F",
                    schedule.groups,
                    found,
                    what,
                )
            if ops != sorted(ops, key="FBIW".index):
                raise _reject("F comes first, and I before W", schedule.groups, found, what)


def check_program(schedule: PipelineSchedule, program: Program, wiring: Wiring) -> None:
    """Raise unless a lowered schedule, which somebody may have changed, runs and is complete.

    Args:
        schedule: what groups compute.
        program: all that they do.
        wiring: of the schedule and its edges.

    Raises:
        ScheduleError: the text shows the grid with the offending actions in brackets.
    """
    check_order(schedule)
    computed = tuple(tuple(action for action in found if action.computes) for found in program)
    if computed != schedule.groups:
        raise ScheduleError(
            explain(
                "a program computes what its schedule says, in its order",
                values="\n".join(program_lines(computed)),
                context=str(schedule),
                remedy="make it by xmesh.pipeline.lower",
            )
        )
    for group in range(len(program)):
        _check_group(program, group, wiring)
    _check_matches(program, wiring)
    stuck = stuck_at(program, wiring)
    if stuck:
        raise _deadlock(schedule, program, wiring, wait_cycle(program, wiring, stuck))


def _check_group(program: Program, group: int, wiring: Wiring) -> None:
    """What a group does to a micro-batch follows an order, and nothing is used after its FREE."""
    done: dict[Action, int] = {}
    freed: dict[tuple[int, int], int] = {}
    for place, action in enumerate(program[group]):
        here = [(group, place)]
        if action in done:
            raise _reject(
                f"{action} is done once", program, [(group, done[action]), *here], str(action)
            )
        key = action.stage, action.microbatch
        if action.op != "REDUCE" and key in freed:
            raise _reject(
                "nothing is used after its FREE",
                program,
                [(group, freed[key]), *here],
                f"{action} of group {group}",
            )
        if action.op == "FREE":
            freed[key] = place
        if wiring.schedule.group_of_stage(action.stage) != group:
            raise _reject("a group acts for its own stages", program, here, str(action))
        for before in _before(action, wiring, program, here, done):
            if before not in done:
                raise _reject(f"{action} comes after {before}", program, here, f"group {group}")
        done[action] = place


def _before(
    action: Action,
    wiring: Wiring,
    program: Program,
    here: list[tuple[int, int]],
    done: Container[Action],
) -> list[Action]:
    """What the same group must have done before an action."""
    if action.computes:
        return [message.action("WAIT") for message in wiring.needs(action)]
    if action.op not in ("SEND", "WAIT", "RECV"):
        return []
    message = wiring.message(action)
    if message is None:
        raise _reject("actions name edges of their stage", program, here, str(action))
    if action.op == "WAIT":
        return [message.action("RECV")]
    if action.op == "RECV":
        return []
    forward = message.sender == wiring.edge(message).src_stage
    split = Action("I", action.stage, action.microbatch)
    if not forward and split in done:
        return [split]
    return [Action("F" if forward else "B", action.stage, action.microbatch)]


def _check_matches(program: Program, wiring: Wiring) -> None:
    """Every send has its receive, every receive its send, and links may be FIFO."""
    found: dict[str, dict[Message, tuple[int, int]]] = {"SEND": {}, "RECV": {}, "WAIT": {}}
    orders: dict[str, dict[tuple[int, int], list[Message]]] = {"SEND": {}, "RECV": {}}
    for group, actions in enumerate(program):
        for place, action in enumerate(actions):
            message = wiring.message(action)
            if message is not None:
                found[action.op][message] = (group, place)
                if action.op in orders:
                    orders[action.op].setdefault(wiring.link(message), []).append(message)
    for op, other in (("SEND", "RECV"), ("RECV", "SEND"), ("RECV", "WAIT")):
        for message, mark in found[op].items():
            if message not in found[other]:
                raise _reject(
                    f"every {op} has its {other}",
                    program,
                    [mark],
                    f"{message.action(op)} has no {message.action(other)}",
                )
    for link, sends in orders["SEND"].items():
        for sent, received in zip(sends, orders["RECV"][link], strict=True):
            if sent != received:
                raise _reject(
                    "receives are posted in the order in which the other side sends",
                    program,
                    [found["SEND"][sent], found["RECV"][received]],
                    f"from group {link[0]} to group {link[1]}",
                )


def _deadlock(
    schedule: PipelineSchedule, program: Program, wiring: Wiring, cycle: list[tuple[int, int]]
) -> ScheduleError:
    lines, marks = [], []
    for group, place in cycle:
        action = program[group][place]
        message = wiring.message(action)
        wanted = message.action("RECV" if action.op == "SEND" else "SEND") if message else action
        lines.append(
            f"group {group} stands at {action} until "
            f"group {awaited(program, wiring, group, place)} gets to {wanted}"
        )
        # The computation that a SEND follows, or that a WAIT comes before.
        index = sum(earlier.computes for earlier in program[group][:place])
        marks.append((group, index - (action.op == "SEND")))
    return _reject(
        "groups must not wait for each other in a circle",
        schedule.groups,
        marks,
        "\n".join(lines),
        "let a group compute what others wait for before what it waits for itself; where all "
        "stand at SEND, post receives earlier (window)",
    )


def _reject(
    rule: str,
    groups: Sequence[Sequence[Action]],
    marks: Iterable[tuple[int, int]],
    context: str,
    remedy: str = "change the actions in brackets, or make the schedule by xmesh.pipeline.schedule",
) -> ScheduleError:
    return ScheduleError(
        explain(rule, values="\n".join(excerpt(groups, marks)), context=context, remedy=remedy)
    )


def excerpt(groups: Sequence[Sequence[Action]], marks: Iterable[tuple[int, int]]) -> list[str]:
    """Lines of a grid with some actions in brackets; of long lines what is around them."""
    spots = list(marks)
    of_group: dict[int, list[int]] = {}
    for group, place in spots:
        of_group.setdefault(group, []).append(place)
    everywhere = [place for _, place in spots] or [0]
    rows, shifted, heads = [], [], []
    for group, actions in enumerate(groups):
        about = of_group.get(group, everywhere)
        first = max(0, min(min(about) - _SHOWN // 4, len(actions) - _SHOWN))
        stop = max(first + _SHOWN, max(of_group.get(group, [0])) + 1)
        rows.append(actions[first:stop])
        shifted += [(group, place - first) for place in of_group.get(group, ())]
        heads.append((first > 0, stop < len(actions)))
    lines = []
    for line, (cut, more) in zip(program_lines(rows, shifted), heads, strict=True):
        label, _, body = line.partition(":")
        lines.append(f"{label}:{' ...' if cut else ''}{body}{' ...' if more else ''}")
    return lines
