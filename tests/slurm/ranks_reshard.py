"""Rank program for 8 ranks: reshards some layouts, each element checked on each rank.

Rank 0 prints how many elements were wrong, and how many there were.
"""

from __future__ import annotations

import json

import numpy as np
from mpi4py import MPI

import xmesh

LOWER, UPPER = xmesh.DeviceMesh.arange((2, 2)), xmesh.DeviceMesh.arange((2, 2), start=4)
ALL, FLIPPED = xmesh.DeviceMesh.arange((4, 2)), xmesh.DeviceMesh([[7, 5, 3, 1], [6, 4, 2, 0]])
CASES = [
    (LOWER, "S0 R", UPPER, "S0 R", (64, 32)),
    (LOWER, "R R", UPPER, "S0 R", (64, 32)),
    (LOWER, "R S01", UPPER, "S01 R", (64, 32)),
    (LOWER, "S1 R", UPPER, "R R", (61, 7)),  # uneven
    (UPPER, "R R", LOWER, "R R", (1000, 333)),  # a broadcast of more than one chunk
    (ALL, "S0 S1", FLIPPED, "S1 S0", (40, 24)),
    (ALL, "S01 R", FLIPPED, "R S01", (3, 50)),  # empty boxes
]

comm = MPI.COMM_WORLD
wrong = seen = 0
with xmesh.World(comm, topology="slurm") as world:
    topology = world.topology
for source_mesh, source_spec, target_mesh, target_spec, shape in CASES:
    source = xmesh.Layout(source_mesh, source_spec, shape=shape)
    target = xmesh.Layout(target_mesh, target_spec, shape=shape)
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    local = None
    if comm.rank in source_mesh:
        (box,) = source.boxes(comm.rank)
        local = np.ascontiguousarray(whole[box.slices()])
    plan = xmesh.plan(source, target, dtype="float32", topology=topology)
    with xmesh.Resharder(plan, comm) as reshard:
        for _ in range(2):
            out = reshard(local)
            if comm.rank in target_mesh:
                (box,) = target.boxes(comm.rank)
                expected = whole[box.slices()]
                assert out is not None
                assert out.shape == expected.shape
                wrong += int(np.count_nonzero(out != expected))
                seen += expected.size
            else:
                assert out is None
total = comm.allreduce(np.array([wrong, seen]))
if comm.rank == 0:
    print("RESULT " + json.dumps({"wrong": int(total[0]), "seen": int(total[1])}), flush=True)
