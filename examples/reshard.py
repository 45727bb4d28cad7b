"""A matrix held by rows on half of the ranks goes to the other half, which needs columns.

mpiexec -n 4 python examples/reshard.py
"""

import numpy as np
from mpi4py import MPI

import xmesh

comm = MPI.COMM_WORLD
if comm.size < 2:
    raise SystemExit("two groups need two ranks: mpiexec -n 4 python examples/reshard.py")

half = comm.size // 2
shape = (1024, 512)
src = xmesh.Layout(xmesh.DeviceMesh(range(half)), "S0 R", shape)  # rows
dst = xmesh.Layout(xmesh.DeviceMesh(range(half, comm.size)), "R S0", shape)  # columns

whole = np.arange(1024 * 512, dtype="float32").reshape(shape)
local = None
if comm.rank in src.ranks:
    local = whole[src.boxes(comm.rank)[0].slices()].copy()

out = xmesh.reshard(local, src, dst, comm)  # an array on the ranks of dst, None elsewhere

with xmesh.World(comm) as world:  # knows which ranks share a host
    plan = xmesh.plan(src, dst, "float32", world.topology)  # pure data, the same on every rank
    with xmesh.Resharder(plan, world) as resharder:  # set-up once, then as often as you like
        request = resharder.start(local)
        # ... compute meanwhile ...
        again = request.wait(timeout_s=60)

# The rest shows it: every rank says what it has, and whether it is right; rank 0 prints.
if comm.rank in src.ranks:
    right, text = out is None and again is None, f"sent rows    {src.boxes(comm.rank)[0]}"
else:
    (box,) = dst.boxes(comm.rank)
    wanted = whole[box.slices()]
    right = np.array_equal(out, wanted) and np.array_equal(again, wanted)
    text = f"has columns  {box}, every element {'right' if right else 'WRONG'}"
lines = comm.gather(f"rank {comm.rank} {text}")
if lines is not None:
    print(plan, "", *lines, sep="\n")
if not comm.allreduce(right, op=MPI.LAND):
    raise SystemExit(1)
