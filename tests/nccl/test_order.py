"""Calls of many groups, begun in another order by every process: all launch in one order.

The calls are xmesh's own; messages between them come late, and in place of NCCL there is a model of
GPUs: kernels of a process run one after the other, and each lasts until all its ranks have theirs.
"""

from __future__ import annotations

import itertools
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late import Late

from xmesh.errors import ArrayError
from xmesh.nccl import link as nccl_link
from xmesh.nccl.order import LaunchOrder
from xmesh.transport.loopback import LoopbackGroup


class Gpus:
    """Kernels of calls, by process: in the order of their launches."""

    def __init__(self, processes: int) -> None:
        self.queues: list[list[Any]] = [[] for _ in range(processes)]
        self.launched: list[list[Any]] = [[] for _ in range(processes)]
        self.ended: set[Any] = set()
        self.members: dict[Any, tuple[int, ...]] = {}

    def launch(self, process: int, call: Any) -> None:
        self.queues[process].append(call)
        self.launched[process].append(call)

    def done(self, process: int, call: Any) -> bool:
        for queue in self.queues:
            while queue and queue[0] in self.ended:
                queue.pop(0)
        if all(self.queues[p] and self.queues[p][0] == call for p in self.members[call]):
            self.ended.add(call)
        return call in self.ended


class Execution:
    """In place of NcclExecution: launched once it is made, as the launcher keeps the order."""

    launched = True

    def __init__(self, program: Any, communicators: Any, memory: Any, slots: Any, *rest: Any):
        self._gpus, self._process = program
        (_, (self._call,), _) = rest
        self._gpus.launch(self._process, self._call)

    @property
    def done(self) -> bool:
        return bool(self._gpus.done(self._process, self._call))

    def step(self) -> bool:
        return False


class Simulation:
    """Processes that make calls of groups.

    Args:
        groups: the ranks of each resharder; all its calls are made in the same order by all.
        rng: draws delays, and who is next.
    """

    def __init__(self, processes: int, groups: list[tuple[int, ...]], rng: random.Random) -> None:
        self.rng, self.gpus = rng, Gpus(processes)
        orders = [LaunchOrder(process) for process in range(processes)]
        #: Calls on the same communicator of the user's move each other on.
        locks = [[threading.RLock() for _ in range(2)] for _ in range(processes)]
        self.links: dict[tuple[int, int], Any] = {}
        for number, ranks in enumerate(groups):
            group = LoopbackGroup(ranks)
            for rank in ranks:
                progress = SimpleNamespace(lock=locks[rank][number % 2])
                link = SimpleNamespace(endpoint=Late(group, rank, rng), order=orders[rank])
                link.progress, link.program = progress, (self.gpus, rank)
                link.communicators = link.memory = link.slots = link.launcher = None
                link.plan = SimpleNamespace(name=f"of {ranks}")
                self.links[number, rank] = link
        self.groups = groups
        self.calls: dict[tuple[Any, int], nccl_link.NcclCall] = {}

    def start(self, number: int, rank: int, turn: int, error: Any = None) -> None:
        call = number, turn
        self.gpus.members[call] = self.groups[number]
        link = self.links[number, rank]
        sources: list[Any] = [call]
        self.calls[call, rank] = nccl_link.NcclCall(link, 10 * turn, error, sources, [], [])

    def run(self, starts: list[list[tuple[Any, ...]]], absent: int = -1) -> bool:
        """Let processes begin their calls and step; True when all calls have ended."""
        left = [list(each) for each in starts]
        idle = 0
        while any(left) or not all(call.done for call in self.calls.values()):
            moved = False
            for process in self.rng.sample(range(len(left)), len(left)):
                if left[process] and process != absent and self.rng.random() < 0.3:
                    self.start(left[process][0][0], process, *left[process].pop(0)[1:])
                    moved = True
                mine = [call for (_, rank), call in self.calls.items() if rank == process]
                if mine:
                    moved |= self.rng.choice(mine).step()
            idle = 0 if moved else idle + 1
            if idle > 300:
                return False
        return True

    def is_one_order(self) -> bool:
        """The launches of all processes fit into one order: they have no circle."""
        after: dict[Any, set[Any]] = {}
        for launched in self.gpus.launched:
            for one, other in itertools.pairwise(launched):
                after.setdefault(one, set()).add(other)
        left = {call for launched in self.gpus.launched for call in launched}
        while left:
            followers = set().union(*(after.get(call, set()) for call in left))
            first = left - followers
            if not first:
                return False
            left -= first
        return True


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(nccl_link, "NcclExecution", Execution)


@st.composite
def scenes(draw: st.DrawFn):
    processes = draw(st.integers(2, 7))
    one = st.sets(st.integers(0, processes - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    groups = draw(st.lists(one, min_size=1, max_size=5))
    turns = draw(st.integers(1, 3))
    return processes, groups, turns


def in_any_order(rng: random.Random, process: int, groups: Any, turns: int) -> list[Any]:
    """Its calls: those of one resharder in order, and resharders mixed as it likes."""
    todo = [number for number, ranks in enumerate(groups) if process in ranks] * turns
    rng.shuffle(todo)
    seen: dict[int, int] = {}
    found = []
    for number in todo:
        found.append((number, seen.get(number, 0)))
        seen[number] = seen.get(number, 0) + 1
    return found


@settings(max_examples=400)
@given(scene=scenes(), seed=st.integers(0, 1 << 30))
def test_any_order_of_starts_ends_in_one_order_of_launches(scene, seed):
    processes, groups, turns = scene
    rng = random.Random(seed)
    simulation = Simulation(processes, groups, rng)
    starts = [in_any_order(rng, process, groups, turns) for process in range(processes)]
    assert simulation.run(starts)
    assert simulation.is_one_order()
    for process, launched in enumerate(simulation.gpus.launched):
        assert sorted(launched) == sorted(starts[process])


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30))
def test_a_call_whose_peer_is_late_holds_back_no_other(seed):
    rng = random.Random(seed)
    simulation = Simulation(4, [(0, 3), (0, 1, 2), (1, 2)], rng)
    starts = [[(0, 0), (1, 0)], [(2, 0), (1, 0)], [(1, 0), (2, 0)], [(0, 0)]]
    assert not simulation.run(starts, absent=3)
    assert simulation.gpus.ended == {(1, 0), (2, 0)}
    simulation.start(0, 3, 0)
    assert simulation.run([[], [], [], []])
    assert (0, 0) in simulation.gpus.ended


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30))
def test_a_wrong_argument_ends_the_call_for_all_and_no_other(seed):
    simulation = Simulation(3, [(0, 1, 2), (0, 1)], random.Random(seed))
    starts: list[Any] = [[(0, 0), (1, 0), (0, 1)], [(1, 0), (0, 0), (0, 1)], []]
    starts[2] = [(0, 0, ArrayError("a wrong argument")), (0, 1)]
    assert simulation.run(starts)
    for rank in range(3):
        error = simulation.calls[(0, 0), rank].error
        assert isinstance(error, ArrayError)
        assert "a wrong argument" in str(error)
    assert (0, 0) not in [call for launched in simulation.gpus.launched for call in launched]
    assert simulation.gpus.ended == {(1, 0), (0, 1)}


def test_without_one_order_the_model_hangs(monkeypatch):
    """Else it would prove nothing."""
    monkeypatch.setattr(LaunchOrder, "is_next", lambda self, ticket: True)
    ended = 0
    for seed in range(40):
        simulation = Simulation(3, [(0, 1, 2), (0, 1, 2), (0, 2)], random.Random(seed))
        starts = [[(0, 0), (1, 0), (2, 0)], [(1, 0), (0, 0)], [(2, 0), (1, 0), (0, 0)]]
        ended += simulation.run(starts)
    assert ended < 40


def test_numbers_are_given_once():
    orders = [LaunchOrder(process) for process in range(3)]
    numbers = [order.unique() for order in orders for _ in range(50)]
    assert len(set(numbers)) == 150
    assert min(numbers) > 0


def test_a_ticket_that_is_given_up_holds_nobody_back():
    order = LaunchOrder(0)
    moved = []
    first = order.propose(lambda: moved.append(1))
    second = order.propose(lambda: moved.append(2))
    order.settle(second, (2, 7))
    assert not order.is_next(first)
    assert not order.is_next(second)
    assert moved == [1]
    order.leave(first)
    order.leave(first)
    assert order.is_next(second)
