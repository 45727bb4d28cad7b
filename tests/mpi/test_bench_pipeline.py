"""The end-to-end experiment, small: all methods move the right bytes, rows say what was asked."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from xmesh import CostModel, World
from xmesh.bench.end_to_end import METHODS, run, table
from xmesh.bench.models import MODELS, num_ranks

SIZE = MPI.COMM_WORLD.size
FITTING = [model for model in MODELS if num_ranks([model]) <= SIZE][:2]


@pytest.mark.skipif(not FITTING, reason="the smallest model needs 4 ranks")
def test_all_methods_move_the_right_bytes(comm):
    said: list[str] = []
    with World(comm) as world:
        rows = run(
            world,
            cost=CostModel(),
            nic_Bps=1e6,
            time_scale=0.005,
            repeats=1,
            models=FITTING,
            tell=said.append,
        )
    assert [row.model for row in rows] == [m.name for m in FITTING for _ in METHODS]
    assert [row.method for row in rows] == [method.name for method in METHODS] * len(FITTING)
    assert all(row.verified for row in rows)
    assert all(len(row.times_s) == 1 and row.predicted_s > 0 for row in rows)
    assert [row.fraction_of_signal for row in rows if row.method == "signal"] == [1] * len(FITTING)
    assert len(said) == (len(rows) if comm.rank == 0 else 0)
    assert len(table(rows)) == 1 + len(rows) + len(FITTING)
    draws_alike = comm.allgather([(row.model, row.method, row.step_time_s) for row in rows])
    assert all(found == draws_alike[0] for found in draws_alike)
