"""What the checker refuses, and what its texts say; and that no schedule of ours is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmesh.errors import ScheduleError
from xmesh.pipeline import SCHEDULES, Action, Edge, PipelineSchedule, chain, schedule
from xmesh.pipeline.check import check, check_program
from xmesh.pipeline.lower import lower
from xmesh.pipeline.rendezvous import stuck_at
from xmesh.pipeline.wiring import Wiring


@pytest.mark.parametrize("weight_delay", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_needs_buffering(name, weight_delay):
    for p in range(1, 7):
        for m in range(1, 13):
            check(schedule(name, p, m, weight_delay=weight_delay))


@given(st.integers(1, 7), st.integers(1, 23), st.integers(1, 4))
def test_interleaved_takes_any_number_of_micro_batches(p, m, v):
    check(schedule("interleaved-1f1b", p, m, chunks=v))


@given(st.sampled_from(SCHEDULES), st.integers(2, 6), st.integers(1, 12), st.booleans(), st.data())
def test_no_schedule_needs_buffering_with_skip_connections(name, p, m, weight_delay, data):
    made = schedule(name, p, m, weight_delay=weight_delay)
    pairs = [(i, j) for i in range(made.num_stages) for j in range(i + 1, made.num_stages)]
    skips = data.draw(st.lists(st.tuples(st.sampled_from(pairs), st.booleans()), max_size=6))
    edges = [
        Edge(f"skip{n}", pair[0], pair[1], differentiable=differentiable)
        for n, (pair, differentiable) in enumerate(skips)
    ]
    check(made, [*chain(made.num_stages), *edges])


def refused(text: str, **options: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(PipelineSchedule.parse(text), **options)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "marked", "said"),
    [
        ("0F0 0B0\n1F0", ["1F0"], "stage 1 does F of micro-batch 0"),
        ("0F0 0B0\n1B0", ["1B0"], "stage 1 does B of micro-batch 0"),
        ("0F0 0F0 0B0\n1F0 1B0", ["0F0", "0F0", "0B0"], "stage 0 does F F B"),
        ("0F0 0B0 0B0\n1F0 1B0", ["0F0", "0B0", "0B0"], "stage 0 does F B B"),
        ("0F0 0B0 0W0\n1F0 1B0", ["0F0", "0B0", "0W0"], "stage 0 does F B W"),
        ("0F0 0I0\n1F0 1B0", ["0F0", "0I0"], "stage 0 does F I of"),
        ("0F0 0W0 0I0\n1F0 1B0", ["0F0", "0W0", "0I0"], "F comes first, and I before W"),
        ("0B0 0F0\n1F0 1B0", ["0B0", "0F0"], "F comes first, and I before W"),
        ("schedule x stages=3\n0F0 0B0\n1F0 1B0", [], "stage 2 does nothing of micro-batch 0"),
        ("0F0 0F0", ["0F0", "0F0"], "once: one F\n"),
    ],
)
def test_wrong_schedules_by_kind(text, marked, said):
    found = refused(text)
    assert said in found
    assert [word.strip("[]") for word in found.split() if word.startswith("[")] == marked


def test_a_deadlock_shows_grid_and_cycle():
    assert refused("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1") == (
        "groups must not wait for each other in a circle\n"
        "  values:  0: 0F0   [0B0] 0F1   0B1\n"
        "           1: 1F0   [1F1] 1B0   1B1\n"
        "  context: group 0 stands at 0WAIT(0-1)0 until group 1 gets to 1SEND(0-1)0\n"
        "           group 1 stands at 1WAIT(0-1)1 until group 0 gets to 0SEND(0-1)1\n"
        "  remedy:  let a group compute what others wait for before what it waits for itself; "
        "where all stand at SEND, post receives earlier (window)"
    )


def test_a_deadlock_of_sends_without_receives_posted_ahead():
    """What 1F1B does over blocking sends: both neighbours send first."""
    made = schedule("1f1b", 2, 4)
    assert stuck_at(lower(made, window=0), Wiring(made))
    found = refused(str(made), window=0)
    assert "group 0 stands at 0SEND(0-1)1 until group 1 gets to 1RECV(0-1)1" in found
    assert "group 1 stands at 1SEND(0-1)0 until group 0 gets to 0RECV(0-1)0" in found


def test_a_cycle_of_three_leaves_others_out():
    # Group 3 waits too, but nobody waits for it.
    edges = [Edge("a", 0, 1), Edge("b", 1, 2), Edge("c", 0, 2), Edge("d", 2, 3)]
    text = "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1\n3F0 3F1 3B0 3B1"
    found = refused(text, edges=edges)
    assert "group 3 stands" not in found
    assert "group 0 stands at 0WAIT" in found


def test_a_group_that_waits_for_itself():
    found = refused("1F0 0F0 0B0 1B0")
    assert "group 0 stands at 1WAIT(0-1)0 until group 0 gets to 0SEND(0-1)0" in found
    assert "[1F0]" in found


def test_long_grids_are_cut_around_the_mark():
    lines = [" ".join(f"{s}F{k}" for k in range(100)) for s in range(2)]
    found = refused("\n".join([lines[0], lines[1].replace("1F70 ", "1F70 1F70 ")]))
    assert "[1F70] [1F70]" in found
    assert max(map(len, found.splitlines())) < 160


def changed(change, made=None, edges=None):
    """Change a lowered program, and return what the checker says of it."""
    made = made or schedule("1f1b", 2, 2)
    wiring = Wiring(made, edges)
    groups = [list(actions) for actions in lower(made, edges)]
    change(groups)
    program = tuple(map(tuple, groups))
    with pytest.raises(ScheduleError) as caught:
        check_program(made, program, wiring)
    return str(caught.value)


def act(text: str) -> Action:
    return Action.parse(text)


def test_a_send_without_a_receive():
    def change(groups):
        groups[1].remove(act("1RECV(0-1)1"))
        groups[1].remove(act("1WAIT(0-1)1"))

    found = changed(change)
    assert "1F1 comes after 1WAIT(0-1)1" in found

    found = changed(lambda groups: groups[0].remove(act("0SEND(0-1)1")))
    assert "every RECV has its SEND" in found
    assert "1RECV(0-1)1 has no 0SEND(0-1)1" in found
    assert "[1RECV(0-1)1]" in found


def test_a_receive_without_its_wait_or_a_send_nobody_receives():
    edges = [*chain(2), Edge("mask", 0, 1, differentiable=False)]

    def extra(groups):
        groups[1].insert(-3, act("1SEND(mask)1"))  # a gradient that nobody asked for

    assert "every SEND has its RECV" in changed(extra, edges=edges)


def test_use_after_free():
    def change(groups):
        groups[0].remove(act("0FREE0"))
        groups[0].insert(groups[0].index(act("0B0")), act("0FREE0"))

    found = changed(change)
    assert found.startswith("nothing is used after its FREE")
    assert "[0FREE0]" in found
    assert "[0B0]" in found


def test_a_send_before_what_it_sends():
    def change(groups):
        groups[0].remove(act("0SEND(0-1)1"))
        groups[0].insert(groups[0].index(act("0F1")), act("0SEND(0-1)1"))

    assert "0SEND(0-1)1 comes after 0F1" in changed(change)


def test_actions_twice_or_of_others_or_of_no_edge():
    assert "is done once" in changed(lambda groups: groups[0].append(act("0REDUCE")))
    assert "for its own stages" in changed(lambda groups: groups[0].append(act("1RECV(0-1)7")))
    assert "name edges of their stage" in changed(lambda g: g[0].insert(0, act("0RECV(x)0")))
    assert "computes what its schedule says" in changed(lambda groups: groups[0].append(act("0F7")))


def test_receives_in_another_order_than_sends():
    def change(groups):
        receives = act("1RECV(0-1)0"), act("1RECV(0-1)1")
        first, second = (groups[1].index(action) for action in receives)
        groups[1][first], groups[1][second] = receives[1], receives[0]

    found = changed(change)
    assert "posted in the order in which the other side sends" in found
    assert "from group 0 to group 1" in found


@pytest.mark.parametrize(
    ("edges", "rule", "values"),
    [
        ([*chain(3), Edge("0-1", 0, 2)], "a name of its own", "0-1: 0 -> 1 and 0-1: 0 -> 2"),
        ([Edge("skip", 0, 3)], "stages are numbered 0 to 2", "skip: 0 -> 3"),
        ([*chain(3), Edge("again", 2, 0)], "activations go forward", "again: 2 -> 0"),
    ],
)
def test_skip_topologies_are_validated(edges, rule, values):
    """A symptom: skip connections that lead nowhere, or back, were found while running."""
    with pytest.raises(ScheduleError, match=rule) as caught:
        check(schedule("1f1b", 3, 2), edges)
    assert values in str(caught.value)


@st.composite
def orders(draw):
    """Any order of computations in which F is before B."""
    p, m = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lines = []
    for stage in range(p):
        line = [Action("F", stage, k) for k in range(m)] + [Action("B", stage, k) for k in range(m)]
        line = draw(st.permutations(line))
        for k in range(m):
            f, b = (line.index(Action(op, stage, k)) for op in "FB")
            if b < f:
                line[f], line[b] = line[b], line[f]
        lines.append(tuple(line))
    return PipelineSchedule(tuple(lines))


def runs(made: PipelineSchedule) -> bool:
    """By brute force: can some computation always be done next until all are done?"""
    wiring = Wiring(made)
    rest = [list(line) for line in made.groups]
    made_yet: set[object] = set()
    while any(rest):
        ready = [line for line in rest if line and made_yet.issuperset(wiring.needs(line[0]))]
        if not ready:
            return False
        made_yet.update(wiring.makes(ready[0].pop(0)))
    return True


@given(orders())
def test_refused_exactly_when_it_cannot_run(made):
    """With enough receives posted, zero buffering refuses no order that can be run at all."""
    try:
        check(made, window=100)
        accepted = True
    except ScheduleError:
        accepted = False
    assert accepted == runs(made)
