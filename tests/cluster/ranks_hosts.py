"""Rank program: rank 0 prints where all ranks are, as the system, MPI and xmesh see it."""

from __future__ import annotations

import json
import os
import socket
import sys

from mpi4py import MPI

import xmesh

comm = MPI.COMM_WORLD
with_memory = comm.Split_type(MPI.COMM_TYPE_SHARED)
world = xmesh.World(comm)
own = {
    "host_name": socket.gethostname(),
    "shares_memory_with": with_memory.size,
    "nic": os.environ.get("XMESH_NIC"),
    "given": os.environ.get("GIVEN"),
}
ranks = comm.gather(own)
if comm.rank == 0:
    print("RESULT " + json.dumps({"ranks": ranks, "topology": world.topology.to_json()}))
world.close()
with_memory.Free()
sys.stdout.flush()
