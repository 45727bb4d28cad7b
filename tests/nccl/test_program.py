"""What ranks give to NCCL for a plan: it meets at both ends, moves each byte once, and never hangs.

A GPU is modelled as strictly as could be: each rank is at one launch, whatever its stream, until
all that take part in it are there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import draws
import numpy as np
import oracle
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

import xmesh
from xmesh import DeviceMesh, Layout, Plan, Topology
from xmesh.execution import view_of
from xmesh.nccl import program as nccl_program
from xmesh.nccl.program import (
    Launch,
    NcclProgram,
    Operation,
    broadcasts,
    compile_nccl,
    groups_of,
    waves_of,
)
from xmesh.planner import STRATEGIES


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    src, dst = draw(strategies.layout_pairs(max_ndim=3, max_extent=6, explicit=True))
    hosts = draw(st.lists(st.integers(0, 3), min_size=16, max_size=16))
    strategy = draw(st.sampled_from(STRATEGIES))
    return xmesh.plan(src, dst, "<i4", Topology(hosts), strategy=strategy, scheduler="naive")


class Gpus:
    """All ranks of a plan, each at one launch at a time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.programs = {rank: compile_nccl(plan, rank) for rank in plan.ranks}
        array = oracle.whole(plan.src.shape, plan.dtype)
        self.sources = {rank: oracle.held(array, plan.src, rank) for rank in plan.ranks}
        self.wanted = {rank: oracle.held(array, plan.dst, rank) for rank in plan.ranks}
        self.outputs = {
            rank: [np.zeros_like(a) for a in arrays] for rank, arrays in self.wanted.items()
        }
        #: How often each element was written.
        self.writes = {
            rank: [np.zeros(a.shape, int) for a in arrays] for rank, arrays in self.wanted.items()
        }
        self.place = dict.fromkeys(plan.ranks, 0)

    def head(self, rank: int) -> Launch | None:
        launches = self.programs[rank].launches
        return launches[self.place[rank]] if self.place[rank] < len(launches) else None

    def run(self) -> None:
        for rank, program in self.programs.items():
            for source, destination in program.copies:
                self._write(rank, [destination], view_of(source, self.sources[rank]).tobytes())
        while any(self.head(rank) for rank in self.place):
            assert self._step(), "nobody can go on"

    def _step(self) -> bool:
        for rank in self.place:
            launch = self.head(rank)
            if launch is None:
                continue
            peers = self._of_broadcast(launch) or self._of_group(rank)
            if peers:
                for peer in peers:
                    self.place[peer] += 1
                return True
        return False

    def _of_broadcast(self, launch: Launch) -> list[int]:
        """The ranks of a broadcast, moved on, if all are there."""
        first = launch.operations[0]
        if first.kind != "broadcast":
            return []
        group = next(iter(self.programs.values())).groups[launch.group]
        heads = {rank: self.head(rank) for rank in group}
        for rank, other in heads.items():
            if other is None or other.operations[0].kind != "broadcast":
                return []
            (operation,) = other.operations
            if (other.group, operation.peer) != (launch.group, first.peer):
                return []
            assert operation.nbytes == first.nbytes
            assert operation.root == (rank == first.peer)
        data = self._read(first.peer, heads[first.peer])
        for rank, other in heads.items():
            if rank != first.peer and other is not None:
                self._write(rank, other.operations[0].regions, data)
        return list(group)

    def _of_group(self, rank: int) -> list[int]:
        """All ranks whose sends and receives meet within their heads, moved on."""
        found, todo = {rank}, [rank]
        while todo:
            launch = self.head(todo[-1])
            todo.pop()
            if launch is None or launch.operations[0].kind == "broadcast":
                return []
            for operation in launch.operations:
                if operation.peer not in found:
                    found.add(operation.peer)
                    todo.append(operation.peer)
        moves = []
        for one in found:
            for operation in self._operations(one):
                back = "recv" if operation.kind == "send" else "send"
                # Operations between two ranks meet by their order.
                mine = [o for o in self._operations(one) if o[:2] == operation[:2]]
                theirs = [o for o in self._operations(operation.peer) if o[:2] == (back, one)]
                if [o.nbytes for o in mine] != [o.nbytes for o in theirs]:
                    return []
                if operation.kind == "recv":
                    sent = theirs[mine.index(operation)]
                    moves.append((one, operation, sent))
        for one, operation, sent in moves:
            self._write(one, operation.regions, self._read(operation.peer, sent))
        return sorted(found)

    def _operations(self, rank: int) -> list[Any]:
        launch = self.head(rank)
        if launch is None or launch.operations[0].kind == "broadcast":
            return []
        return [_P2P(o.kind, o.peer, o.nbytes, o.regions) for o in launch.operations]

    def _read(self, rank: int, what: Any) -> bytes:
        operation = what.operations[0] if isinstance(what, Launch) else what
        views = [view_of(region, self.sources[rank]) for region in operation.regions]
        data = b"".join(view.tobytes() for view in views)
        assert len(data) == operation.nbytes
        return data

    def _write(self, rank: int, regions: Any, data: bytes) -> None:
        at = 0
        for region in regions:
            view = view_of(region, self.outputs[rank])
            view[...] = np.frombuffer(data[at : at + view.nbytes], view.dtype).reshape(view.shape)
            view_of(region, self.writes[rank])[...] += 1
            at += view.nbytes
        assert at == len(data)


class _P2P(tuple[Any, ...]):
    kind = property(lambda self: self[0])
    peer = property(lambda self: self[1])
    nbytes = property(lambda self: self[2])
    regions = property(lambda self: self[3])

    def __new__(cls, *values: Any) -> _P2P:
        return super().__new__(cls, values)


def check(plan: Plan) -> dict[int, NcclProgram]:
    gpus = Gpus(plan)
    gpus.run()
    for rank, wanted in gpus.wanted.items():
        assert not oracle.difference(gpus.outputs[rank], wanted), f"rank {rank}\n{plan}"
        assert all((writes == 1).all() for writes in gpus.writes[rank]), f"rank {rank}\n{plan}"
    return gpus.programs


@settings(max_examples=150)
@given(plan=plans(), piece_nbytes=st.sampled_from((4, 12, 40, 1 << 20)), most=st.integers(1, 6))
def test_each_byte_arrives_once_and_nobody_hangs(plan, piece_nbytes, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_program, "PIECE_NBYTES", piece_nbytes)
        patch.setattr(nccl_program, "groups_of", partial(groups_of, most=most))
        programs = check(plan)
    groups = {program.groups for program in programs.values()}
    assert len(groups) == 1
    (found,) = groups
    assert len(found) <= most
    assert len(set(found)) == len(found)
    for program in programs.values():
        for launch in program.launches:
            members = found[launch.group]
            assert program.rank in members
            assert list(members) == sorted(members)
            assert all(operation.peer in members for operation in launch.operations)
            assert all(operation.nbytes <= piece_nbytes for operation in launch.operations)
            kinds = {operation.kind for operation in launch.operations}
            assert kinds == {"broadcast"} or not kinds & {"broadcast"}
            assert kinds != {"broadcast"} or len(launch.operations) == 1


@settings(max_examples=150)
@given(plan=plans())
def test_a_rank_sends_and_receives_one_thing_at_a_time(plan):
    waves: dict[tuple[int, str, int], int] = {}
    for wave, transfer in waves_of(plan.transfers()):
        for key in ((wave, "send", transfer.sender), *((wave, "r", r) for r in transfer.receivers)):
            waves[key] = waves.get(key, 0) + 1
    assert all(count == 1 for count in waves.values())
    programs = [compile_nccl(plan, rank) for rank in plan.ranks]
    for program in programs:
        for launch in program.launches:
            senders = {o.peer for o in launch.operations if not o.root}
            regions = {repr(o.regions) for o in launch.operations if o.root}
            assert len(senders) <= 1
            assert len(regions) <= 1


@settings(max_examples=60)
@given(plan=plans())
def test_all_ranks_have_the_same_groups_and_use_them(plan):
    groups = groups_of(plan)
    used = {
        tuple(sorted(transfer.ranks)) if broadcasts(transfer) else plan.ranks
        for transfer in plan.transfers()
    }
    assert set(groups) == used
    if plan.ranks in groups:
        assert groups[-1] == plan.ranks


def test_large_transfers_of_one_wave_take_turns(monkeypatch):
    """A rank that receives from one and sends to another does not first do all of one."""
    monkeypatch.setattr(nccl_program, "PIECE_NBYTES", 8)
    src = Layout(DeviceMesh([0, 1]), "S0", (8,))
    dst = Layout(DeviceMesh([1, 0]), "S0", (8,))
    plan = xmesh.plan(src, dst, "<i4", strategy="send_recv")
    programs = check(plan)
    for program in programs.values():
        kinds = [sorted(o.kind for o in launch.operations) for launch in program.launches]
        assert kinds == [["recv", "send"]] * 2


def test_too_many_groups_are_sent_one_by_one():
    """Each row goes to two ranks, other ones for every row."""
    boxes = {r: [xmesh.Box((r,), (r + 1,))] for r in range(6)}
    src = Layout.from_boxes(boxes, (6,))
    wanted: dict[int, list[Any]] = {r: [] for r in range(6, 12)}
    for row in range(6):
        for r in (6 + row, 6 + (row + 1) % 6):
            wanted[r].append(xmesh.Box((row,), (row + 1,)))
    plan = xmesh.plan(src, Layout.from_boxes(wanted, (6,)), "<i4", strategy="broadcast")
    assert len(groups_of(plan)) == 6
    few = groups_of(plan, most=3)
    assert few[-1] == plan.ranks
    assert len(few) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_program, "groups_of", partial(groups_of, most=3))
        programs = check(plan)
    kinds = {o.kind for p in programs.values() for launch in p.launches for o in launch.operations}
    assert kinds == {"broadcast", "send", "recv"}


def test_the_model_notices_a_wrong_order():
    """Else it would prove nothing."""
    rng = np.random.default_rng(3)
    src = Layout(DeviceMesh.arange((3,)), "S0", (9,))
    dst = Layout(DeviceMesh.arange((3,), start=3), "R", (9,))
    gpus = Gpus(xmesh.plan(src, dst, "<i4", draws.topology(rng, 6), strategy="broadcast"))
    program = gpus.programs[4]
    assert len(program.launches) > 1
    gpus.programs[4] = NcclProgram(4, program.groups, program.launches[::-1], program.copies)
    with pytest.raises(AssertionError, match="nobody can go on"):
        gpus.run()


def test_an_operation_says_who_it_is_of():
    plan = xmesh.plan(
        Layout(DeviceMesh([0]), "R", (3,)), Layout(DeviceMesh([0, 2, 5]), "R", (3,)), "<i2"
    )
    for rank in plan.ranks:
        (launch,) = compile_nccl(plan, rank).launches
        (operation,) = launch.operations
        assert isinstance(operation, Operation)
        assert (operation.kind, operation.peer, operation.nbytes) == ("broadcast", 0, 6)
        assert operation.root == (rank == 0)
