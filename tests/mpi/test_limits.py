"""Beyond 2 GiB, 4 GiB and 2^31 elements: in the arithmetic always, for real where memory allows."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

import draws
import numpy as np
import pytest
from mpi4py import MPI

import xmesh
from xmesh import Box, DeviceMesh, Layout, Plan, Resharder
from xmesh.planner import STRATEGIES
from xmesh.program import Program, compile_program

SIZE = MPI.COMM_WORLD.size
GIB = 2**30


def volume_of(program: Program) -> tuple[int, int, int]:
    """Bytes that a rank sends, receives and copies."""
    sent = sum(program.pieces[m.piece].nbytes for m in program.sends)
    received = sum(program.pieces[m.piece].nbytes for m in program.receives)
    copied = 0
    for source, _ in program.copies:
        copied += math.prod(s.stop - s.start for s in source.index)
    return sent, received, copied


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["i1", "<c16"])
def test_no_count_or_offset_wraps_at_4_gib(strategy, dtype):
    """8 GiB and 2^33 elements: what each rank sends and receives adds up, chunk by chunk."""
    shape = (2**20, 2**13)
    itemsize = np.dtype(dtype).itemsize
    src = Layout(DeviceMesh([0, 1]), "S0 R", shape)
    dst = Layout(DeviceMesh([2, 3]), "R S0", shape)
    plan = xmesh.plan(src, dst, dtype, strategy=strategy, chunk_nbytes=256 * 2**20)
    total = 2**33 * itemsize
    assert sum(t.volume for t in plan.transfers()) == 2**33
    assert plan.makespan_s >= plan.lower_bound_s > total / 4 / 1.25e9
    programs = [compile_program(plan, rank) for rank in range(4)]
    sums = np.array([volume_of(program) for program in programs], dtype=object)
    assert sums[0].tolist() == sums[1].tolist() == [total // 2, 0, 0]
    assert sums[2].tolist() == sums[3].tolist() == [0, total // 2, 0]
    assert all(piece.nbytes <= 256 * 2**20 for program in programs for piece in program.pieces)
    assert Plan.from_json(plan.to_json()) == plan


def test_no_message_is_larger_than_1_gib():
    """Past 2^31 bytes MPI libraries differ: Open MPI 5.0 cannot count what came."""
    layout, other = (Layout(DeviceMesh([rank]), "R", (2**33 + 1,)) for rank in (0, 1))
    plan = xmesh.plan(layout, other, "i1", chunk_nbytes=2**40)
    pieces = compile_program(plan, 0).pieces
    assert sum(piece.nbytes for piece in pieces) == 2**33 + 1
    assert max(piece.nbytes for piece in pieces) <= 2**30


def test_offsets_beyond_2_to_32_reach_the_right_elements():
    """Views of 2^33 elements that all share one byte: only the arithmetic is large."""
    shape = (2**20, 2**13)
    src = Layout(DeviceMesh([0]), "R R", shape)
    dst = Layout.from_boxes({1: [Box((2**20 - 3, 2**13 - 5), shape)]}, shape)
    source = np.broadcast_to(np.uint8(7), shape)
    with Resharder(xmesh.plan(src, dst, "u1")) as reshard:
        assert reshard({0: source})[1].tolist() == [[7] * 5] * 3


def available_nbytes() -> int:
    """Memory that can be had without swapping; 0 where nothing tells."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, array.size, 2**24):
        yield start, array[start : start + 2**24]


@pytest.mark.skipif(SIZE != 2, reason="moves one large array, on 2 ranks")
@pytest.mark.timeout(300)
def test_more_than_2_gib_per_rank_for_real(comm):
    """4 GB sends overflow elsewhere: in small chunks, and in the largest that there are."""
    needed = 10 * GIB
    there = comm.allreduce(available_nbytes(), MPI.MIN)
    if there == 0 and os.environ.get("CI") == "true":
        pytest.fail("cannot tell how much memory is available: no MemAvailable in /proc/meminfo")
    if there < needed:
        pytest.skip(f"needs {needed / GIB:.1f} GiB of memory, {there / GIB:.1f} are available")
    elements = 2**31 + 2**20 + 7
    pattern = np.arange(2**24 + 251, dtype=np.uint32).view(np.uint8)[: 2**24 + 251]
    src, dst = (Layout(DeviceMesh([rank]), "R", (elements,)) for rank in (0, 1))
    array = np.empty(elements, "u1")
    for chunk_nbytes in (2**22, 2**40):
        for start, block in blocks(array):
            shift = start // 2**24 % 251
            block[...] = pattern[shift : shift + block.size] if comm.rank == 0 else 0xEE
        plan = xmesh.plan(src, dst, "u1", chunk_nbytes=chunk_nbytes)
        problem = ""
        with Resharder(plan, comm) as reshard:
            if comm.rank == 0:
                reshard(array)
            else:
                assert reshard(None, array) is array
                for start, block in blocks(array):
                    shift = start // 2**24 % 251
                    if not np.array_equal(block, pattern[shift : shift + block.size]):
                        problem = f"wrong from element {start} on (chunks of {chunk_nbytes})"
                        break
        draws.together(comm, problem)


@pytest.mark.skipif(SIZE < 2, reason="one rank sends itself no messages")
def test_tags_run_out_and_a_new_communicator_is_made(comm, monkeypatch):
    """Each resharder reserves tags; MPI guarantees no more than 32767 of them."""
    monkeypatch.setattr("xmesh.transport.mpi._tag_limit", lambda _: 1000)
    shape = (comm.size, 4)
    mesh = DeviceMesh(range(comm.size))
    plan = xmesh.plan(Layout(mesh, "S0 R", shape), Layout(mesh, "R R", shape), scheduler="naive")
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Resharder(plan, comm)) for _ in range(10)]
        for reshard in made:
            out = reshard(np.full((1, 4), comm.rank, "float32"))
            problem = "" if (out[:, 0] == np.arange(comm.size)).all() else f"{out}"
            draws.together(comm, problem)
