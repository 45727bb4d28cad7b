"""Which streams are waited for: producers that are slow on purpose, and consumers that do not wait.

On a GPU a kernel spins for tenths of a second before it writes, so whoever forgets to wait for it
reads what was there before.
"""

from __future__ import annotations

import time

import cupy
import numpy as np
import oracle
import pytest
from on_device import new_stream, slow_copy, to_host

import xmesh
from xmesh import DeviceMesh, Layout, Resharder

SHAPE = (64, 96)
SRC = Layout(DeviceMesh([0]), "R R", SHAPE)
DST = Layout(DeviceMesh([1, 2]), "R S0", SHAPE)
HALF = DST.boxes(1)[0].shape


@pytest.fixture
def reshard():
    with Resharder(xmesh.plan(SRC, DST, "float32"), like=cupy) as made:
        made({0: cupy.zeros(SHAPE, np.float32)})  # kernels are compiled, memory is there
        yield made


def halves(whole):
    return {rank: whole[DST.boxes(rank)[0].slices()] for rank in (1, 2)}


def same(result, whole):
    wanted = halves(whole)
    return all((to_host(result[rank]) == wanted[rank]).all() for rank in wanted)


def stale_and_fresh():
    """Zeros in GPU memory, what they are to become, and that on the host."""
    whole = oracle.whole(SHAPE, "u1").astype(np.float32)
    local, fresh = cupy.zeros(SHAPE, np.float32), cupy.asarray(whole)
    cupy.cuda.Device().synchronize()
    return local, fresh, whole


@pytest.mark.parametrize("which", ["own", "legacy default"])
def test_a_slow_producer_is_waited_for(reshard, which):
    local, fresh, whole = stale_and_fresh()
    stream = new_stream() if which == "own" else cupy.cuda.Stream.null
    slow_copy(local, fresh, stream)
    assert not stream.done, "the kernel must be slow, or this proves nothing"
    with stream:
        request = reshard.start({0: local})
    assert not stream.done, "start() must not wait for the producer"
    assert same(request.wait(timeout_s=60), whole)


def test_the_host_goes_on_while_the_producer_works(reshard):
    local, fresh, whole = stale_and_fresh()
    stream = new_stream()
    slow_copy(local, fresh, stream)
    with stream:
        began_s = time.perf_counter()
        request = reshard.start({0: local})
        started_s = time.perf_counter() - began_s
        looks = 0
        while not request.test():
            looks += 1
        assert same(request.wait(), whole)
    assert started_s < time.perf_counter() - began_s
    assert looks > 10


def test_an_output_is_not_written_while_a_consumer_still_reads_it(reshard):
    """A kernel of before reads ``out``, late; it must see what was there before the call."""
    local, fresh, whole = stale_and_fresh()
    out = {rank: cupy.full(HALF, 7, np.float32) for rank in (1, 2)}
    read = cupy.zeros(HALF, np.float32)
    cupy.cuda.Device().synchronize()
    stream = new_stream()
    slow_copy(read, out[1], stream)
    with stream:
        result = reshard({0: fresh}, out)
    stream.synchronize()
    assert (read.get() == 7).all()
    assert result[1] is out[1]
    assert same(result, whole)
    del local


def test_outputs_can_be_read_on_any_stream_at_once(reshard):
    _, fresh, whole = stale_and_fresh()
    for _ in range(20):
        result = reshard({0: fresh})
        copies = {}
        for rank, array in result.items():
            with new_stream():  # which nobody has told anything
                copies[rank] = array.copy()
        cupy.cuda.Device().synchronize()
        assert same(copies, whole)


def test_a_stream_waits_in_place_of_the_host(reshard):
    """Also for a source that is overwritten on that stream."""
    local, fresh, whole = stale_and_fresh()
    producer, consumer = new_stream(), new_stream()
    slow_copy(local, fresh, producer)
    with producer:
        request = reshard.start({0: local})
    result = request.wait_on(consumer, timeout_s=60)
    with consumer:
        copies = {rank: array.copy() for rank, array in result.items()}
        local.fill(0)
    consumer.synchronize()
    assert same(copies, whole)
    request.wait()


def test_the_source_may_be_written_after_the_call(reshard):
    local, fresh, whole = stale_and_fresh()
    for _ in range(20):
        local[...] = fresh
        result = reshard({0: local})
        with new_stream() as stream:
            local.fill(0)
        assert same(result, whole)
        stream.synchronize()


def test_calls_in_flight_with_producers_of_their_own(reshard):
    _, _, whole = stale_and_fresh()
    kept, requests = [], []
    for i in range(4):
        local, fresh = cupy.zeros(SHAPE, np.float32), cupy.asarray(whole + i)
        cupy.cuda.Device().synchronize()
        stream = new_stream()
        slow_copy(local, fresh, stream)
        with stream:
            requests.append(reshard.start({0: local}))
        kept.append((local, fresh, stream))
    for i in reversed(range(4)):
        assert same(requests[i].wait(timeout_s=60), whole + i)


def test_memory_does_not_grow_over_calls(reshard):
    _, fresh, _ = stale_and_fresh()
    pool = cupy.get_default_memory_pool()
    out = {rank: cupy.empty(HALF, np.float32) for rank in (1, 2)}
    reshard({0: fresh}, out)
    before = pool.used_bytes()
    for _ in range(100):
        reshard({0: fresh}, out)
    assert pool.used_bytes() == before
