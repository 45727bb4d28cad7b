"""The last rank fails a test while the others are inside a collective of it."""

from __future__ import annotations


def enter_the_barrier(comm):
    comm.Barrier()


def test_before():
    pass


def test_last_rank_fails(comm):
    if comm.rank == comm.size - 1:
        raise ValueError("a deliberate failure")
    enter_the_barrier(comm)


def test_never_reached(comm):
    comm.Barrier()
