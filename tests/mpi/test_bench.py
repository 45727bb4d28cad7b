"""The paper's cases on as many ranks as there are, and that their check can fail."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from traces import bars, ends

from xmesh import Topology
from xmesh.bench import paper
from xmesh.bench.baselines import applies
from xmesh.bench.cases import CASES, Case, scaled_shape
from xmesh.bench.methods import BASELINES, Method
from xmesh.bench.rows import Row
from xmesh.bench.session import News
from xmesh.errors import XmeshError
from xmesh.planner import STRATEGIES
from xmesh.resharder import Resharder

TINY_NBYTES = 20_000


def fitting(comm):
    """The paper's cases that there are ranks for; on few ranks one like case 5, but smaller."""
    cases = [case for case in CASES if case.num_ranks <= comm.size]
    if cases:
        return cases
    if comm.size == 1:
        pytest.skip("two meshes need two ranks")
    half = comm.size // 2
    return [Case(0, "S1RR", "S0RR", src_mesh=(1, half), dst_mesh=(1, comm.size - half))]


def test_every_case_that_fits_is_verified(comm):
    told: list[paper.Step | Row] = []
    cases = fitting(comm)
    rows = paper.run(comm, nbytes=TINY_NBYTES, repeats=2, cases=cases, tell=told.append)
    assert [row.case for row in rows] == [case.number for case in cases]
    for row, case in zip(rows, cases, strict=True):
        assert row.verified, row.problem
        assert row.shape == scaled_shape(case, TINY_NBYTES)
        assert row.time_s > 0
        assert len(row.times_s) == 2
        assert row.ratio == pytest.approx(1)
        assert row.predicted_s is not None
        assert row.predicted_s >= row.bound_s
        assert sum(row.sent_nbytes) == sum(row.received_nbytes)
        if case.number:
            # The paper's cluster: a host must receive a third of the array at least.
            assert max(row.received_nbytes) >= row.nbytes / 3
    assert comm.bcast(rows) == rows  # the same on every rank
    if comm.rank == 0:
        assert [item for item in told if isinstance(item, Row)] == rows
        last = [item for item in told if isinstance(item, paper.Step)][-1]
        assert last.done == last.total == 3 * len(cases)
    else:
        assert told == []


def test_a_case_is_recorded(comm, tmp_path):
    path = comm.bcast(tmp_path) / "trace.json"
    cases = fitting(comm)[:1]
    paper.run(comm, nbytes=TINY_NBYTES, repeats=1, cases=cases, trace=str(path))
    if comm.rank == 0:
        data = json.loads(path.read_text())
        assert data["otherData"]["call"] == 1
        for run in ("measured", "simulated"):
            sent, received = ends(bars(data, run)[1])
            assert sent == received
            assert sent
    comm.Barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_verified(comm, strategy):
    cases = fitting(comm)
    rows = paper.run(comm, nbytes=TINY_NBYTES, repeats=1, strategy=strategy, cases=cases)
    assert all(row.verified for row in rows)
    assert {row.strategy for row in rows} == {strategy}


def overlapping(comm):
    """Cases in which ranks hold and need, replicas take turns, and boxes have several receivers."""
    n = comm.size
    back = tuple(reversed(range(n)))
    return [
        Case("turned", "S0RR", "RS0R", (n,), (n,), src_ranks=back, dst_ranks=tuple(range(n))),
        Case("gathered", "S0RR", "RRR", (n,), (n,), dst_ranks=tuple(range(n))),
        Case("from-replicas", "RRR", "RS0R", (n,), (n,), dst_ranks=back),
    ]


@pytest.mark.parametrize("method", BASELINES)
def test_plain_mpi_moves_what_a_plan_moves(comm, method):
    cases = overlapping(comm) + (fitting(comm)[:4] if comm.size > 1 else [])
    methods = [Method(method, "")]
    rows = paper.run(comm, nbytes=TINY_NBYTES, repeats=2, cases=cases, methods=methods)
    assert all(row.verified for row in rows), rows
    assert {row.case for row in rows} == {
        case.number for case in cases if applies(methods[0], *case.layouts())
    }
    assert all(row.predicted_s is None and not row.scheduler for row in rows)


def test_a_run_of_several_methods_has_a_row_of_each_and_counts_its_steps(comm):
    told: list[News] = []
    methods = [Method(), Method("broadcast", "naive"), Method("mpi_isend", "")]
    cases = overlapping(comm)[::2]  # the other one takes long to plan on 16 ranks
    rows = paper.run(
        comm,
        nbytes=TINY_NBYTES,
        repeats=2,
        other_repeats=1,
        cases=cases,
        methods=methods,
        tell=told.append,
    )
    assert [row.method for row in rows] == ["auto", "broadcast/naive", "mpi_isend"] * 2
    assert [len(row.times_s) for row in rows] == [2, 1, 1] * 2
    if comm.rank == 0:
        steps = [item for item in told if isinstance(item, paper.Step)]
        assert [step.done for step in steps] == list(range(1, 15))
        assert steps[-1].total == 14


def test_a_topology_of_one_host_sends_nothing_between_hosts(comm):
    cases = fitting(comm)[:1]
    topology = Topology.uniform(comm.size, comm.size)
    (row,) = paper.run(comm, nbytes=TINY_NBYTES, repeats=1, cases=cases, topology=topology)
    assert row.verified
    assert sum(row.sent_nbytes) == 0


def test_a_call_that_moves_nothing_is_found_out(comm, monkeypatch):
    cases = fitting(comm)[:1]
    monkeypatch.setattr(Resharder, "__call__", lambda self, local=None, out=None: out)
    (row,) = paper.run(comm, nbytes=TINY_NBYTES, repeats=1, cases=cases)
    assert not row.verified
    assert "repeat 0" in row.problem


def test_stale_data_of_the_call_before_is_found_out(comm, monkeypatch):
    cases = fitting(comm)[:1]
    real = Resharder.__call__
    kept: list[Any] = []

    def stale(self, local=None, out=None):
        if not kept:
            real(self, local, out)
            kept.append(None if out is None else out.copy())
        elif out is not None:
            np.copyto(out, kept[0])
        return out

    monkeypatch.setattr(Resharder, "__call__", stale)
    (row,) = paper.run(comm, nbytes=TINY_NBYTES, repeats=2, cases=cases)
    assert not row.verified
    assert "repeat 1" in row.problem


def test_too_few_ranks_are_refused_with_a_remedy(comm):
    cases = [case for case in CASES if case.num_ranks > comm.size][:1]
    if not cases:
        pytest.skip("every case fits")
    with pytest.raises(XmeshError, match=rf"mpiexec -n {cases[0].num_ranks} "):
        paper.run(comm, cases=cases)
