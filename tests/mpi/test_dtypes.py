"""Bytes move as bytes: any fixed-size dtype, any order in memory."""

from __future__ import annotations

import draws
import ml_dtypes
import numpy as np
import oracle
import pytest
from mpi4py import MPI

import xmesh
from xmesh import DeviceMesh, Layout, Resharder

SIZE = MPI.COMM_WORLD.size
DTYPES = {
    "bool": "?",
    "int8": "i1",
    "float16": "<f2",
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int4": ml_dtypes.int4,
    "big endian": ">f4",
    "complex64": "<c8",
    "complex128": "<c16",
    "longdouble": np.longdouble,
    "datetime": "<M8[ns]",
    "text": "<U3",
    "bytes": "S5",
    "void": "V3",
    "structured": [("key", "<i8"), ("value", "<f4")],
    "nested": [("a", [("x", "u1"), ("y", ">i2", (2, 3))]), ("b", "<f8")],
    "padded": np.dtype([("flag", "u1"), ("value", "<f8")], align=True),
}


def layouts() -> tuple[Layout, Layout]:
    ranks = list(range(SIZE))
    shape = (2 * SIZE + 1, 3)
    src = Layout(DeviceMesh(ranks), "S0 R", shape)
    dst = Layout(DeviceMesh(ranks[::-1]), "R S0", shape, uneven="balanced")
    return src, dst


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_accepted(comm, name):
    """fp16, bf16 and fp8 are refused elsewhere; here the size is all that matters."""
    src, dst = layouts()
    dtype = np.dtype(DTYPES[name])
    array = oracle.whole(src.shape, dtype, seed=3)
    wanted = oracle.held(array, dst, comm.rank)
    problem = ""
    plan = xmesh.plan(src, dst, dtype, scheduler="naive", chunk_nbytes=7)
    assert plan == xmesh.Plan.from_json(plan.to_json())
    with Resharder(plan, comm) as reshard:
        for memory in oracle.MEMORY:
            local = oracle.guarded_copy(oracle.held(array, src, comm.rank)[0], memory)
            out = oracle.guarded(wanted[0].shape, dtype, memory)
            result = reshard(local.view, out.view)
            problem = problem or oracle.difference([result], wanted)
            if not out.intact():
                problem = problem or f"elements around out changed ({memory})"
            problem = problem or oracle.difference([reshard(local.view)], wanted)
    # In one call the dtype itself has to reach ranks that hold nothing.
    first = Layout(DeviceMesh([0]), "R R", src.shape)
    result = xmesh.reshard(array if comm.rank == 0 else None, first, dst, comm)
    draws.together(comm, problem or oracle.difference([result], wanted))


def test_not_a_number_keeps_its_payload(comm):
    src, dst = layouts()
    bits = np.arange(np.prod(src.shape), dtype="<u8").reshape(src.shape) + 0x7FF0000000000001
    array = bits.view("<f8")
    (local,), wanted = (oracle.held(array, layout, comm.rank) for layout in (src, dst))
    result = xmesh.reshard(local, src, dst, comm)
    draws.together(comm, oracle.difference([result], wanted))
