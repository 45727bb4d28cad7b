"""Staging keeps copies and messages busy at one time, within a bounded number of chunks."""

from __future__ import annotations

import cupy
import numpy as np
from cupy import _engine

import xmesh
from xmesh.execution import Execution
from xmesh.planner.fair import SENDS_IN_FLIGHT

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
    both: list[bool] = []
    most: list[int] = []
    step = Execution.step

    def look(self):
        # The network is slow: the receiver comes after the sender has had time to copy ahead.
        if self._program.rank == 1 and not any(both) and len(both) < 20_000:
            both.append(False)
            return False
        moved = step(self)
        sending = sum(not incoming for _, incoming in self._posted)
        both.append(sending > 0 and len(self._held) > 0)
        most.append(sending + len(self._held))
        return moved

    monkeypatch.setattr(Execution, "step", look)
    local = cupy.asarray(np.arange(LENGTH, dtype=np.uint8))
    before = _engine.counters["streamSynchronize"]
    with xmesh.Resharder(plan, like=cupy) as reshard:
        out = reshard({0: local})[1]
        assert reshard.staging_nbytes <= 2 * 64 * 2**20
    assert (out.get() == np.arange(LENGTH, dtype=np.uint8)).all()
    assert any(both)
    assert max(most) <= SENDS_IN_FLIGHT + 2
    assert _engine.counters["streamSynchronize"] == before
