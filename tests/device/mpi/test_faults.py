"""What goes wrong on one rank with a GPU or NCCL: all learn of it in time, and MPI stays usable."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import conformance
import cupy
import draws
import numpy as np
import pytest
from cupy import _double_nccl
from mpi4py import MPI

from xmesh import Resharder
from xmesh.errors import (
    ArrayError,
    ClosedError,
    PeerError,
    TransferTimeout,
    TransportError,
    XmeshError,
)
from xmesh.nccl import communicators

SIZE = MPI.COMM_WORLD.size
BAD = sorted({0, SIZE - 1})
LIMIT_S = 1.0
LONG_S = 60.0
engine: Any = cupy._engine
several = pytest.mark.skipif(SIZE < 2, reason="needs at least 2 ranks")


@pytest.fixture
def world(comm):
    return conformance.OverMpi(comm, "nccl", lambda rank: True)


@pytest.fixture(autouse=True)
def _short_frees(monkeypatch):
    """Communicators of ranks that gave up are not waited for long."""
    monkeypatch.setattr(communicators, "_FREE_S", 0.2)


def error_of(call: Callable[[], Any]) -> XmeshError | None:
    try:
        call()
    except XmeshError as error:
        return error
    return None


def same_on_all(comm: Any, error: XmeshError | None, kind: type[XmeshError]) -> str:
    """Check that all ranks got an error of this kind with the same text; the text."""
    seen = comm.allgather((type(error).__name__, str(error)))
    assert {name for name, _ in seen} == {kind.__name__}, seen
    assert len(set(seen)) == 1, seen
    return str(error)


def kind_on_all(comm: Any, error: XmeshError | None, *kinds: type[XmeshError | None]) -> list[str]:
    """Check that each rank got an error of one of some kinds, or None if that is one; the texts."""
    seen = comm.allgather((type(error).__name__, str(error)))
    names = {kind.__name__ for kind in kinds}
    assert {name for name, _ in seen} <= names, seen
    return [text for _, text in seen]


def works(world: Any, reshard: Resharder, seed: int = 5) -> None:
    call = conformance.Call(world, reshard.plan, seed)
    world.together(call.problem(call.start(reshard)))


def usable(comm: Any) -> None:
    """The user's communicator still is: over MPI, from host to host."""
    comm.Barrier()
    host = conformance.OverMpi(comm, "mpi", lambda rank: False)
    with host.resharder(conformance.rows_to_all(host), timeout_s=LONG_S) as reshard:
        works(host, reshard)


def usable_with_nccl(comm: Any, world: Any) -> None:
    usable(comm)
    with world.resharder(conformance.rows_to_all(world), timeout_s=LONG_S) as reshard:
        assert reshard.transport == "nccl"
        works(world, reshard)


# Ranks that lack something.


def no_gpu(monkeypatch):
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)


def no_driver(monkeypatch):
    def fail():
        raise cupy.cuda.runtime.CUDARuntimeError(100)

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", fail)


def no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)


def old_nccl(monkeypatch):
    monkeypatch.setattr(cupy.cuda.nccl, "get_version", lambda: 2604)


def no_nccl(monkeypatch):
    monkeypatch.setattr(cupy.cuda.nccl, "available", False)


LACKING = {
    "no gpu": (no_gpu, "arrays in GPU memory need a GPU that this process can use"),
    "no driver": (no_driver, "cudaErrorNoDevice"),
    "no cupy": (no_cupy, "arrays in GPU memory need CuPy"),
    "old nccl": (old_nccl, "NCCL must be 2.7.0 or newer"),
    "no nccl": (no_nccl, "cupy.cuda.nccl.available is False"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("what", LACKING)
def test_what_one_rank_lacks_is_told_to_all(comm, world, monkeypatch, what, bad):
    lack, text = LACKING[what]
    plan = conformance.rows_to_all(world)
    with monkeypatch.context() as patch:
        if comm.rank == bad:
            lack(patch)
        error = error_of(lambda: Resharder(plan, comm, transport="nccl", timeout_s=LONG_S))
        assert text in same_on_all(comm, error, TransportError)
    usable_with_nccl(comm, world)


@pytest.mark.parametrize("what", ["old nccl", "no nccl"])
def test_auto_stays_with_mpi_where_one_rank_has_no_nccl(comm, monkeypatch, what):
    lack, text = LACKING[what]
    auto = conformance.OverMpi(comm, "auto", lambda rank: True)
    with monkeypatch.context() as patch:
        if comm.rank == SIZE - 1:
            lack(patch)
        with auto.resharder(conformance.rows_to_all(auto), timeout_s=LONG_S) as reshard:
            whys = comm.allgather((reshard.transport, reshard.why_transport))
            assert len(set(whys)) == 1
            transport, why = whys[0]
            assert transport == "mpi"
            assert why.startswith(f"NCCL cannot be used: rank {SIZE - 1}: ")
            assert text in why
            works(auto, reshard)
    usable(comm)


def test_like_cupy_without_cupy_is_told_to_all(comm, monkeypatch):
    plan = conformance.rows_to_all(conformance.OverMpi(comm, "mpi", lambda rank: True))
    with monkeypatch.context() as patch:
        if comm.rank == 0:
            no_cupy(patch)
        error = error_of(lambda: Resharder(plan, comm, like=cupy, timeout_s=LONG_S))
        assert "need CuPy" in same_on_all(comm, error, TransportError)
    usable(comm)


# Wrong arguments of a call, on one rank.


def on_host(call: conformance.Call, rank: int, out: bool) -> None:
    held = call.outs if out else call.sources
    arguments = call.out if out else call.local
    arguments[rank] = np.array(held[rank][0].fetch().view)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("what", ["local", "out", "dtype"])
def test_a_wrong_array_on_one_rank_is_told_to_all(comm, world, what, first, bad):
    """Under NCCL all raise the same at every call, and nothing was launched."""
    plan = conformance.rows_to_all(world, (SIZE, 4))
    with world.resharder(plan, timeout_s=LONG_S) as reshard:
        for turn in range(2):
            if not first:
                works(world, reshard, turn)
            call = conformance.Call(world, plan, 2, out=what != "dtype")
            if comm.rank == bad and what == "dtype":
                call.local[bad] = call.local[bad].view("<i4")
            elif comm.rank == bad:
                # Both, or the two would first of all not lie in one memory.
                on_host(call, bad, out=False)
                on_host(call, bad, out=True)
                if what == "out":
                    call.local[bad] = call.sources[bad][0].array
            before = _double_nccl.launches()
            request = call.start(reshard)
            text = same_on_all(comm, error_of(request.wait), ArrayError)
            wanted = {
                "local": "local must lie in GPU memory for NCCL",
                "out": "out must lie in GPU memory for NCCL",
                "dtype": "local must have the dtype of the plan",
            }
            assert wanted[what] in text
            assert f"rank {bad}" in text
            assert _double_nccl.launches() == before
            assert all(made.unchanged() for made in call.outs.get(comm.rank, ()))
            first = False
        works(world, reshard)
    usable_with_nccl(comm, world)


class Elsewhere:
    """An array that says it lies on another GPU."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.dtype = array.dtype

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._array.__cuda_array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 5

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not from here")


@pytest.mark.parametrize("transport", ["nccl", "mpi"])
def test_an_array_on_another_device(comm, transport):
    world = conformance.OverMpi(comm, transport, lambda rank: True)
    plan = conformance.rows_to_all(world, (SIZE, 4))
    with world.resharder(plan, timeout_s=LONG_S) as reshard:
        call = conformance.Call(world, plan, 1, out=False)
        if comm.rank == SIZE - 1:
            call.local[comm.rank] = Elsewhere(call.local[comm.rank])
        error = error_of(call.start(reshard).wait)
        text = same_on_all(comm, error, ArrayError)
        assert "it lies on GPU 5, this rank's is GPU 0" in text
        assert f"rank {SIZE - 1}" in text
        works(world, reshard)
    usable(comm)


@pytest.mark.parametrize("transport", ["nccl", "mpi"])
@pytest.mark.parametrize("what", ["output", "slots"])
def test_one_rank_is_out_of_memory(comm, monkeypatch, transport, what):
    """For a new output, or for what is packed: all are told, and none waits for the others."""
    world = conformance.OverMpi(comm, transport, lambda rank: True)
    plan = conformance.rows_to_all(world, (2 * SIZE, 4))
    bad = SIZE - 1
    with world.resharder(plan, timeout_s=LONG_S) as reshard:
        # Strided, so that it is packed where the memory is not that of the host.
        call = conformance.Call(world, plan, 2 - bad % 5 + 5, out=what == "slots")

        def fail(*arguments: Any) -> Any:
            raise cupy.cuda.memory.OutOfMemoryError(1 << 40, 0, 0)

        with monkeypatch.context() as patch:
            if comm.rank == bad:
                if what == "output":
                    patch.setattr(cupy, "empty", fail)
                else:
                    patch.setattr(cupy.cuda, "alloc", fail)
                    patch.setattr(cupy.cuda, "alloc_pinned_memory", fail)
            request = call.start(reshard)
            error = error_of(request.wait)
        seen = comm.allgather(type(error).__name__)
        if what == "slots" and SIZE == 1:  # nothing is packed
            assert seen == ["NoneType"]
        else:
            text = same_on_all(comm, error, ArrayError)
            assert f"rank {bad}" in text
            assert "there must be memory for the output and for staging" in text
        works(world, reshard)
    usable(comm)


# NCCL's own failures.


def test_the_root_cannot_make_a_unique_id(comm, world):
    """ptypy 549: the others waited in the broadcast of the id for ever."""
    if comm.rank == 0:
        _double_nccl.fail_unique_id()
    plan = conformance.rows_to_all(world)
    error = error_of(lambda: world.resharder(plan, timeout_s=LONG_S))
    if SIZE > 1:
        text = same_on_all(comm, error, TransportError)
        assert "NCCL must give a unique id for a new communicator" in text
        assert "rank 0 (host " in text
    _double_nccl.no_faults()
    assert _double_nccl.live() == 0
    usable_with_nccl(comm, world)


@several
@pytest.mark.parametrize("bad", BAD)
def test_creation_fails_on_one_rank(comm, world, bad):
    if comm.rank == bad:
        _double_nccl.fail_creation(bad)
    plan = conformance.rows_to_all(world)
    error = error_of(lambda: world.resharder(plan, timeout_s=LONG_S))
    text = same_on_all(comm, error, TransportError)
    assert "NCCL must make its communicators" in text
    _double_nccl.no_faults()
    draws.together(comm, "" if _double_nccl.live() == 0 else "communicators are left")
    usable_with_nccl(comm, world)


@several
def test_creation_hangs_on_one_rank(comm, world):
    """NCCL has no time-out for it; xmesh has. The thread that hangs is left behind."""
    bad = SIZE - 1
    if comm.rank == bad:
        _double_nccl.delay_creation(bad, 3600)
    plan = conformance.rows_to_all(world)
    error = error_of(lambda: world.resharder(plan, timeout_s=LIMIT_S))
    texts = kind_on_all(comm, error, TransferTimeout)
    assert any(f"NCCL must make its communicators within {LIMIT_S:g} s" in t for t in texts), texts
    _double_nccl.no_faults()
    usable(comm)


@several
def test_a_rank_never_constructs(comm, world):
    plan = conformance.rows_to_all(world)
    error = None
    if comm.rank != 0:
        error = error_of(lambda: world.resharder(plan, timeout_s=LIMIT_S))
        assert isinstance(error, TransferTimeout)
    texts = comm.allgather(str(error))
    assert any("heard nothing from rank 0" in text for text in texts), texts
    usable_with_nccl(comm, world)


def test_an_error_that_nccl_meets_by_itself(comm, world):
    """It is found by looks, the call fails, and the communicators are aborted."""
    plan = conformance.rows_to_all(world, (2 * SIZE, 40))
    reshard = world.resharder(plan, timeout_s=LIMIT_S)
    works(world, reshard)
    bad = SIZE - 1
    call = conformance.Call(world, plan, 3, out=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        if comm.rank == bad:
            engine.delay(stream.ptr, 0.3)  # so that there is time to look
            _double_nccl.fail_checks_after(0)
        request = call.start(reshard)
    error = error_of(request.wait)
    _double_nccl.no_faults()
    if SIZE == 1:  # without peers nothing is given to NCCL
        assert error is None
    else:
        # Who had ended when the error was met has its data, all of them; who had not is told.
        kinds = kind_on_all(comm, error, TransportError, TransferTimeout, type(None))
        assert "a transfer must not fail on its way" in kinds[bad]
        assert "NCCL_ERROR_INTERNAL_ERROR" in kinds[bad]
        if error is None:
            assert call.problem(request) == ""
        else:
            assert isinstance(error_of(lambda: call.start(reshard)), ClosedError)
    reshard.close()
    comm.Barrier()
    usable_with_nccl(comm, world)


# Ranks that do not come.


@several
@pytest.mark.parametrize("absent", BAD)
@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_a_peer_that_never_calls(comm, world, first, absent):
    """All others give up in time, and nothing was launched that waits on their GPUs."""
    plan = conformance.rows_to_all(world, (2 * SIZE, 5))
    reshard = world.resharder(plan, timeout_s=LONG_S)
    if not first:
        works(world, reshard)
    comm.Barrier()
    problem, text = "", ""
    call = conformance.Call(world, plan, 2, out=True)
    if comm.rank != absent:
        before = _double_nccl.launches()
        request = call.start(reshard)
        error = error_of(lambda: request.wait(LIMIT_S))
        text = str(error)
        if not isinstance(error, TransferTimeout) or "nothing was launched" not in text:
            problem = f"{type(error).__name__}: {text}"
        elif _double_nccl.launches() != before:
            problem = "something was launched"
        elif not all(made.unchanged() for made in call.outs[comm.rank]):
            problem = "out was written"
        elif error_of(request.wait) is not error or not request.failed:
            problem = "the call is said to be done"
    world.together(problem)
    texts = comm.allgather(text)
    assert any(f"nothing heard from rank {absent} (host " in text for text in texts), texts
    reshard.close()
    usable_with_nccl(comm, world)


@several
@pytest.mark.parametrize("transport", ["nccl", "mpi"])
def test_a_gpu_that_never_comes_to_the_call(comm, transport):
    """As where a rank has died, or its kernel hangs: all give up in time, and none says done."""
    world = conformance.OverMpi(comm, transport, lambda rank: True)
    plan = conformance.rows_to_all(world, (2 * SIZE, 5))
    reshard = world.resharder(plan, timeout_s=LONG_S)
    works(world, reshard)
    call = conformance.Call(world, plan, 2, out=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    gate = Gate()
    bad = SIZE - 1
    began = time.monotonic()
    with stream:
        if comm.rank == bad:
            engine.enqueue(stream.ptr, gate)
        request = call.start(reshard)
    error = error_of(lambda: request.wait(LIMIT_S))
    late = time.monotonic() - began > LIMIT_S + 20
    comm.Barrier()
    gate.open()
    texts = kind_on_all(comm, error, TransferTimeout, TransportError, PeerError)
    assert not any(comm.allgather(late))
    # Over NCCL a rank joins a call when its GPU has come to it, so nothing was launched.
    words = "bytes outstanding" if transport == "mpi" else "GPU has not come to the end of what"
    assert any(words in text for text in texts), texts
    assert request.failed
    assert isinstance(error_of(lambda: call.start(reshard)), ClosedError)
    reshard.close()
    stream.synchronize()
    comm.Barrier()
    if transport == "nccl":
        usable_with_nccl(comm, world)
    else:
        usable(comm)


class Gate(engine.Work):  # type: ignore[misc]
    """Work of a stream that ends when the test says so."""

    label = "gate"
    is_open = False

    def start(self) -> None:
        pass

    def poll(self) -> bool:
        return self.is_open

    def open(self) -> None:
        self.is_open = True
        engine.wake()


@several
def test_a_call_given_up_when_others_may_have_launched_breaks_its_communicators(comm):
    """Else the next call would take the place of the one that was given up, and its data."""
    world = conformance.OverMpi(comm, "nccl", lambda rank: True)
    plan = conformance.rows_to_all(world, (2 * SIZE, 5))
    first, second = (world.resharder(plan, timeout_s=LONG_S) for _ in range(2))
    call, other = (conformance.Call(world, plan, seed, out=True) for seed in (2, 3))
    request = call.start(first)
    bad = SIZE - 1
    began = time.monotonic()
    if comm.rank == bad:
        work = request.parts[0]._work
        while work._stamp is None and time.monotonic() - began < LIMIT_S:
            request.test()  # until the others need nothing more of this rank
        first.close()
    error = error_of(lambda: request.wait(LONG_S))
    again = other.start(second)
    refused = error_of(lambda: again.wait(LONG_S))
    comm.Barrier()
    assert comm.rank != bad or error is not None
    # What says that it is done must have its own data.
    world.together("" if refused is not None else other.problem(again))
    for reshard in (first, second):
        reshard.close()
    usable_with_nccl(comm, world)


@several
@pytest.mark.parametrize("delay_s", [0, 0.1])
def test_a_gpu_that_met_an_error_before_the_call_is_told_to_all(comm, delay_s):
    """The caller's kernel failed: no rank waits for that one, and all know why."""
    world = conformance.OverMpi(comm, "nccl", lambda rank: True)
    plan = conformance.rows_to_all(world, (2 * SIZE, 5))
    reshard = world.resharder(plan, timeout_s=LONG_S)
    works(world, reshard)
    call = conformance.Call(world, plan, 2, out=True)

    def fails():
        raise cupy.cuda.runtime.CUDARuntimeError(700)

    if comm.rank == 0:
        stream = cupy.cuda.get_current_stream()
        engine.delay(stream.ptr, delay_s)  # so that it fails before the call begins, or after
        engine.enqueue(stream.ptr, engine.Call("a kernel that fails", fails))
    request = call.start(reshard)
    text = same_on_all(comm, error_of(request.wait), TransportError)
    assert "a rank's GPU must come without an error" in text
    assert "rank 0" in text
    engine.forget_error(0)
    works(world, reshard)  # the call never began: the resharder is as good as before
    reshard.close()
    usable_with_nccl(comm, world)
