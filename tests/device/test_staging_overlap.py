"""Staging keeps copies and messages busy at one time, within a bounded number of chunks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cupy
import numpy as np
import pytest

import xmesh
from xmesh.device.gpu import Fence
from xmesh.execution import Execution
from xmesh.planner.fair import SENDS_IN_FLIGHT

pytestmark = pytest.mark.double_only
engine: Any = getattr(cupy, "_engine", None)
LENGTH, CHUNK = 1 << 14, 1 << 10


def test_chunks_are_copied_while_others_travel(monkeypatch):
    """The sender copies the next chunks to the host while earlier ones are messages."""
    plan = xmesh.plan(
        xmesh.Layout(xmesh.DeviceMesh([0]), "R", (LENGTH,)),
        xmesh.Layout(xmesh.DeviceMesh([1]), "R", (LENGTH,)),
        "uint8",
        chunk_nbytes=CHUNK,
        name="field",
    )
    seen: Counter[Fence] = Counter()
    idle: list[bool] = []
    both: list[bool] = []
    most: list[int] = []
    step, ended = Execution.step, vars(Fence)["done"].fget

    def done(self):
        seen[self] += 1
        return seen[self] > 2 and ended(self)

    def look(self):
        # The network is slow: the receiver comes when the sender has nothing left to do.
        if self._program.rank == 1 and not idle:
            return False
        moved = step(self)
        if self._program.rank == 0:
            sending = sum(not incoming for _, incoming in self._posted)
            both.append(sending > 0 and len(self._held) > 0)
            most.append(sending + len(self._held))
            if sending and not self._held and not moved:
                idle.append(True)
        return moved

    monkeypatch.setattr(Execution, "step", look)
    # Copies are slow too, however long the ranks wait: each is seen to be under way twice.
    monkeypatch.setattr(Fence, "done", property(done))
    local = cupy.asarray(np.arange(LENGTH, dtype=np.uint8))
    before = engine.counters["streamSynchronize"]
    with xmesh.Resharder(plan, like=cupy) as reshard:
        out = reshard({0: local})[1]
        assert reshard.staging_nbytes <= 2 * 64 * 2**20
    assert (out.get() == np.arange(LENGTH, dtype=np.uint8)).all()
    assert any(both)
    assert max(most) <= SENDS_IN_FLIGHT + 2
    assert engine.counters["streamSynchronize"] == before
