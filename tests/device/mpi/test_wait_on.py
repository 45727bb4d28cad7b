"""A stream waits for a call in place of the host: what it is given afterwards sees the output."""

from __future__ import annotations

import cupy
import draws
import numpy as np
import pytest
from cupy import _engine

import xmesh

LENGTH = 960


def moved(comm):
    mesh = xmesh.DeviceMesh.arange((comm.size,))
    src, dst = xmesh.Layout(mesh, "S0 R", (LENGTH, 4)), xmesh.Layout(mesh, "R S0", (LENGTH, 4))
    whole = np.arange(4.0 * LENGTH).reshape(LENGTH, 4)
    plan = xmesh.plan(src, dst, "float64", chunk_nbytes=256)
    return plan, whole, src.boxes(comm.rank)[0].slices(), dst.boxes(comm.rank)[0].slices()


@pytest.mark.parametrize("transport", ["mpi", "nccl"])
def test_a_stream_waits_in_place_of_the_host(comm, transport):
    plan, whole, mine, wanted = moved(comm)
    producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with xmesh.Resharder(plan, comm, like=cupy, transport=transport, timeout_s=60) as reshard:
        for turn in range(3):
            with producer:
                local = cupy.zeros(whole[mine].shape)
                _engine.delay(producer.ptr, 0.01)
                local[...] = cupy.asarray(np.ascontiguousarray(whole[mine] + turn))
                request = reshard.start(local)
            waits = _engine.counters["streamSynchronize"]
            out = request.wait_on(consumer)
            with consumer:
                copy = out.copy()
                local.fill(-1)  # allowed from here on, in this stream
                out.fill(-2)
            assert _engine.counters["streamSynchronize"] == waits
            assert request.wait() is out
            with consumer:
                good = np.array_equal(copy.get(), whole[wanted] + turn) and (out.get() == -2).all()
            draws.together(comm, "" if good else f"rank {comm.rank}: {copy.get()}")


@pytest.mark.parametrize("transport", ["mpi", "nccl"])
def test_close_lets_the_gpu_end_what_it_was_given(comm, transport):
    plan, whole, mine, wanted = moved(comm)
    local = cupy.asarray(np.ascontiguousarray(whole[mine]))
    with xmesh.Resharder(plan, comm, like=cupy, transport=transport, timeout_s=60) as reshard:
        out = reshard.start(local).wait_on()
    good = np.array_equal(out.get(), whole[wanted])
    draws.together(comm, "" if good else f"rank {comm.rank}: {out.get()}")


def test_arrays_of_the_host_are_complete_on_return(comm):
    plan, whole, mine, wanted = moved(comm)
    with xmesh.Resharder(plan, comm, transport="mpi", timeout_s=60) as reshard:
        out = reshard.start(np.ascontiguousarray(whole[mine])).wait_on()
        draws.together(
            comm, "" if np.array_equal(out, whole[wanted]) else f"rank {comm.rank}: {out}"
        )


@pytest.mark.parametrize("transport", ["mpi", "nccl"])
def test_buffers_are_used_again_as_soon_as_a_stream_waits(comm, transport):
    """The host may not have seen the call end; that is no reason to refuse them."""
    plan, whole, mine, wanted = moved(comm)
    local, out = cupy.empty(whole[mine].shape), cupy.empty(whole[wanted].shape)
    stream = cupy.cuda.get_current_stream()
    copies = []
    with xmesh.Resharder(plan, comm, like=cupy, transport=transport, timeout_s=60) as reshard:
        for turn in range(5):
            _engine.delay(stream.ptr, 0.005)
            local[...] = cupy.asarray(np.ascontiguousarray(whole[mine] + turn))
            reshard.start(local, out).wait_on()
            _engine.delay(stream.ptr, 0.005)
            copies.append(out.copy())
    good = all(np.array_equal(c.get(), whole[wanted] + i) for i, c in enumerate(copies))
    draws.together(comm, "" if good else f"rank {comm.rank}: {[c.get() for c in copies]}")


def test_what_is_no_stream_is_refused(comm):
    plan, whole, mine, _ = moved(comm)
    local = cupy.asarray(np.ascontiguousarray(whole[mine]))
    with xmesh.Resharder(plan, comm, like=cupy, transport="mpi", timeout_s=60) as reshard:
        request = reshard.start(local)
        for wrong in (7, "stream", object()):
            with pytest.raises(xmesh.errors.OptionError, match="wait_on takes a stream of CuPy"):
                request.wait_on(wrong)
        request.wait()
