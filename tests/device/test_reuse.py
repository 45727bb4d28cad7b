"""Buffers that the GPU has not let go of in time end the call that wants them, and nothing else."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest

import xmesh
from xmesh.errors import ClosedError, TransferTimeout

pytestmark = pytest.mark.double_only
engine: Any = getattr(cupy, "_engine", None)


def test_a_buffer_that_never_comes_free():
    plan = xmesh.plan(
        xmesh.Layout(xmesh.DeviceMesh([0]), "R", (64,)),
        xmesh.Layout(xmesh.DeviceMesh([1]), "R", (64,)),
        "float32",
        name="field",
    )
    local, out = cupy.asarray(np.arange(64, dtype="f4")), cupy.zeros(64, "f4")
    reshard = xmesh.Resharder(plan, like=cupy, timeout_s=0.5)
    reshard({0: local}, {1: out})
    gpu = reshard._members[1].gpu
    engine.delay(gpu.incoming.ptr, 2)
    request = reshard.start({0: local}, {1: out})
    request.wait_on()  # all of it is with the GPU, which is slow
    with pytest.raises(TransferTimeout, match="copies on the GPU have not ended"):
        reshard.start({0: local}, {1: out})
    with pytest.raises(ClosedError, match=r"it gave up after 0\.5 s"):
        reshard.start({0: local}, {1: out})
    gpu.incoming.synchronize()
    assert (out.get() == np.arange(64)).all()
