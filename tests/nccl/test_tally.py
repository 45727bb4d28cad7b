"""The maximum over a group, along a tree of messages that come late and in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late import Late

from xmesh.nccl.tally import Tally
from xmesh.transport.loopback import LoopbackEndpoint, LoopbackGroup


def unmatched(group: LoopbackGroup) -> int:
    return sum(len(queue.sends) + len(queue.receives) for queue in group._queues.values())


@settings(max_examples=150)
@given(
    ranks=st.sets(st.integers(0, 60), min_size=1, max_size=21),
    data=st.data(),
    seed=st.integers(0, 1 << 30),
)
def test_everyone_gets_the_maximum(ranks, data, seed):
    rng = random.Random(seed)
    group = LoopbackGroup(sorted(ranks))
    numbers = st.tuples(st.integers(-5, 1 << 50), st.integers(-(1 << 62), 1 << 62))
    own = {rank: data.draw(numbers) for rank in group.ranks}
    tallies = {
        rank: Tally(Late(group, rank, rng), 3, *own[rank])
        for rank in rng.sample(group.ranks, len(group.ranks))
    }
    for _ in range(3000):
        if all(tally.over for tally in tallies.values()):
            break
        tallies[rng.choice(group.ranks)].step()
    wanted = tuple(max(each[i] for each in own.values()) for i in range(2))
    assert {tally.result for tally in tallies.values()} == {wanted}
    assert unmatched(group) == 0
    assert not any(tally.step() for tally in tallies.values())


def test_nobody_has_a_result_before_all_have_come():
    group = LoopbackGroup(range(6))
    tallies = [Tally(LoopbackEndpoint(group, rank), 0, rank) for rank in (0, 1, 2, 4, 5)]
    for _ in range(20):
        for tally in tallies:
            tally.step()
    assert not any(tally.over for tally in tallies)
    waiting = [tally.waiting_for() for tally in tallies]
    assert waiting == [[2], [0], [3], [0], [4]]


def test_few_messages_along_a_shallow_tree():
    sent = []

    class Counting(LoopbackEndpoint):
        def send(self, data, peer, tag):
            sent.append((self.rank, peer))
            return super().send(data, peer, tag)

    group = LoopbackGroup(range(16))
    tallies = [Tally(Counting(group, rank), 0, rank) for rank in range(16)]
    rounds = 0
    while not all(tally.over for tally in tallies):
        rounds += 1
        for tally in tallies:
            tally.step()
        assert rounds < 20
    assert len(sent) == 2 * 15
    assert max(sum(a == rank for a, _ in sent) for rank in range(16)) <= 4 + 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_is_abandoned_leaves_nothing_behind(rank):
    group = LoopbackGroup(range(3))
    tally = Tally(LoopbackEndpoint(group, rank), 0, 1)
    assert unmatched(group) > 0
    tally.abandon()
    assert unmatched(group) == 0
