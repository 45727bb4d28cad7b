"""Several ranks that share one GPU: device arrays over MPI, staged, or handed over as they are.

tests/gpu/run.py starts it twice on each number of ranks: with XMESH_CUDA_AWARE=0, and with what the
MPI library says.
"""

from __future__ import annotations

import os

import cupy
import draws
import numpy as np
import oracle
import pytest
from mpi4py import MPI
from on_device import ON_DOUBLE, Lent, new_stream, slow_copy, to_host

import xmesh
from xmesh import DeviceMesh, Layout, Resharder
from xmesh.binding import context_of
from xmesh.device.gpu import Gpu
from xmesh.errors import TransportError

SIZE = MPI.COMM_WORLD.size
STAGED = os.environ.get("XMESH_CUDA_AWARE") == "0"


@pytest.fixture(autouse=True, scope="module")
def _the_way_that_is_meant():
    aware, why = context_of(MPI.COMM_WORLD).cuda_awareness(Gpu())
    if not STAGED and not aware:
        pytest.skip(f"MPI takes no device pointers ({why}), and staging is another run")
    assert aware is not STAGED


def call(reshard, rank, seed, device, given):
    """One rank's part of a call; what is wrong with the result."""
    plan = reshard.plan
    array = oracle.whole(plan.src.shape, plan.dtype, seed)
    memory = oracle.MEMORY[(rank + seed) % 5]
    held = [oracle.guarded_copy(a, memory) for a in oracle.held(array, plan.src, rank)]
    wanted = oracle.held(array, plan.dst, rank)
    outs = [oracle.guarded(a.shape, a.dtype, memory) for a in wanted] if given else []
    sources, targets = (list(map(Lent, made)) if device else [] for made in (held, outs))
    result = reshard(
        oracle.as_argument(sources or [made.view for made in held]),
        oracle.as_argument(targets or [made.view for made in outs]),
    )
    if not outs:
        return oracle.difference(list(map(to_host, oracle.as_arrays(result))), wanted)
    found = [made.get() for made in targets] or outs
    if not all(made.intact() for made in found):
        return "elements around an output changed"
    return oracle.difference([made.view for made in found], wanted)


@pytest.mark.parametrize("staging_nbytes", [0, 1000, 1 << 26])
def test_random_pairs(comm, staging_nbytes):
    rng = np.random.default_rng([SIZE, staging_nbytes])
    for seed in range(3 if ON_DOUBLE else 20):
        plan = draws.plan(rng, SIZE)
        with Resharder(
            plan, comm, transport="mpi", like=cupy, staging_nbytes=staging_nbytes
        ) as reshard:
            for i in range(2):
                draws.together(comm, call(reshard, comm.rank, seed + i, True, i == 0))


def test_some_ranks_have_their_arrays_on_the_host(comm):
    """Those of odd ranks."""
    on_gpu = comm.rank % 2 == 0
    src = Layout(DeviceMesh(range(SIZE)), "S0 R", (2 * SIZE + 1, 33))
    dst = Layout(DeviceMesh(range(SIZE)), "R S0", (2 * SIZE + 1, 33))
    plan = xmesh.plan(src, dst, "<f8", chunk_nbytes=64)
    with Resharder(plan, comm, transport="mpi", like=cupy if on_gpu else np) as reshard:
        for seed in range(3):
            draws.together(comm, call(reshard, comm.rank, seed, on_gpu, True))


def test_a_slow_producer_on_one_rank(comm):
    src = Layout(DeviceMesh([0]), "R R", (64, 64))
    dst = Layout(DeviceMesh([SIZE - 1]), "R R", (64, 64))
    whole = oracle.whole((64, 64), "u1").astype(np.float32)
    with Resharder(xmesh.plan(src, dst, "f4"), comm, transport="mpi", like=cupy) as reshard:
        for _ in range(3):
            local = None
            stream = new_stream()
            if comm.rank == 0:
                local, fresh = cupy.zeros((64, 64), np.float32), cupy.asarray(whole)
                cupy.cuda.Device().synchronize()
                slow_copy(local, fresh, stream)
                assert not stream.done
            with stream:
                out = reshard(local, timeout_s=60)
            problem = ""
            if out is not None and not (to_host(out) == whole).all():
                problem = "read too early"
            draws.together(comm, problem)


def test_calls_in_flight(comm):
    src = Layout(DeviceMesh(range(SIZE)), "S0 R", (4 * SIZE, 48))
    dst = Layout(DeviceMesh(range(SIZE)), "R S0", (4 * SIZE, 48))
    plan = xmesh.plan(src, dst, "<i4", chunk_nbytes=256)
    with Resharder(plan, comm, transport="mpi", like=cupy) as reshard:
        arrays = [oracle.whole(src.shape, "<i4", seed) for seed in range(5)]
        requests = [
            reshard.start(cupy.asarray(oracle.held(array, src, comm.rank)[0])) for array in arrays
        ]
        for request, array in reversed(list(zip(requests, arrays, strict=True))):
            found = to_host(request.wait(timeout_s=60))
            draws.together(comm, oracle.difference([found], oracle.held(array, dst, comm.rank)))


def test_more_than_staging_holds(comm):
    """An array that is many times larger than the memory it passes through."""
    rows = 64 if ON_DOUBLE else 2**12
    src = Layout(DeviceMesh([0]), "R R", (rows, 8192))
    dst = Layout(DeviceMesh([SIZE - 1]), "R R", (rows, 8192))
    plan = xmesh.plan(src, dst, "u1", chunk_nbytes=rows * 512)
    with Resharder(plan, comm, transport="mpi", like=cupy, staging_nbytes=0) as reshard:
        local = None
        whole = oracle.whole((rows, 8192), "u1")
        if comm.rank == 0:
            wide = cupy.empty((rows, 2 * 8192), np.uint8)
            local = wide[:, :8192]
            local[...] = cupy.asarray(whole)
        out = reshard(local, timeout_s=120)
        problem = ""
        if out is not None and not np.array_equal(to_host(out), whole):
            problem = "wrong bytes"
        draws.together(comm, problem)
        assert reshard.staging_nbytes <= 16 * rows * 512


@pytest.mark.skipif(SIZE < 2, reason="needs at least 2 ranks")
def test_nccl_refuses_ranks_that_share_a_gpu(comm):
    src = Layout(DeviceMesh(range(SIZE)), "S0", (SIZE,))
    plan = xmesh.plan(src, Layout(DeviceMesh(range(SIZE)), "R", (SIZE,)), "f4")
    try:
        from xmesh.nccl.library import load_nccl

        load_nccl()
    except TransportError as error:
        pytest.skip(str(error))
    with pytest.raises(TransportError, match="a GPU of its own for each rank"):
        Resharder(plan, comm, transport="nccl", like=cupy)
    with Resharder(plan, comm, like=cupy) as reshard:
        assert reshard.transport == "mpi"
        assert "ranks 0 and 1 both use GPU" in reshard.why_transport
        draws.together(comm, call(reshard, comm.rank, 1, True, False))


def test_device_memory_stays_flat(comm):
    src = Layout(DeviceMesh(range(SIZE)), "S0 R", (SIZE, 64))
    dst = Layout(DeviceMesh(range(SIZE)), "R S0", (SIZE, 64))
    plan = xmesh.plan(src, dst, "f4")
    pool = cupy.get_default_memory_pool()
    with Resharder(plan, comm, transport="mpi", like=cupy) as reshard:
        local = cupy.ones(src.boxes(comm.rank)[0].shape, np.float32)
        out = cupy.empty(dst.boxes(comm.rank)[0].shape, np.float32)
        reshard(local, out)
        before = pool.used_bytes(), reshard.staging_nbytes
        for _ in range(50):
            reshard(local, out)
        assert (pool.used_bytes(), reshard.staging_nbytes) == before
