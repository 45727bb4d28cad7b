"""The double of NCCL: aborts, ranks and judges that die, memory, versions, failures on demand."""

from __future__ import annotations

import signal

# Ends


def test_abort(run):
    first, second, third = run(
        3,
        """
        comm, s, data = communicator(), stream(), Buffer(RANK)
        if RANK < 2:
            comm.bcast(data.ptr, 1, FLOAT, 0, s.ptr)
            meet("issued")
            say(until_broken(comm))
            say(attempt(comm.bcast, data.ptr, 1, FLOAT, 0, s.ptr))
            say(fate(s, 0.2))  # spins until the abort
        else:
            comm.recv(data.ptr, 1, FLOAT, 0, s.ptr)
            meet("issued")
        comm.abort()
        say(fate(s), _double_nccl.live(), attempt(comm.check_async_error))
        comm.abort()
        say(_double_nccl.violations())
        """,
    )
    for each in (first, second):
        assert each.lines[0].startswith("NcclError 6: NCCL_ERROR_REMOTE_ERROR: remote process exit")
        assert each.lines[0].endswith("rank 2 has left communicator 1 {rank 0, rank 1, rank 2}")
        assert each.lines[1].startswith("NcclError 6:")
        assert each.lines[2] == "hangs"
    for each in (first, second, third):
        assert each.lines[-2].startswith("done 0 NcclError 4:")
        assert each.lines[-1] == "[]"


def test_a_killed_rank(run):
    first, _ = run(
        2,
        """
        import signal
        comm, s, data = communicator(), stream(), Buffer(RANK)
        if RANK == 0:
            comm.bcast(data.ptr, 1, FLOAT, 0, s.ptr)
        meet("issued")
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        say(until_broken(comm))
        say(fate(s, 0.1))
        comm.abort()
        say(fate(s))
        """,
        codes=[0, -signal.SIGKILL],
    )
    assert "NcclError 6:" in first.lines[0]
    assert first.lines[1:] == ["hangs", "done"]


def test_all_ranks_are_killed_and_no_judge_is_left(run):
    run(
        2,
        """
        import signal
        communicator()
        meet("made")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        codes=[-signal.SIGKILL] * 2,
    )


def test_a_rank_is_killed_while_others_create(run):
    first, _ = run(
        2,
        """
        import signal, threading
        ident = unique("world")
        if RANK == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        say(attempt(nccl.NcclCommunicator, 3, ident, RANK))
        """,
        codes=[0, -signal.SIGKILL],
    )
    assert "rank 1 has ended" in first.out
    assert first.out.startswith("NcclError 6:")


def test_destroy_with_outstanding_operations(run):
    first, second = run(
        2,
        """
        comm, s = communicator(), stream()
        if RANK == 0:
            comm.recv(Buffer(0).ptr, 1, FLOAT, 1, s.ptr)
            say(attempt(comm.destroy), _double_nccl.live())
        else:
            say(until_broken(comm))
        """,
    )
    for each in (first, second):
        assert each.out.startswith("NcclError 5:")
        assert "destroy of communicator 1 {rank 0, rank 1} with outstanding" in each.out


def test_destroy_with_operations_that_can_never_end(run):
    first, _ = run(
        2,
        """
        comm, s = communicator(), stream()
        if RANK == 0:
            comm.recv(Buffer(0).ptr, 1, FLOAT, 1, s.ptr)
            meet("issued")
            until_broken(comm)
            say(attempt(comm.destroy))
        else:
            meet("issued")
        """,
    )
    assert "destroy of communicator 1 {rank 0, rank 1} with outstanding" in first.out


def test_destroy_when_the_device_has_failed(run):
    first, second = run(
        2,
        """
        comm, s, t = communicator(), stream(), stream()
        if RANK == 0:
            comm.recv(Buffer(0).ptr, 1, FLOAT, 1, s.ptr)
            broken = Gate()
            broken.poll = lambda: 1 / 0
            _engine.enqueue(t.ptr, broken)
            say(fate(t))
            time.sleep(0.05)
            say(attempt(comm.destroy))
        meet("end")
        say(_double_nccl.violations())
        """,
    )
    assert first.lines[0].startswith("fails: ")
    assert first.lines[1:] == ["returns None", "[]"]
    assert second.lines == ["[]"]


def test_a_judge_is_killed(run, tmp_path):
    program = """
        import signal
        comm, s = communicator(), stream()
        comm.recv(Buffer(0).ptr, 1, FLOAT, 0, s.ptr)
        for folder in Path("/proc").glob("[0-9]*"):
            if "_judge.py" in (text := (folder / "cmdline").read_text()) and str(FOLDER) in text:
                os.kill(int(folder.name), signal.SIGKILL)
        say(until_broken(comm))
        say(fate(s))
        """
    for _ in range(2):  # a judge that is killed leaves a socket, which stops no later judge
        (only,) = run(1, program)
        assert only.lines[0].startswith("NcclError 2:")
        assert "the judge " in only.lines[0]  # has ended, or cannot be reached
        assert only.lines[1].startswith("fails: ")
        for file in tmp_path.glob("*-id"):
            file.unlink()
    run(1, "communicator()")


def test_a_communicator_that_nobody_has(run):
    (only,) = run(
        1,
        """
        comm = communicator()
        say(_double_nccl.live())
        del comm
        say(_double_nccl.live(), _double_nccl.violations())
        """,
    )
    assert only.lines == ["1", "0 []"]


# Memory and devices


def test_wrong_pointers(run):
    (only,) = run(
        1,
        """
        comm, s, data = communicator(), stream(), Buffer(0, 0)
        say(attempt(comm.bcast, data.ptr, 3, FLOAT, 0, s.ptr))
        say(attempt(comm.allGather, 8, data.ptr, 2, FLOAT, s.ptr))
        say(attempt(comm.send, data.ptr, 2, 99, 0, s.ptr))
        """,
    )
    assert [line.split(":")[0] for line in only.lines] == ["NcclError 4"] * 3


def test_memory_is_freed_too_early(run):
    first, second = run(
        2,
        """
        comm, s = communicator(), stream()
        if RANK == 0:
            data = Buffer(0)
            comm.recv(data.ptr, 1, FLOAT, 1, s.ptr)
            say(fate(s, 0.5))  # it has begun by now
            data.memory = None
            meet("freed")
            say(fate(s))
        else:
            meet("freed")
            comm.send(Buffer(1).ptr, 1, FLOAT, 0, s.ptr)
            say(until_broken(comm))
        """,
    )
    assert first.lines[0] == "hangs"
    assert first.lines[1].startswith("fails: ")
    assert "its memory is gone" in first.err
    assert "its memory is gone" in second.out


def test_two_operations_at_once_on_one_buffer(run):
    first, _ = run(
        2,
        """
        comm, other = communicator(), communicator("other")
        s, t, data = stream(), stream(), Buffer(0, 0, 0)
        if RANK == 0:
            comm.recv(data.ptr, 2, FLOAT, 1, s.ptr)
            other.send(data.ptr + 8, 1, FLOAT, 1, t.ptr)
            say(fate(t, 0.2))
            other.send(data.ptr + 4, 1, FLOAT, 1, t.ptr)
            say(fate(t))
        else:
            other.recv(data.ptr, 1, FLOAT, 0, t.ptr)
            until_broken(other)
        """,
    )
    assert first.lines[0] == "done"
    assert first.lines[1].startswith("fails: ")
    assert "two operations use one buffer: send on communicator 2" in first.err


def test_another_device_is_current(run):
    (only,) = run(
        1,
        """
        comm, s, data = communicator(), stream(), Buffer(0)
        cupy.cuda.runtime.setDevice(1)
        say(attempt(comm.bcast, data.ptr, 1, FLOAT, 0, s.ptr))
        """,
        DOUBLE_DEVICES="2",
    )
    assert only.out.startswith("NcclError 5:")
    assert "device 1 is current, communicator 1 {rank 0} is on 0" in only.out


# Versions and failures on demand


def test_cupy_13(run):
    for each in run(
        2,
        """
        ident = unique("world")
        say(type(ident).__name__, len(ident), min(ident) >= -128, max(ident) < 128)
        say(hasattr(nccl, "NcclConfig"), hasattr(nccl.NcclCommunicator, "commSplit"))
        say(attempt(nccl.NcclCommunicator, 2, bytes(128), RANK))
        comm, s, data = nccl.NcclCommunicator(2, ident, RANK), stream(), Buffer(RANK)
        comm.broadcast(data.ptr, data.ptr, 1, FLOAT, 1, s.ptr)
        say(fate(s), data.values(), nccl.get_version(), nccl.get_build_version())
        """,
        DOUBLE_CUPY_VERSION="13.6.0",
        DOUBLE_NCCL_VERSION="22005",
    ):
        assert each.lines[:2] == ["tuple 128 True True", "False False"]
        assert each.lines[2].startswith("TypeError : Argument 'commId' has incorrect type")
        assert each.lines[3] == "done [1.0] 22005 22501"


def test_failures_on_demand(run):
    (only,) = run(
        1,
        """
        for _ in range(2):
            say(attempt(nccl.get_unique_id)[:12])
        _double_nccl.fail_unique_id()
        say(attempt(nccl.get_unique_id)[:12])
        comm = communicator()
        _double_nccl.fail_checks_after(1, status=6)
        say(attempt(comm.check_async_error), attempt(comm.check_async_error)[:12])
        _double_nccl.no_faults()
        say(attempt(comm.check_async_error))
        """,
        DOUBLE_NCCL_FAIL_ID="1",
    )
    assert only.lines[1].startswith("returns b")
    assert only.lines == [
        "NcclError 2:",
        only.lines[1],
        "NcclError 2:",
        "returns None NcclError 6:",
        "returns None",
    ]


def test_creation_fails_on_demand(run):
    first, second = run(2, "say(attempt(communicator))", DOUBLE_NCCL_FAIL_CREATE="1")
    assert "rank 1 (rank 1) could not come" in first.out
    assert first.out.startswith("NcclError 6:")
    assert second.out.startswith("NcclError 2:")


def test_creation_is_late_on_demand(run):
    first, _ = run(
        2,
        """
        began = time.monotonic()
        communicator()
        say(time.monotonic() - began > 0.25)
        """,
        DOUBLE_NCCL_LATE_CREATE="1:0.3",
    )
    assert first.lines == ["True"]


def test_the_launcher_can_read_a_report(run, tmp_path):
    report = tmp_path / "report"
    run(
        1,
        """
        attempt(nccl.groupEnd)
        comm = communicator()
        attempt(comm.send, 0, 1, FLOAT, 4, 0)
        """,
        DOUBLE_NCCL_REPORT=str(report),
    )
    assert report.read_text().splitlines() == [
        "groupEnd without groupStart",
        "send: no rank 4 in communicator 1 {rank 0}",
    ]
