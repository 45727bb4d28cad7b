"""NCCL with one rank: communicators of one, what they share, and calls that move nothing."""

from __future__ import annotations

import cupy
import numpy as np
import oracle
import pytest
from mpi4py import MPI

import xmesh
from xmesh import DeviceMesh, Layout, Resharder
from xmesh.agreement import Record
from xmesh.binding import connect, context_of
from xmesh.device.gpu import Gpu
from xmesh.errors import TransportError
from xmesh.nccl.communicators import Communicators, abort_all
from xmesh.nccl.library import can_split, load_nccl
from xmesh.nccl.making import connect_all

try:
    nccl = load_nccl()
except TransportError as error:
    pytest.skip(str(error), allow_module_level=True)

SHAPE = (12, 10)


@pytest.fixture
def alone():
    """A context and an endpoint of this rank alone."""
    comm = MPI.COMM_SELF.Dup()
    context = context_of(comm)
    endpoint, _ = connect(context, (0,), Record(0), 60, "a test")
    yield context, endpoint
    endpoint.release()
    comm.Free()


def plan():
    src = Layout(DeviceMesh([0]), "S0 R", SHAPE)
    dst = Layout.from_boxes({0: [xmesh.Box((1, 2), (11, 9)), xmesh.Box((0, 0), (12, 2))]}, SHAPE)
    return xmesh.plan(src, dst, "f4")


def test_a_plan_of_one_rank_is_copies():
    whole = oracle.whole(SHAPE, "u1").astype(np.float32)
    local = cupy.asarray(whole)
    for _ in range(3):
        with Resharder(plan(), MPI.COMM_SELF, transport="nccl", like=cupy) as reshard:
            assert reshard.transport == "nccl"
            for _ in range(3):
                found = reshard(local)
                assert (found[0].get() == whole[1:11, 2:9]).all()
                assert (found[1].get() == whole[:, :2]).all()


def test_auto_takes_nccl():
    with Resharder(plan(), MPI.COMM_SELF, like=cupy) as reshard:
        assert reshard.transport == "nccl"
        assert "a GPU of its own for each rank" in reshard.why_transport


def test_a_communicator_of_one_is_made_shared_and_freed(alone):
    context, endpoint = alone
    gpu = Gpu()
    kept = Communicators.of(context)
    for _ in range(5):
        first = connect_all(context, endpoint, [(0,)], gpu, 60, "a test")
        again = connect_all(context, endpoint, [(0,)], gpu, 60, "a test")
        (communicator,) = first.of_group.values()
        assert again == first
        assert communicator.users == 2
        broadcast(gpu, communicator.handle)
        kept.release([communicator])
        assert kept.sound((0,)) is communicator
        kept.release([communicator])
        assert kept.sound((0,)) is None


def test_a_split_communicator(alone):
    if not can_split(nccl):
        pytest.skip("this CuPy or this NCCL cannot split")
    context, endpoint = alone
    gpu = Gpu()
    (parent,) = connect_all(context, endpoint, [(0,)], gpu, 60, "a test").of_group.values()
    with gpu.here():
        child = parent.handle.commSplit(0, 0)
    broadcast(gpu, child)
    with gpu.here():
        child.destroy()
    broadcast(gpu, parent.handle)
    Communicators.of(context).release([parent])


def test_an_aborted_communicator_is_not_used_again(alone):
    context, endpoint = alone
    gpu = Gpu()
    (communicator,) = connect_all(context, endpoint, [(0,)], gpu, 60, "a test").of_group.values()
    abort_all([communicator], "the test says so")
    kept = Communicators.of(context)
    assert kept.sound((0,)) is None
    (other,) = connect_all(context, endpoint, [(0,)], gpu, 60, "a test").of_group.values()
    assert other is not communicator
    broadcast(gpu, other.handle)
    kept.release([other])
    kept.release([communicator])


def broadcast(gpu, handle):
    """In place, from the only rank to itself."""
    values = np.arange(1000, dtype=np.float32)
    array = cupy.asarray(values)
    stream = cupy.cuda.Stream(non_blocking=True)
    gpu.order(cupy.cuda.get_current_stream(), stream)
    with gpu.here():
        pointer = array.data.ptr
        handle.broadcast(pointer, pointer, array.nbytes, nccl.NCCL_UINT8, 0, stream.ptr)
    stream.synchronize()
    handle.check_async_error()
    assert (array.get() == values).all()
