"""A stream that waits for a call does not wait for what the GPU is given later."""

from __future__ import annotations

import time
from typing import Any

import cupy
import numpy as np
import pytest

import xmesh

pytestmark = pytest.mark.double_only
engine: Any = getattr(cupy, "_engine", None)


def test_a_stream_waits_for_its_own_call_alone():
    plan = xmesh.plan(
        xmesh.Layout(xmesh.DeviceMesh([0]), "R", (64,)),
        xmesh.Layout(xmesh.DeviceMesh([1]), "R", (64,)),
        "float32",
        name="field",
    )
    local = cupy.asarray(np.arange(64, dtype="f4"))
    stream = cupy.cuda.Stream(non_blocking=True)
    with xmesh.Resharder(plan, like=cupy) as reshard:
        reshard({0: local})
        gpu = reshard._members[1].gpu
        engine.delay(gpu.incoming.ptr, 0.3)  # or it is over before the stream comes to wait
        request = reshard.start({0: local})
        while not request.over and not request.enqueued:
            request.test()
        engine.delay(gpu.incoming.ptr, 3)
        later = gpu.fence(gpu.incoming)
        out = request.wait_on(stream)[1]
        own = gpu.fence(stream)
        while not own.done and not later.done:
            time.sleep(1e-3)
        assert own.done
        assert not later.done
        with stream:
            assert (out.get() == np.arange(64)).all()
        request.wait()
