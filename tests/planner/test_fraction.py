from __future__ import annotations

from fractions import Fraction
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmesh.planner.fraction import balance

SENDERS = range(6)


def subsets(senders):
    return chain.from_iterable(combinations(senders, n) for n in range(1, len(senders) + 1))


def least_time(demands, speeds) -> Fraction:
    """Hall's theorem: the group of senders whose own demands take it longest."""
    return max(
        Fraction(sum(n for c, n in demands.items() if set(c) <= set(group)))
        / sum(Fraction(speeds[s]) for s in group)
        for group in subsets(sorted({s for c in demands for s in c}))
    )


@st.composite
def instances(draw: st.DrawFn):
    candidates = st.sets(st.sampled_from(SENDERS), min_size=1).map(lambda s: tuple(sorted(s)))
    demands = draw(st.dictionaries(candidates, st.integers(0, 1000), min_size=1, max_size=10))
    return demands, {s: draw(st.sampled_from((0.1, 1.0, 1.0, 2.0, 7.5))) for s in SENDERS}


@given(instances())
def test_the_time_is_that_of_the_worst_group_of_senders(instance):
    demands, speeds = instance
    assert balance(demands, speeds)[0] == pytest.approx(float(least_time(*instance)), rel=1e-12)


@given(instances())
def test_the_division_sends_everything_and_nobody_is_late(instance):
    demands, speeds = instance
    _, flow = balance(demands, speeds)
    assert all(sender in candidates for candidates, sender in flow)
    assert all(nbytes >= 0 for nbytes in flow.values())
    for candidates, nbytes in demands.items():
        assert sum(flow.get((candidates, s), 0) for s in candidates) == nbytes
    time = least_time(*instance)
    for sender in SENDERS:
        sent = sum(nbytes for (_, s), nbytes in flow.items() if s == sender)
        assert sent <= time * Fraction(speeds[sender])


@given(instances(), st.randoms(use_true_random=False))
def test_the_time_does_not_depend_on_the_order_of_the_demands(instance, random):
    demands, speeds = instance
    shuffled = list(demands.items())
    random.shuffle(shuffled)
    assert balance(dict(shuffled), speeds)[0] == balance(demands, speeds)[0]


def test_nothing_to_send_takes_no_time():
    assert balance({}, {}) == (0.0, {})


def test_free_choice_evens_out_and_a_forced_sender_gets_less_of_the_rest():
    seconds, flow = balance({(0, 1): 100}, {0: 1.0, 1: 3.0})
    assert seconds == 25.0
    assert flow == {((0, 1), 0): 25, ((0, 1), 1): 75}
    seconds, flow = balance({(0,): 60, (0, 1): 100}, {0: 1.0, 1: 1.0})
    assert seconds == 80.0
    assert flow == {((0,), 0): 60, ((0, 1), 0): 20, ((0, 1), 1): 80}


def test_a_group_that_shares_its_demands_is_found_behind_others():
    # Senders 0 and 1 alone can serve 90 bytes; sender 2 has time left but cannot help.
    demands = {(0, 1): 90, (1, 2): 6, (2,): 1}
    assert balance(demands, dict.fromkeys(range(3), 1.0))[0] == 45.0
