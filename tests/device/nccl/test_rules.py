"""The double of NCCL: what it does for ranks that keep NCCL's rules, and what it says to others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from judges import wait_until

DOUBLE = Path(__file__).parents[2] / "double"


# What works


def test_data_moves(run):
    first, second, third = run(
        3,
        """
        comm, s = communicator(), stream()
        say(comm.size(), comm.rank_id(), comm.device_id())
        one = Buffer(RANK, RANK + 0.5)
        comm.broadcast(one.ptr, one.ptr, 2, FLOAT, 1, s.ptr)
        whole, sums = Buffer(*[0] * 6), Buffer(0, 0)
        mine = Buffer(RANK, 10 * RANK)
        comm.allGather(mine.ptr, whole.ptr, 2, FLOAT, s.ptr)
        comm.allReduce(mine.ptr, sums.ptr, 2, FLOAT, nccl.NCCL_SUM, s.ptr)
        s.synchronize()
        say(one.values(), whole.values(), sums.values())
        got = Buffer(0, 0)
        if RANK == 0:
            comm.send(mine.ptr, 2, FLOAT, 2, s.ptr)
        if RANK == 2:
            comm.recv(got.ptr, 2, FLOAT, 0, s.ptr)
        s.synchronize()
        comm.check_async_error()
        say(got.values(), _double_nccl.launches(), _double_nccl.live(), _double_nccl.violations())
        comm.destroy()
        comm.destroy()  # as with CuPy, nothing
        say(_double_nccl.created(), _double_nccl.live(), attempt(comm.size))
        """,
    )
    collectives = "[1.0, 1.5] [0.0, 0.0, 1.0, 10.0, 2.0, 20.0] [3.0, 30.0]"
    gone = "1 0 NcclError 4: NCCL_ERROR_INVALID_ARGUMENT: invalid argument: destroyed or aborted"
    for rank, each in enumerate((first, second, third)):
        assert each.lines[:2] == [f"3 {rank} 0", collectives]
        assert each.lines[3].startswith(gone)
    assert first.lines[2] == "[0.0, 0.0] 4 1 []"
    assert second.lines[2] == "[0.0, 0.0] 3 1 []"
    assert third.lines[2] == "[0.0, 0.0] 4 1 []"  # what rank 0 has: 0, and 10 times 0


def test_data_is_read_when_the_stream_comes_to_it(run):
    _, second = run(
        2,
        """
        comm, s = communicator(), stream()
        gate, data = Buffer(0), Buffer(1)
        if RANK == 0:
            comm.recv(gate.ptr, 1, FLOAT, 1, s.ptr)  # keeps the stream busy
            comm.send(data.ptr, 1, FLOAT, 1, s.ptr)
            data.view()[:] = 7
            meet("changed")
            s.synchronize()
        else:
            meet("changed")
            comm.send(gate.ptr, 1, FLOAT, 0, s.ptr)
            comm.recv(data.ptr, 1, FLOAT, 0, s.ptr)
            s.synchronize()
            say(data.values())
        """,
    )
    assert second.lines == ["[7.0]"]


def test_zero_elements_move_nothing(run):
    (only,) = run(
        1,
        """
        comm, s = communicator(), stream()
        comm.broadcast(0, 0, 0, FLOAT, 0, s.ptr)
        comm.send(0, 0, FLOAT, 0, s.ptr)
        say(_double_nccl.launches(), fate(s), attempt(comm.send, 0, -1, FLOAT, 0, s.ptr))
        """,
    )
    assert only.out == "0 done OverflowError : can't convert negative value to size_t\n"


def test_many_operations_in_flight(run):
    ended = run(
        2,
        """
        world, other, s, t = communicator(), communicator("other"), stream(), stream()
        out, into, shared = Buffer(RANK), Buffer(-1), Buffer(RANK)
        for step in range(150):
            nccl.groupStart()
            world.send(out.ptr, 1, FLOAT, 1 - RANK, s.ptr)
            world.recv(into.ptr, 1, FLOAT, 1 - RANK, s.ptr)
            nccl.groupEnd()
            other.broadcast(shared.ptr, shared.ptr, 1, FLOAT, step % 2, t.ptr)
        say(fate(s, 20), fate(t, 20), into.values(), shared.values(), _double_nccl.violations())
        """,
    )
    assert [each.out for each in ended] == [
        "done done [1.0] [0.0] []\n",
        "done done [0.0] [0.0] []\n",
    ]


# Creation


def test_creation_waits_for_all_ranks(run):
    first, _ = run(
        2,
        """
        ident = unique("world")
        if RANK == 1:
            time.sleep(0.3)
        began = time.monotonic()
        nccl.NcclCommunicator(2, ident, RANK)
        say(time.monotonic() - began > 0.2)
        """,
    )
    assert first.lines == ["True"]


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        ("(2, 0), (2, 0)", "comes as rank 0, as which"),
        ("(2, 0), (3, 1)", "makes a communicator of"),
    ],
)
def test_creation_with_wrong_ranks(run, ranks, complaint):
    for each in run(
        2,
        f"""
        ndev, rank = [{ranks}][RANK]
        say(attempt(nccl.NcclCommunicator, ndev, unique("world"), rank))
        say(len(_double_nccl.violations()), _double_nccl.live())
        """,
    ):
        assert each.lines[0].startswith("NcclError 5: NCCL_ERROR_INVALID_USAGE")
        assert complaint in each.lines[0]
        assert each.lines[1] == "1 0"
        assert f"NCCL double: violation: {each.lines[0].split('usage: ')[1]}" in each.err


def test_creation_with_wrong_arguments(run):
    (only,) = run(
        1,
        """
        ident = nccl.get_unique_id()
        say(type(ident).__name__, len(ident))
        say(attempt(nccl.NcclCommunicator, 1, ident, 1))
        say(attempt(nccl.NcclCommunicator, 1, ident[:9], 0))
        say(attempt(nccl.NcclCommunicator, 1, tuple(ident), 0))
        comm = nccl.NcclCommunicator(ndev=1, commId=ident, rank=0, config=nccl.NcclConfig(1))
        say(attempt(nccl.NcclCommunicator, 1, ident, 0))
        """,
    )
    assert only.lines[0] == "bytes 128"
    assert "NcclError 4:" in only.lines[1]
    assert only.lines[2] == "ValueError : commId length 9 != 128."
    assert only.lines[3].startswith("TypeError : Argument 'commId' has incorrect type (expected b")
    assert "a unique id makes one communicator only" in only.lines[4]


def test_ranks_on_one_device(run):
    for each in run(2, "say(attempt(communicator))", DOUBLE_HOST="here"):
        assert each.out.startswith("NcclError 5:")
        assert "Duplicate GPU detected: ranks" in each.out


def test_a_shared_device_may_be_allowed(run):
    for each in run(
        2,
        "say(attempt(communicator))",
        DOUBLE_HOST="here",
        DOUBLE_NCCL_SHARED_DEVICE="1",
    ):
        assert each.out.startswith("returns <")


def test_without_a_launcher_the_id_names_the_judge(run, tmp_path):
    for each in run(
        2,
        """
        comm, s, data = communicator(), stream(), Buffer(RANK)
        comm.bcast(data.ptr, 1, FLOAT, 1, s.ptr)
        s.synchronize()
        say(data.values())
        """,
        DOUBLE_NCCL_SOCKET="",
        TMPDIR=str(tmp_path),
    ):
        assert each.lines == ["[1.0]"]
    wait_until(lambda: not list(tmp_path.glob("nccl-double-*")))


# Splits


def test_split(run):
    ended = run(
        4,
        """
        comm, s = communicator(), stream()
        half = comm.commSplit(RANK % 2 if RANK < 3 else -1, -RANK)
        if half is None:
            say("none", _double_nccl.live())
        else:
            data = Buffer(RANK)
            half.broadcast(data.ptr, data.ptr, 1, FLOAT, 0, s.ptr)
            s.synchronize()
            say(half.size(), half.rank_id(), half.device_id(), data.values(), _double_nccl.live())
        """,
    )
    assert [each.out.strip() for each in ended] == [
        "2 1 0 [2.0] 2",  # keys order the ranks: 2, then 0
        "1 0 0 [1.0] 2",
        "2 0 0 [2.0] 2",
        "none 1",
    ]


def test_split_with_outstanding_operations(run):
    for each in run(
        2,
        """
        comm, s, data = communicator(), stream(), Buffer(RANK)
        if RANK == 0:
            comm.recv(data.ptr, 1, FLOAT, 1, s.ptr)
        say(attempt(comm.commSplit, 0, 0))
        """,
    ):
        assert each.out.startswith("NcclError 5:")
        assert "outstanding operations: recv at scenario:4" in each.out


# Sequences of operations


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("broadcast(p, p, 2, FLOAT, 0, s.ptr)", "broadcast(p, p, 1, FLOAT, 0, s.ptr)"),
        ("broadcast(p, p, 2, FLOAT, 0, s.ptr)", "broadcast(p, p, 2, FLOAT, 1, s.ptr)"),
        ("broadcast(p, p, 2, FLOAT, 0, s.ptr)", "broadcast(p, p, 2, 3, 0, s.ptr)"),
        ("broadcast(p, p, 2, FLOAT, 0, s.ptr)", "allReduce(p, p, 2, FLOAT, 0, s.ptr)"),
        ("allReduce(p, p, 2, FLOAT, 0, s.ptr)", "allReduce(p, p, 2, FLOAT, 2, s.ptr)"),
        ("send(p, 2, FLOAT, 1, s.ptr)", "recv(p, 1, FLOAT, 0, s.ptr)"),
        ("send(p, 2, FLOAT, 1, s.ptr)", "recv(p, 2, 3, 0, s.ptr)"),
    ],
)
def test_operations_that_do_not_match(run, one, two):
    for each in run(
        2,
        f"""
        comm, s = communicator(), stream()
        p = Buffer(0, 0).ptr
        if RANK == 0:
            comm.{one}
        else:
            comm.{two}
        say(fate(s))
        say(until_broken(comm), attempt(comm.bcast, p, 1, FLOAT, 0, s.ptr))
        say(len(_double_nccl.violations()))
        """,
    ):
        assert each.out.startswith("fails: ")
        assert each.out.count("NcclError 5:") == 2  # check_async_error, and the next call
        assert each.out.endswith("\n1\n")
        assert each.err.startswith("NCCL double: violation: operations do not match:\n  rank ")
        for rank, call, line in ((0, one, 5), (1, two, 7)):
            (text,) = [
                text for text in each.err.splitlines() if text.startswith(f"  rank {rank}: ")
            ]
            assert call.split("(")[0] in text
            assert "communicator 1 {rank 0, rank 1}, called at" in text
            assert text.endswith(f"scenario:{line}")


# Send and receive, and groups


def test_sends_are_first_in_first_out_and_wait_for_their_receives(run):
    first, second = run(
        2,
        """
        comm, s = communicator(), stream()
        if RANK == 0:
            for value in (1, 2, 3):
                comm.send(Buffer(value).ptr, 1, FLOAT, 1, s.ptr)
            say(fate(s, 0.2))
            meet("waited")
            say(fate(s))
        else:
            meet("waited")
            got = [Buffer(0) for _ in range(3)]
            for buffer in got:
                comm.recv(buffer.ptr, 1, FLOAT, 0, s.ptr)
            s.synchronize()
            say([buffer.values() for buffer in got])
        """,
    )
    assert first.lines == ["hangs", "done"]
    assert second.lines == ["[[1.0], [2.0], [3.0]]"]


def test_both_directions_in_a_group(run):
    ended = run(
        2,
        """
        comm, s = communicator(), stream()
        out, into = Buffer(RANK), Buffer(-1)
        nccl.groupStart()
        comm.send(out.ptr, 1, FLOAT, 1 - RANK, s.ptr)
        nccl.groupStart()
        comm.recv(into.ptr, 1, FLOAT, 1 - RANK, s.ptr)
        nccl.groupEnd()
        say(_double_nccl.launches())
        nccl.groupEnd()
        say(_double_nccl.launches(), fate(s), into.values(), _double_nccl.violations())
        """,
    )
    assert [each.lines for each in ended] == [["0", "1 done [1.0] []"], ["0", "1 done [0.0] []"]]


def test_to_itself_in_a_group(run):
    (only,) = run(
        1,
        """
        comm, s = communicator(), stream()
        out, into = Buffer(5), Buffer(-1)
        nccl.groupStart()
        comm.send(out.ptr, 1, FLOAT, 0, s.ptr)
        comm.recv(into.ptr, 1, FLOAT, 0, s.ptr)
        nccl.groupEnd()
        say(fate(s), into.values())
        comm.send(out.ptr, 1, FLOAT, 0, s.ptr)
        comm.recv(into.ptr, 1, FLOAT, 0, s.ptr)
        say(fate(s))
        """,
    )
    assert only.lines[0] == "done [5.0]"
    assert only.lines[1].startswith("fails: ")
    assert "operations wait for each other" in only.err


def test_both_directions_without_a_group_hang(run):
    for each in run(
        2,
        """
        comm, s = communicator(), stream()
        out, into = Buffer(RANK), Buffer(-1)
        comm.send(out.ptr, 1, FLOAT, 1 - RANK, s.ptr)
        comm.recv(into.ptr, 1, FLOAT, 1 - RANK, s.ptr)
        say(fate(s))
        """,
    ):
        assert each.out.startswith("fails: ")
        lines = each.err.splitlines()
        assert lines[0].endswith("operations wait for each other, and will for ever:")
        for rank in (0, 1):
            index = next(i for i, line in enumerate(lines) if line.startswith(f"  rank {rank}: "))
            assert f"send #0 {rank} to {1 - rank}" in lines[index]
            assert f"then recv #0 {1 - rank} to {rank}" in lines[index + 1]


def test_a_group_on_two_streams_is_one_unit(run):
    first, second = run(
        2,
        """
        comm, s, t = communicator(), stream(), stream()
        gate, one, two = Gate(), Buffer(RANK), Buffer(RANK)
        if RANK == 0:
            _engine.enqueue(t.ptr, gate)  # t comes later to the group than s
        nccl.groupStart()
        comm.broadcast(one.ptr, one.ptr, 1, FLOAT, 1, s.ptr)
        comm.broadcast(two.ptr, two.ptr, 1, FLOAT, 1, t.ptr)
        nccl.groupEnd()
        say(fate(s, 0.2), fate(t, 0.0), one.values())
        meet("waited")
        gate.open()
        say(fate(s), fate(t), one.values(), two.values())
        """,
    )
    assert first.lines == ["hangs hangs [0.0]", "done done [1.0] [1.0]"]
    assert second.lines == ["hangs hangs [1.0]", "done done [1.0] [1.0]"]


def test_errors_of_groups(run):
    (only,) = run(
        1,
        """
        say(attempt(nccl.groupEnd))
        comm, s, data = communicator(), stream(), Buffer(0)
        nccl.groupStart()
        comm.bcast(data.ptr, 1, FLOAT, 0, s.ptr)
        say(attempt(comm.bcast, data.ptr, 1, FLOAT, 3, s.ptr))
        say(attempt(nccl.groupEnd))
        say(_double_nccl.launches(), len(_double_nccl.violations()))
        comm.bcast(data.ptr, 1, FLOAT, 0, s.ptr)
        say(fate(s))
        """,
    )
    assert "groupEnd without groupStart" in only.lines[0]
    assert only.lines[1].endswith("broadcast: no rank 3 in communicator 1 {rank 0}")
    assert only.lines[2].startswith("NcclError 4:")
    assert "a call of the group had failed" in only.lines[2]
    assert only.lines[3:] == ["0 2", "done"]


# Orders of communicators


def test_orders_that_differ(run):
    """Rank 1 uses two streams, so this time all would end."""
    for each in run(
        2,
        """
        a, b, s, t = communicator("a"), communicator("b"), stream(), stream()
        p, q = Buffer(0).ptr, Buffer(0).ptr
        if RANK == 0:
            a.bcast(p, 1, FLOAT, 0, s.ptr)
            b.bcast(q, 1, FLOAT, 0, s.ptr)
            meet("issued")
        else:
            wait_for(FOLDER / "issued.0")
            b.bcast(q, 1, FLOAT, 0, t.ptr)
            a.bcast(p, 1, FLOAT, 0, s.ptr)
            meet("issued")
        say(until_broken(a).split(":")[0], until_broken(b).split(":")[0])
        """,
    ):
        assert each.out == "NcclError 5 NcclError 5\n"
        lines = each.err.splitlines()
        assert lines[0].endswith("order of operations differs between ranks, may deadlock:")
        for rank, first, second in ((0, 1, 2), (1, 2, 1)):
            index = next(i for i, line in enumerate(lines) if line.startswith(f"  rank {rank}: "))
            what = "broadcast #0 (root 0, count 1, data type 7) on communicator"
            assert f"{what} {first} {{rank 0, rank 1}}, called at scenario:" in lines[index]
            assert f"then {what} {second} {{rank 0, rank 1}}, called at" in lines[index + 1]


def test_orders_that_differ_around_three_ranks(run):
    for each in run(
        3,
        """
        pairs = {}
        for one, two in ((0, 1), (1, 2), (0, 2)):
            if RANK in (one, two):
                pairs[one, two] = communicator(f"{one}{two}", [one, two])
        order = [[(0, 1), (0, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 2)]][RANK]
        s, p = stream(), Buffer(0).ptr
        for pair in order:
            pairs[pair].bcast(p, 1, FLOAT, 0, s.ptr)
        say(fate(s))
        """,
    ):
        assert each.out.startswith("fails: ")
        assert "operations wait for each other, and will for ever" in each.err
        assert [f"  rank {rank}: broadcast #0" in each.err for rank in range(3)] == [True] * 3


def test_orders_may_differ_between_operations_that_never_meet(run):
    for each in run(
        2,
        """
        a, b, s, t = communicator("a"), communicator("b"), stream(), stream()
        p, q = Buffer(0).ptr, Buffer(0).ptr
        for first, second in ((a, b), (b, a)):
            first.bcast(p, 1, FLOAT, 0, s.ptr)
            second.bcast(q, 1, FLOAT, 0, t.ptr)
            say(fate(s), fate(t))
        # In a group there is no order.
        nccl.groupStart()
        for comm in ((a, b), (b, a))[RANK]:
            comm.bcast((p, q)[comm is a], 1, FLOAT, 0, s.ptr)
        nccl.groupEnd()
        say(fate(s), _double_nccl.violations())
        """,
    ):
        assert each.lines == ["done done", "done done", "done []"]


def test_a_rank_that_never_calls_is_no_violation(run):
    first, _ = run(
        2,
        """
        comm, s = communicator(), stream()
        if RANK == 0:
            comm.recv(Buffer(0).ptr, 1, FLOAT, 1, s.ptr)
            say(fate(s, 0.3), _double_nccl.violations(), attempt(comm.check_async_error))
            comm.abort()
            say(fate(s))
        meet("end")
        """,
    )
    assert first.lines == ["hangs [] returns None", "done"]


def test_what_is_over_is_forgotten():
    spec = importlib.util.spec_from_file_location("_waits", DOUBLE / "cupy" / "cuda" / "_waits.py")
    assert spec is not None
    assert spec.loader is not None
    waits_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(waits_module)
    waits = waits_module.Waits()
    comm = SimpleNamespace(broken=False)
    clients = [SimpleNamespace(in_flight={}) for _ in range(2)]
    window: list[list[Any]] = []
    for number in range(1000):
        operation = waits_module.Operation(comm, f"#{number}", {(0, ""), (1, "")})
        units = []
        for rank, client in enumerate(clients):
            unit = waits_module.Unit(client, number, frozenset({7}))
            unit.operations.append((operation, (rank, "")))
            operation.units[rank, ""] = unit
            assert waits.add(unit) == ([], False)
            units.append(unit)
        window.append([operation, *units])
        if len(window) > 10:  # so many are always in flight
            operation, *units = window.pop(0)
            operation.finished = True
            for unit in units:
                waits.done(unit)
    assert len(waits.units) < 200
