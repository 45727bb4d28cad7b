"""Simulated times and memory against closed forms, exactly: times are ints or fractions."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmesh.errors import OptionError, ScheduleError
from xmesh.pipeline import SCHEDULES, Action, Edge, PipelineSchedule, chain, schedule
from xmesh.pipeline.lower import lower, program_digest
from xmesh.pipeline.wiring import Wiring

TIMES = st.integers(1, 12).map(lambda n: Fraction(n, 4))
STAGES = st.integers(1, 6)
MICROBATCHES = st.integers(1, 14)
WHOLE = ("gpipe", "1f1b", "eager-1f1b")


@given(st.sampled_from(WHOLE), STAGES, MICROBATCHES, TIMES, TIMES, TIMES, st.booleans())
def test_bubble_without_transfers(name, p, m, forward, input_grad, weight_grad, delay):
    backward = input_grad + weight_grad
    times = {"forward_s": forward, "backward_s": backward}
    found = schedule(name, p, m).simulate(**times)
    assert found.bubble_s == (p - 1) * (forward + backward)
    assert found.makespan_s == (m + p - 1) * (forward + backward)
    assert found.busy_s == (m * (forward + backward),) * p
    # Delayed weight gradients are not in the way of the gradients that others wait for.
    delayed = schedule(name, p, m, weight_delay=True).simulate(
        **times, input_grad_s=input_grad, weight_grad_s=weight_grad
    )
    assert delayed.makespan_s <= found.makespan_s
    assert delayed.peak_activations == found.peak_activations


@given(STAGES, MICROBATCHES)
def test_peak_activations(p, m):
    stages = range(p)
    for name, expected in (
        ("gpipe", [m for _ in stages]),
        ("1f1b", [min(m, p - i) for i in stages]),
        ("eager-1f1b", [min(m, 2 * (p - i) - 1) for i in stages]),
        ("zb-h1", [min(m, p) for _ in stages]),
        ("inference", [1 for _ in stages]),
    ):
        assert schedule(name, p, m).simulate().peak_activations == tuple(expected), name


@given(STAGES, st.integers(1, 4), st.integers(1, 4), TIMES, TIMES)
def test_interleaved(p, rounds, v, forward, backward):
    found = schedule("interleaved-1f1b", p, rounds * p, chunks=v).simulate(
        forward_s=forward, backward_s=backward
    )
    assert found.bubble_s == (p - 1) * (forward + backward) / v
    if rounds > 1 or p == 1:  # in one round all micro-batches are in flight at once
        assert found.peak_activations[0] == pytest.approx(p + (p - 1) / v)


@given(STAGES, st.integers(0, 8), st.tuples(TIMES, TIMES, TIMES))
def test_zb_h1(p, more, times):
    # The closed form is of weight gradients that take no longer than what they stand in for.
    weight, *others = sorted(times)
    for forward, input_grad in (others, others[::-1]):
        found = schedule("zb-h1", p, p + more).simulate(
            forward_s=forward, input_grad_s=input_grad, weight_grad_s=weight
        )
        assert found.bubble_s == (p - 1) * (forward + input_grad - weight)


@given(STAGES, MICROBATCHES, TIMES, TIMES)
def test_inference(p, m, forward, transfer):
    found = schedule("inference", p, m).simulate(forward_s=forward, transfer_s=transfer)
    slowest = max(forward, transfer) if p > 1 else forward
    assert found.makespan_s == p * forward + (p - 1) * transfer + (m - 1) * slowest


@given(st.integers(2, 6), st.integers(1, 4), TIMES, TIMES, st.integers(0, 8))
def test_1f1b_with_asynchronous_transfers(p, rounds, forward, backward, eighths):
    transfer = (forward + backward) * Fraction(eighths, 8)  # c <= F + B: links keep up
    m = rounds * p
    found = schedule("1f1b", p, m).simulate(
        forward_s=forward, backward_s=backward, transfer_s=transfer
    )
    expected = (m + p - 1) * (forward + backward)
    assert found.makespan_s == expected + 2 * transfer * ((p - 1) * Fraction(m, p) + p - 2)


@given(STAGES, MICROBATCHES, TIMES, TIMES, st.integers(0, 8))
def test_eager_hides_transfers(p, m, forward, backward, sixteenths):
    transfer = (forward + backward) * Fraction(sixteenths, 16)  # 2c <= F + B
    found = schedule("eager-1f1b", p, m).simulate(
        forward_s=forward, backward_s=backward, transfer_s=transfer
    )
    both = forward + backward
    assert found.makespan_s == m * both + (p - 1) * (both + 2 * transfer)


@pytest.mark.parametrize(
    ("p", "m", "c", "blocking", "asynchronous", "eager"),
    [(4, 16, 1, 92, 85, 63), (8, 32, Fraction(1, 2), Fraction(309, 2), 151, 124)],
)
def test_the_gain_comes_from_depth_and_not_from_asynchrony_alone(
    p, m, c, blocking, asynchronous, eager
):
    plain = schedule("1f1b", p, m)
    assert plain.simulate(transfer_s=c, transfers="blocking").makespan_s == blocking
    assert plain.simulate(transfer_s=c).makespan_s == asynchronous
    assert schedule("eager-1f1b", p, m).simulate(transfer_s=c).makespan_s == eager


def longest_path(made: PipelineSchedule, times: dict[str, int], c: int) -> int:
    """Makespan by definition: nothing starts before what it needs; links carry one at a time."""
    wiring = Wiring(made)
    before: dict[object, list[tuple[object, int]]] = {}
    for actions in made.groups:
        last: object = None
        for action in actions:
            before[action] = [] if last is None else [(last, times[last.op])]  # type: ignore[attr-defined]
            last = action
            for message in wiring.needs(action):
                before[action].append((message, c))
    queues: dict[object, object] = {}
    for actions in made.groups:
        for action in actions:
            for message in wiring.makes(action):
                before[message] = [(action, times[action.op])]
                link = wiring.link(message)
                if link in queues:
                    before[message].append((queues[link], c))
                queues[link] = message
    found: dict[object, int] = {}

    def start(what: object) -> int:
        if what not in found:
            found[what] = max((start(one) + took for one, took in before[what]), default=0)
        return found[what]

    return max(start(action) + times[action.op] for actions in made.groups for action in actions)


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 4),
    st.integers(1, 7),
    st.booleans(),
    st.integers(0, 5),
    st.tuples(*[st.integers(1, 5)] * 3),
)
def test_any_schedule_against_the_longest_path(name, p, m, delay, c, times):
    chunks = 2 if name == "interleaved-1f1b" and p > 1 else 1
    made = schedule(name, p, m, weight_delay=delay, chunks=chunks)
    forward, input_grad, weight = times
    found = made.simulate(
        forward_s=[forward] * made.num_stages if chunks > 1 else forward,
        backward_s=[input_grad + weight] * made.num_stages,
        input_grad_s=[input_grad] * made.num_stages,
        weight_grad_s=[weight] * made.num_stages,
        transfer_s=c,
        window=100,
    )
    given_s = {"F": forward, "B": input_grad + weight, "I": input_grad, "W": weight}
    assert found.makespan_s == longest_path(made, given_s, c)
    # Posting few receives ahead costs nothing where stages are alike and stand in a line.
    if chunks == 1:
        few = made.simulate(
            forward_s=forward,
            backward_s=input_grad + weight,
            input_grad_s=input_grad,
            weight_grad_s=weight,
            transfer_s=c,
        )
        assert few.makespan_s == found.makespan_s


def test_stages_and_edges_of_different_speed():
    made = schedule("gpipe", 2, 1)
    found = made.simulate(forward_s=[1, 10], backward_s=[100, 1000], transfer_s={"0-1": (5, 7)})
    assert found.makespan_s == 1 + 5 + 10 + 1000 + 7 + 100
    assert found.link_busy_s == {(0, 1): 5, (1, 0): 7}
    assert found.bubble_s == found.makespan_s - 1010
    assert [str(span.action) for span in found.timeline] == [
        "0F0",
        "0SEND(0-1)0",
        "1F0",
        "1B0",
        "1SEND(0-1)0",
        "0B0",
    ]


def test_directions_of_a_link_do_not_disturb_each_other_and_edges_share_it():
    """Two edges between the same stages take turns; the other direction is free meanwhile."""
    edges = [Edge("a", 0, 1), Edge("b", 0, 1)]
    found = schedule("inference", 2, 2).simulate(edges, forward_s=1, transfer_s=3)
    assert [span.start_s for span in found.timeline if span.peer is not None] == [1, 4, 7, 10]
    assert found.makespan_s == 14


def test_a_skip_connection_has_a_link_of_its_own():
    edges = [*chain(3), Edge("skip", 0, 2)]
    found = schedule("1f1b", 3, 4).simulate(edges, transfer_s={"skip": 1})
    assert found.link_busy_s == {(0, 2): 4, (2, 0): 4}


def test_a_delayed_weight_gradient_is_computed_while_the_gradient_travels():
    made = schedule("1f1b", 2, 1, weight_delay=True)
    program = [str(action) for action in lower(made)[1]]
    assert program[-5:] == ["1I0", "1SEND(0-1)0", "1W0", "1FREE0", "1REDUCE"]
    assert made.simulate(transfer_s=1).makespan_s == 1 + 1 + 1 + 1 + 1 + 2
    assert schedule("1f1b", 2, 1).simulate(transfer_s=1).makespan_s == 1 + 1 + 1 + 2 + 1 + 2


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "zb-h1", "inference", "interleaved-1f1b"])
def test_memory_does_not_rise_with_micro_batches(name):
    """A symptom: memory grew because every micro-batch kept its weight gradients."""
    edges = [
        Edge(edge.name, edge.src_stage, edge.dst_stage, shape=(100,), dtype="uint8")
        for edge in chain(8 if name == "interleaved-1f1b" else 4)
    ]
    few, many = (
        schedule(name, 4, m).simulate(edges, activation_nbytes=1000).peak_nbytes for m in (16, 64)
    )
    assert few == many


def test_memory_in_bytes():
    edges = [Edge("x", 0, 1, shape=(10,), dtype="float32")]
    found = schedule("1f1b", 2, 4).simulate(edges, activation_nbytes=[1000, 5000])
    # Stage 0: two activations, two gradients posted. Stage 1: one activation, what it came from,
    # and two receives.
    assert found.peak_nbytes == (2 * 1000 + 3 * 40, 5000 + 3 * 40)
    assert schedule("1f1b", 2, 4).simulate().peak_nbytes is None


def test_an_early_receive_does_not_hold_up_computation():
    """A symptom: computations stood behind a receive whose data came late."""
    made = schedule("eager-1f1b", 2, 4)
    for group, actions in enumerate(lower(made)):
        waits = [str(action) for action in actions if action.op == "WAIT"]
        for place, action in enumerate(actions):
            if action.op == "WAIT":
                assert actions[place + 1].op in ("RECV", "F", "B"), (group, waits)
    # Gradients arrive very late, and forwards of stage 0 go on all the same.
    found = made.simulate(transfer_s={"0-1": (0, 50)})
    ends = [s.end_s for s in found.timeline if s.action.op == "F" and s.group == 0]
    assert ends[:3] == [1, 2, 3]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_receive_is_posted_ahead_of_a_send_that_is_ready(name):
    """A symptom: receives of the warm-up stood in front of sends, and nothing went out."""
    for actions in lower(schedule(name, 4, 8)):
        for here, after in pairwise(actions):
            if after.op == "SEND":
                assert here.op in ("F", "B", "I", "SEND"), f"{here} {after}"


def test_activations_and_gradients_do_not_mix():
    """A symptom: both had one tag. Here the direction is part of what a message is."""
    made = schedule("1f1b", 2, 2)
    wiring = Wiring(made)
    messages = {wiring.message(a) for actions in lower(made) for a in actions} - {None}
    assert len(messages) == 4
    assert {(m.sender, m.receiver) for m in messages if m} == {(0, 1), (1, 0)}


def test_two_stages_do_not_take_their_next_for_their_previous():
    """A symptom: with two stages both neighbours are the same rank, and shapes were swapped."""
    edges = [Edge("out", 0, 1, shape=(2,)), Edge("back", 1, 2, shape=(3,))]
    made = PipelineSchedule.parse("0F0 2F0 2B0 0B0\n1F0 1B0")
    wiring = Wiring(made, edges)
    came = [wiring.message(a) for a in lower(made, edges)[0] if a.op == "WAIT"]
    assert [wiring.edge(m).shape for m in came if m] == [(3,), (2,)]
    assert [(m.sender, m.receiver) for m in came if m] == [(1, 2), (1, 0)]


def test_a_stage_that_nobody_computes():
    with pytest.raises(ScheduleError, match="stage 2 does nothing"):
        PipelineSchedule.parse("schedule x stages=3\n0F0 0B0\n1F0 1B0").simulate()


def test_programs_have_digests():
    """What ranks compare before they run: the program, and the edges that it is about."""
    made, edges = schedule("1f1b", 2, 2), [Edge("x", 0, 1, "S0", "S0", (4,))]
    program = lower(made, edges)
    digest = program_digest(program, edges)
    assert digest == program_digest(lower(made, edges), list(edges))
    assert digest != program_digest(lower(made, edges, window=1), edges)
    for other in (("S0", "R", (4,)), ("S0", "S0", (5,)), ("S0", "S0", (4,), "int32")):
        assert digest != program_digest(program, [Edge("x", 0, 1, *other)])


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"forward_s": -1}, "forward_s is in seconds"),
        ({"backward_s": float("inf")}, "backward_s is in seconds"),
        ({"forward_s": [1, 2, 3]}, "one for each of 2 stages"),
        ({"transfer_s": {"nope": 1}}, "transfer_s names edges: 0-1"),
        ({"transfer_s": {"0-1": (1, 2, 3)}}, "one forward and one back"),
        ({"transfer_s": "1"}, "transfer_s is in seconds"),
        ({"transfers": "eager"}, "transfers are async or blocking"),
        ({"window": -1}, "window is an int >= 0"),
    ],
)
def test_options(options, rule):
    with pytest.raises(OptionError, match=rule):
        schedule("1f1b", 2, 2).simulate(**options)


def test_gradients_take_half_of_the_backward_unless_told():
    made = PipelineSchedule((tuple(Action(op, 0, 0) for op in "FIW"),))
    assert made.simulate(forward_s=0, backward_s=6).timeline[-1].start_s == 3
    assert made.simulate(forward_s=0, backward_s=6, weight_grad_s=2).timeline[-1].start_s == 4
    assert made.simulate(forward_s=0, backward_s=6, input_grad_s=1).makespan_s == 6
