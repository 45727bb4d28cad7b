"""Rank program: rank 0 prints each rank's node, and the topology that World finds."""

from __future__ import annotations

import json
import os
import sys

from mpi4py import MPI

import xmesh

comm = MPI.COMM_WORLD
nodes = comm.gather(os.environ["SLURMD_NODENAME"])
with xmesh.World(comm, topology=sys.argv[1]) as world:
    if comm.rank == 0:
        found = {"size": comm.size, "nodes": nodes, "topology": world.topology.to_json()}
        print("RESULT " + json.dumps(found), flush=True)
