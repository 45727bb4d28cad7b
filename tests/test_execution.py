"""One call as a state machine: any order of steps, any delay of messages, wrong arguments."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from late import Late

import xmesh
from xmesh import CostModel, DeviceMesh, Layout, Plan, Resharder, Topology
from xmesh.errors import ArrayError, PeerError, PlanError, TransferTimeout
from xmesh.execution import Execution
from xmesh.memory import HostMemory
from xmesh.planner import STRATEGIES
from xmesh.program import compile_program
from xmesh.staging import Staging
from xmesh.transport.loopback import LoopbackGroup


class Ranks:
    """Every rank's execution of some calls of a plan, over one group."""

    def __init__(self, plan: Plan, staging_nbytes: int, rng: random.Random) -> None:
        self.plan, self.rng = plan, rng
        group = LoopbackGroup(plan.ranks)
        self.programs = {rank: compile_program(plan, rank) for rank in plan.ranks}
        self.endpoints = {rank: Late(group, rank, rng) for rank in plan.ranks}
        self.staging = {}
        self.memory = {}
        for rank, program in self.programs.items():
            largest = max((piece.nbytes for piece in program.pieces), default=0)
            self.staging[rank] = Staging(largest, staging_nbytes)
            self.memory[rank] = HostMemory(self.staging[rank])
        self.outputs: list[dict[int, list[np.ndarray]]] = []
        self.executions: list[tuple[int, int, Execution]] = []

    def call(self, array: np.ndarray, tag: int, bad: Sequence[int] = ()) -> None:
        outputs = {}
        memory = self.rng.choice(oracle.MEMORY)
        for rank in self.plan.ranks:
            held = oracle.held(array, self.plan.src, rank)
            sources = [oracle.guarded_copy(a, memory).view for a in held]
            outs = [
                oracle.guarded(box.shape, self.plan.dtype, memory).view
                for box in self.plan.dst.boxes(rank)
            ]
            outputs[rank] = outs
            execution = Execution(
                self.programs[rank],
                self.endpoints[rank],
                tag,
                self.memory[rank],
                self.memory[rank],
                None if rank in bad else sources,
                outs,
            )
            self.executions.append((len(self.outputs), rank, execution))
        self.outputs.append(outputs)

    def run(self, stalled: Sequence[int] = ()) -> bool:
        """Step ranks in a random order, some much more often than others; True when all ended."""
        weights = [self.rng.choice((1, 1, 20)) for _ in self.executions]
        idle = 0
        while not all(execution.done for _, _, execution in self.executions):
            moved = False
            for _, rank, execution in self.rng.choices(self.executions, weights, k=8):
                if rank not in stalled:
                    moved |= execution.step()
            idle = 0 if moved else idle + 1
            if idle > 2000:
                return False
        return True

    def spare_nbytes(self, rank: int, calls: int) -> int:
        """Memory past the limit that the documentation of Resharder allows to some calls."""
        program = self.programs[rank]
        channels = len({(message.peer, message.channel) for message in program.sends})
        return calls * (1 + channels) * self.staging[rank].slot_nbytes


@st.composite
def small_plans(draw: st.DrawFn) -> Plan:
    src, dst = draw(strategies.layout_pairs(max_ndim=3, max_extent=5, explicit=True))
    hosts = draw(st.lists(st.integers(0, 3), min_size=16, max_size=16))
    return xmesh.plan(
        src,
        dst,
        "<i2",
        Topology(hosts),
        strategy=draw(st.sampled_from(STRATEGIES)),
        scheduler="naive",
        chunk_nbytes=draw(st.sampled_from((1, 6, 40))),
    )


@settings(max_examples=200)
@given(plan=small_plans(), seed=st.integers(0, 1 << 30), calls=st.integers(1, 3))
def test_any_order_of_steps_ends_with_the_right_data(plan, seed, calls):
    """Rendezvous only, the least staging memory, ranks of very different speed: no hang."""
    ranks = Ranks(plan, 0, random.Random(seed))
    arrays = [oracle.whole(plan.src.shape, plan.dtype, i) for i in range(calls)]
    for i, array in enumerate(arrays):
        ranks.call(array, tag=100 * i)
    assert ranks.run()
    for array, outputs in zip(arrays, ranks.outputs, strict=True):
        for rank, got in outputs.items():
            assert not oracle.difference(got, oracle.held(array, plan.dst, rank))
    for staging in ranks.staging.values():
        assert staging.nbytes <= 4 * staging.slot_nbytes


@settings(max_examples=100)
@given(plan=small_plans(), seed=st.integers(0, 1 << 30), data=st.data())
def test_nobody_takes_half_an_array_for_whole(plan, seed, data):
    """Bad ranks send empty messages; exactly those that wait for them learn of it, and all end."""
    bad = data.draw(st.sets(st.sampled_from(plan.ranks), max_size=3))
    ranks = Ranks(plan, 0, random.Random(seed))
    array = oracle.whole(plan.src.shape, plan.dtype)
    ranks.call(array, 0, sorted(bad))
    ranks.call(array, 100)
    assert ranks.run()
    for call, rank, execution in ranks.executions:
        senders = {
            ranks.programs[rank].pieces[message.piece].sender
            for message in ranks.programs[rank].receives
        }
        assert execution.refused == (senders & bad if call == 0 else set())
        if not execution.refused and not (call == 0 and rank in bad):
            wanted = oracle.held(array, plan.dst, rank)
            assert not oracle.difference(ranks.outputs[call][rank], wanted)
    for staging in ranks.staging.values():
        assert staging.nbytes <= 4 * staging.slot_nbytes


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("elements", [64, 1024])
def test_staging_does_not_grow_with_the_array(strategy, elements, monkeypatch):
    """A chunk that several peers need is packed again rather than kept."""
    mesh = DeviceMesh.arange((4,))
    src, dst = Layout(mesh, "S0 R", (4, elements)), Layout(mesh, "R R", (4, elements))
    plan = xmesh.plan(src, dst, "u1", strategy=strategy, scheduler="naive", chunk_nbytes=8)
    ranks = Ranks(plan, 0, random.Random(1))
    monkeypatch.setattr(oracle, "MEMORY", ("strided",))
    array = oracle.whole((4, elements), "u1")
    ranks.call(array, 0)
    most = dict.fromkeys(plan.ranks, 0)
    while not all(execution.done for _, _, execution in ranks.executions):
        for _, rank, execution in ranks.executions:
            execution.step()
            most[rank] = max(most[rank], ranks.staging[rank].nbytes)
    for rank in plan.ranks:
        assert not oracle.difference(ranks.outputs[0][rank], [array])
        assert 0 < most[rank] <= 4 * 8 + ranks.spare_nbytes(rank, calls=1)


def chain(**options: Any) -> Plan:
    """From rank 0 to four others on two hosts, through relays."""
    src = Layout(DeviceMesh([0]), "R", (64,))
    dst = Layout(DeviceMesh([1, 2, 3, 4]), "R", (64,))
    topology = Topology(["a", "b", "b", "c", "c"])
    cost = CostModel(nic_latency_s=0, intra_latency_s=0)  # else small boxes take a tree
    options = {"strategy": "broadcast", "chunk_nbytes": 32, "name": "act", "cost": cost, **options}
    return xmesh.plan(src, dst, "<i4", topology, **options)


def outstanding(execution: Execution) -> int:
    return int(execution.waits_for().split()[0])


def test_outstanding_counts_down_to_nothing():
    ranks = Ranks(chain(), 0, random.Random(3))
    ranks.call(oracle.whole((64,), "<i4"), 0)
    totals = {rank: outstanding(execution) for _, rank, execution in ranks.executions}
    assert totals[0] == 256
    assert sum(totals.values()) == 2 * 4 * 256
    last = dict(totals)
    while not all(execution.done for _, _, execution in ranks.executions):
        for _, rank, execution in ranks.executions:
            execution.step()
            nbytes = outstanding(execution)
            assert nbytes <= last[rank]
            last[rank] = nbytes
    assert set(last.values()) == {0}


def test_outstanding_names_the_first_message_that_is_missing():
    plan = chain()
    ranks = Ranks(plan, 0, random.Random(5))
    ranks.call(oracle.whole((64,), "<i4"), 0)
    assert not ranks.run(stalled=[0])
    _, _, execution = ranks.executions[1]
    text = execution.waits_for()
    assert "next is box [0:" in text
    assert "from rank 0 (host this process)" in text
    execution.abandon("as a test")
    assert execution.done


def stalled_resharder(plan: Plan, monkeypatch, absent: int) -> tuple[Resharder, Any]:
    """A resharder after a good call, one of whose ranks no longer moves; and its arguments."""
    array = oracle.whole(plan.src.shape, plan.dtype)
    local = {rank: oracle.held(array, plan.src, rank)[0] for rank in plan.src.ranks}
    reshard = Resharder(plan)
    reshard(local)
    step = Execution.step
    monkeypatch.setattr(Execution, "step", lambda self: self._program.rank != absent and step(self))
    return reshard, local


def test_a_timeout_names_tensor_box_peer_host_and_bytes_outstanding(monkeypatch):
    reshard, local = stalled_resharder(chain(), monkeypatch, absent=0)
    with pytest.raises(TransferTimeout) as caught:
        reshard.start(local).wait(timeout_s=5)
    text = str(caught.value)
    for part in (
        "a transfer must finish within 5 s",
        "256 bytes outstanding",
        "next is box [0:1] (4 bytes) to rank ",
        "(host this process)",
        "rank 0 (host this process), tensor 'act'",
        "remedy:",
    ):
        assert part in text
    with pytest.raises(xmesh.errors.ClosedError, match="it gave up after 5 s"):
        reshard(local)


def test_a_timeout_in_the_agreement_of_the_first_call(monkeypatch):
    plan = chain()
    monkeypatch.setattr("xmesh.agreement.Agreement.step", lambda self: False)
    with Resharder(plan) as reshard, pytest.raises(TransferTimeout) as caught:
        reshard.start({0: np.zeros(64, "<i4")}).wait(timeout_s=3)
    text = str(caught.value)
    assert "all ranks of a plan must call within 3 s" in text
    assert "tensor 'act'" in text
    assert "agreement before the first call" in text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_wrong_array_after_a_good_call(strategy):
    """Its own ArrayError there, PeerError for who waits for it; the next call is right again."""
    plan = chain(strategy=strategy)
    array = oracle.whole((64,), "<i4")
    with Resharder(plan) as reshard:
        for seed in range(3):
            array = oracle.whole((64,), "<i4", seed)
            result = reshard({0: array})
            assert all((result[rank] == array).all() for rank in plan.dst.ranks)
            request = reshard.start({0: array[:-1]})
            with pytest.raises(ArrayError, match="local must have the shape"):
                request.wait()
            errors = {part.member.rank: part.error() for part in request.parts}
            assert type(errors.pop(0)) is ArrayError
            for rank, error in errors.items():
                assert type(error) is PeerError
                assert "no data came from rank 0 (host this process)" in str(error)
                assert f"rank {rank}, tensor 'act'" in str(error)
                assert "the output is incomplete" in str(error)


def test_a_plan_that_moves_what_a_rank_does_not_have():
    plan = chain()
    other = Layout(DeviceMesh([0, 1]), "S0", (64,))
    broken = dataclasses.replace(plan, src=other)
    with pytest.raises(PlanError, match="a plan may only move what its layouts give a rank"):
        Resharder(broken)
