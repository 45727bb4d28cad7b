"""Resharding with all ranks in one process, element by element against the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import xmesh
from xmesh import Box, DeviceMesh, Layout, Plan, Resharder, Topology
from xmesh.execution import Execution
from xmesh.planner import STRATEGIES, make_plan
from xmesh.planner.rotation import RotatedTransfers
from xmesh.planner.schedulers import BY_NAME

DTYPES = (
    "?",
    "i1",
    "<u2",
    ">f4",
    "<f8",
    "<c16",
    "V3",
    [("a", "<f8"), ("b", "<i4")],
)


@dataclass
class Call:
    """Arguments of one call, all inside guard elements, and what must come of it."""

    plan: Plan
    local: dict[int, Any]
    out: dict[int, Any]
    wanted: dict[int, list[np.ndarray]]
    guards: list[oracle.Guarded]
    sources: list[oracle.Guarded]

    def check(self, result: dict[int, Any]) -> None:
        assert sorted(result) == [rank for rank, arrays in self.wanted.items() if arrays]
        for rank, arrays in self.wanted.items():
            got = result.get(rank)
            assert rank not in self.out or got is self.out[rank]
            problem = oracle.difference(oracle.as_arrays(got), arrays)
            assert not problem, f"rank {rank}: {problem}\n{self.plan}"
        for guard in self.guards:
            assert guard.intact(), f"elements around an array changed\n{self.plan}"
        for source in self.sources:
            assert source.buffer.tobytes() == source.before.tobytes(), "local changed"


def make_call(draw: st.DrawFn, plan: Plan, seed: int = 0) -> Call:
    memories = st.sampled_from(oracle.MEMORY)
    flip: st.SearchStrategy[bool] = st.booleans()
    array = oracle.whole(plan.src.shape, plan.dtype, seed)
    call = Call(plan, {}, {}, {}, [], [])
    for rank in plan.src.ranks:
        made = [oracle.guarded_copy(a, draw(memories)) for a in oracle.held(array, plan.src, rank)]
        call.sources += made
        if made:
            call.local[rank] = oracle.as_argument([guarded.view for guarded in made])
    give_out: bool = draw(flip)
    for rank in plan.dst.ranks:
        call.wanted[rank] = oracle.held(array, plan.dst, rank)
        give_here: bool = draw(flip)
        if give_out and give_here and call.wanted[rank]:
            outs = [oracle.guarded(a.shape, a.dtype, draw(memories)) for a in call.wanted[rank]]
            call.guards += outs
            call.out[rank] = oracle.as_argument([guarded.view for guarded in outs])
    call.wanted = dict(sorted(call.wanted.items()))
    return call


@st.composite
def topologies(draw: st.DrawFn) -> Topology | None:
    hosts = draw(st.sampled_from((None, 1, 2, 4)))
    if hosts is None:
        return None
    places = st.integers(0, hosts - 1)
    size = strategies.RANK_BOUND
    nics = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    return Topology(draw(st.lists(places, min_size=size, max_size=size)), nics)


@st.composite
def plans(draw: st.DrawFn, explicit: bool = False, max_extent: int = 6) -> Plan:
    src, dst = draw(strategies.layout_pairs(explicit=explicit, max_extent=max_extent))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    nbytes = int(np.prod(src.shape)) * dtype.itemsize
    chunk_nbytes = draw(st.sampled_from((1 << 22, nbytes, nbytes // 7, nbytes // 40)))
    return xmesh.plan(
        src,
        dst,
        dtype,
        draw(topologies()),
        strategy=draw(st.sampled_from((*STRATEGIES, "auto"))),
        scheduler=draw(st.sampled_from(tuple(BY_NAME))),
        seed=draw(st.integers(0, 3)),
        chunk_nbytes=1 if nbytes < 100 else max(1, chunk_nbytes),
    )


def staging_limit(plan: Plan, limit_nbytes: int, calls: int = 1) -> int:
    """What the documentation of Resharder allows all ranks together."""
    chunk = max(plan.chunk_nbytes, plan.itemsize)
    return len(plan.ranks) * (max(limit_nbytes, 4 * chunk))


def run(draw: st.DrawFn, plan: Plan, calls: int = 2) -> None:
    limit_nbytes = draw(st.sampled_from((0, 1, 100, 1 << 26)))
    with Resharder(plan, staging_nbytes=limit_nbytes) as reshard:
        for seed in range(calls):
            call = make_call(draw, plan, seed)
            call.check(reshard(call.local, call.out))
            assert reshard.staging_nbytes <= staging_limit(plan, limit_nbytes)


@settings(max_examples=600)
@given(data=st.data())
def test_every_rank_gets_its_boxes(data):
    run(data.draw, data.draw(plans()))


@settings(max_examples=500)
@given(data=st.data())
def test_custom_uneven_sizes_do_not_give_a_wrong_tensor(data):
    """Explicit layouts: uneven, block-cyclic, several boxes on a rank, boxes on several ranks."""
    run(data.draw, data.draw(plans(explicit=True)))


@settings(max_examples=150)
@given(data=st.data())
def test_plans_by_rotation(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_plan, "SEARCH_LIMIT", 1)
        plan = data.draw(plans(explicit=data.draw(st.booleans())))
    assume(isinstance(plan.table, RotatedTransfers))
    run(data.draw, plan, calls=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scheduler", BY_NAME)
def test_every_strategy_with_every_scheduler(strategy, scheduler):
    @settings(max_examples=15)
    @given(data=st.data())
    def check(data):
        src, dst = data.draw(strategies.layout_pairs(explicit=True, max_extent=4))
        topology = data.draw(topologies())
        plan = xmesh.plan(
            src, dst, "<i2", topology, strategy=strategy, scheduler=scheduler, chunk_nbytes=16
        )
        run(data.draw, plan, calls=1)

    check()


def cyclic(shape: tuple[int, ...], ranks: int, block: int, axis: int) -> Layout:
    """Blocks along an axis dealt to ranks in turn."""
    boxes: dict[int, list[Box]] = {rank: [] for rank in range(ranks)}
    for i, start in enumerate(range(0, shape[axis], block)):
        first, last = [0] * len(shape), list(shape)
        first[axis], last[axis] = start, min(start + block, shape[axis])
        boxes[i % ranks].append(Box(tuple(first), tuple(last)))
    return Layout.from_boxes(boxes, shape)


def halos(shape: tuple[int, ...], ranks: int, width: int) -> Layout:
    """Slabs along the first axis, each with a margin of its neighbours'."""
    bounds = [shape[0] * i // ranks for i in range(ranks + 1)]
    return Layout.from_boxes(
        {
            rank: [
                Box(
                    (max(0, bounds[rank] - width), *(0,) * (len(shape) - 1)),
                    (min(shape[0], bounds[rank + 1] + width), *shape[1:]),
                )
            ]
            for rank in range(ranks)
        },
        shape,
    )


@settings(max_examples=150)
@given(data=st.data())
def test_block_cyclic_and_halos(data):
    shape = (data.draw(st.integers(1, 24)), data.draw(st.integers(1, 5)))

    def some_layout() -> Layout:
        ranks = data.draw(st.integers(1, 6))
        if data.draw(st.booleans()):
            return cyclic(shape, ranks, data.draw(st.integers(1, 5)), data.draw(st.integers(0, 1)))
        layout: Layout = data.draw(strategies.layouts(shape))
        return layout

    src = some_layout()
    if data.draw(st.booleans()):
        dst = halos(shape, data.draw(st.integers(1, 8)), data.draw(st.integers(0, 4)))
    else:
        dst = some_layout()
    chunk_nbytes = data.draw(st.sampled_from((1, 24, 1000)))
    run(data.draw, xmesh.plan(src, dst, "<i4", chunk_nbytes=chunk_nbytes), calls=1)


@settings(max_examples=200)
@given(data=st.data())
def test_requests_in_flight_do_not_mix(data):
    plan = data.draw(plans(explicit=True, max_extent=4))
    limit_nbytes = data.draw(st.sampled_from((0, 1 << 26)))
    with Resharder(plan, staging_nbytes=limit_nbytes) as reshard:
        calls = [make_call(data.draw, plan, seed) for seed in range(data.draw(st.integers(2, 5)))]
        requests = [reshard.start(call.local, call.out) for call in calls]
        for i in data.draw(st.permutations(range(len(calls)))):
            if data.draw(st.booleans()):
                requests[i].test()
            calls[i].check(requests[i].wait())
        assert reshard.staging_nbytes <= staging_limit(plan, limit_nbytes)


@settings(max_examples=60)
@given(data=st.data())
def test_two_resharders_in_flight_do_not_mix(data):
    first, second = (data.draw(plans(max_extent=4)) for _ in range(2))
    with Resharder(first) as one, Resharder(second) as other:
        calls = [make_call(data.draw, plan, seed) for seed, plan in enumerate((first, second))]
        requests = [one.start(calls[0].local, calls[0].out)]
        requests.append(other.start(calls[1].local, calls[1].out))
        for i in data.draw(st.permutations(range(2))):
            calls[i].check(requests[i].wait())


def test_more_calls_one_after_another_than_may_be_in_flight():
    plan = line_plan()
    with Resharder(plan) as reshard:
        for seed in range(100):
            array, local = inputs_of(plan, seed)
            result = reshard(local)
            for rank in plan.dst.ranks:
                assert not oracle.difference([result[rank]], oracle.held(array, plan.dst, rank))


def inputs_of(plan: Plan, seed: int = 0) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    array = oracle.whole(plan.src.shape, plan.dtype, seed)
    return array, {rank: oracle.held(array, plan.src, rank)[0] for rank in plan.src.ranks}


def line_plan(**options: Any) -> Plan:
    src = Layout(DeviceMesh([0, 1, 2]), "S0 R", (12, 4))
    dst = Layout(DeviceMesh([3, 4, 2, 1]), "R S0", (12, 4))
    return xmesh.plan(src, dst, "<f4", Topology([0, 0, 1, 1, 2]), **options)


def test_one_call_more_than_may_be_in_flight_waits_for_the_oldest():
    plan = line_plan()
    array, local = inputs_of(plan)
    with Resharder(plan) as reshard, pytest.MonkeyPatch.context() as patch:
        patch.setattr("xmesh.execution.Execution.step", lambda self: False)  # the others are late
        requests = [reshard.start(local) for _ in range(31)]
        patch.undo()
        oldest = vars(requests[0])
        assert not oldest["over"]
        requests.append(reshard.start(local))
        assert oldest["over"]
        for request in requests:
            result = request.wait()
            assert not oracle.difference([result[3]], oracle.held(array, plan.dst, 3))
        reshard(local)


def test_a_call_that_ends_late_keeps_its_tag(monkeypatch):
    """Calls may end out of order; a tag must not be given to another call before its own has."""
    plan = line_plan()
    array, local = inputs_of(plan)
    step = Execution.step
    late: set[Execution] = set()
    with Resharder(plan) as reshard:
        reshard(local)
        looks = 0

        def step_late(self):
            nonlocal looks
            looks += self in late
            if looks > 5000:
                late.clear()  # the late one goes on at last, while the call below waits for it
            return self not in late and step(self)

        monkeypatch.setattr(Execution, "step", step_late)
        begin = Execution.__init__

        def begin_late(self, *arguments, **options):
            begin(self, *arguments, **options)
            late.add(self)

        monkeypatch.setattr(Execution, "__init__", begin_late)
        first = reshard.start(local)
        monkeypatch.setattr(Execution, "__init__", begin)
        for _ in range(30):
            reshard(local)
        state = vars(first)
        assert not state["over"]
        looks = 0
        reshard(local)
        assert state["over"]
        result = first.wait()
        assert not oracle.difference([result[3]], oracle.held(array, plan.dst, 3))
        reshard(local)


def test_one_call():
    plan = line_plan()
    array, local = inputs_of(plan)
    out = {3: np.zeros((12, 1), "<f4")}
    result = xmesh.reshard(local, plan.src, plan.dst, out=out)
    assert result[3] is out[3]
    for rank in plan.dst.ranks:
        assert not oracle.difference([result[rank]], oracle.held(array, plan.dst, rank))


def test_one_call_without_an_array_needs_a_dtype():
    plan = line_plan()
    with pytest.raises(xmesh.errors.ArrayError, match="a dtype is needed"):
        xmesh.reshard({}, plan.src, plan.dst)


def test_a_closed_resharder_says_so():
    reshard = Resharder(line_plan(name="w7"))
    reshard.close()
    reshard.close()
    with pytest.raises(xmesh.errors.ClosedError) as caught:
        reshard({})
    assert "close() was called" in str(caught.value)
    assert "'w7'" in str(caught.value)


def test_close_gives_up_requests_in_flight(monkeypatch):
    plan = line_plan()
    reshard = Resharder(plan)
    monkeypatch.setattr("xmesh.execution.Execution.step", lambda self: False)
    _, local = inputs_of(plan)
    request = reshard.start(local)
    reshard.close()
    assert request.test()
    with pytest.raises(xmesh.errors.ClosedError, match="while a call was in flight"):
        request.wait()


def test_one_call_with_several_boxes_on_a_rank():
    src, dst = cyclic((10, 3), 2, 2, 0), cyclic((10, 3), 3, 1, 1)
    array = oracle.whole((10, 3), "<i2")
    local = {rank: oracle.held(array, src, rank) for rank in src.ranks}
    result = xmesh.reshard({0: local[0], 1: tuple(local[1])}, src, dst)
    for rank in dst.ranks:
        wanted = oracle.held(array, dst, rank)
        assert not oracle.difference(oracle.as_arrays(result[rank]), wanted)
