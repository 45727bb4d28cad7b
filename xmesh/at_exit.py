"""What a process does for the others before it ends, whether it called xmesh or not."""

from __future__ import annotations

import sys


def drain_world() -> None:
    """Receive what other ranks sent here while they waited for this one in vain.

    A rank that never takes part in a set-up gets its notes all the same, and MPICH 5.0 aborts in
    MPI_Finalize when messages on COMM_WORLD were never received.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        from xmesh.transport.mpi import MpiContext

        MpiContext(mpi.COMM_WORLD).drain()
