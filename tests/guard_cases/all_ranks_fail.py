"""All ranks fail the same test: they are still in step, so the run goes on."""

from __future__ import annotations


def test_all_fail(comm):
    assert comm.allreduce(1) == 0, "a deliberate failure"


def test_after(comm):
    assert comm.allreduce(1) == comm.size
