from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmesh.errors import TopologyError
from xmesh.slurm import expand_nodelist, host_of_rank_from_slurm

STEP = {
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NODELIST": "n[1-3,7]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


def refusal(call, argument) -> str:
    with pytest.raises(TopologyError) as caught:
        call(argument)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login0", "login0"),
        ("n[1-3,7],login0", "n1 n2 n3 n7 login0"),
        ("n[08-10,012]", "n08 n09 n10 n012"),
        ("n[9-10]", "n9 n10"),
        ("r[0-1]n[1-2]x", "r0n1x r0n2x r1n1x r1n2x"),
        ("a-b[3]-c.d", "a-b3-c.d"),
        ("[1-2]", "1 2"),
    ],
)
def test_nodelists(text, names):
    assert expand_nodelist(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("", "brackets and commas do not match"),
        ("n[1-2", "brackets and commas do not match"),
        ("n1,,n2", "brackets and commas do not match"),
        ("n[[1]]", "brackets and commas do not match"),
        ("n[]", "'' is neither a number nor a range"),
        ("n[1-x]", "'1-x' is neither a number nor a range"),
        ("n[3-1]", "range '3-1' runs backwards"),
    ],
)
def test_nodelists_that_cannot_be_read(text, phrase):
    message = refusal(expand_nodelist, text)
    assert f"{text!r}: {phrase}" in message
    assert "Topology(host_of_rank=[...])" in message


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [
        (None, "n1 n1 n2 n2 n3 n3 n7"),
        ("block", "n1 n1 n2 n2 n3 n3 n7"),
        ("block:cyclic,Pack", "n1 n1 n2 n2 n3 n3 n7"),
        ("*:block", "n1 n1 n2 n2 n3 n3 n7"),
        ("cyclic", "n1 n2 n3 n7 n1 n2 n3"),
        ("cyclic:block", "n1 n2 n3 n7 n1 n2 n3"),
        ("plane=2", "n1 n1 n2 n2 n3 n3 n7"),
    ],
)
def test_distributions(distribution, hosts):
    environ = dict(STEP) if distribution is None else STEP | {"SLURM_DISTRIBUTION": distribution}
    assert host_of_rank_from_slurm(environ) == tuple(hosts.split())


def test_plane_size_by_its_own_variable():
    environ = STEP | {
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NODELIST": "a,b",
        "SLURM_STEP_TASKS_PER_NODE": "5,3",
        "SLURM_DISTRIBUTION": "plane",
        "SLURM_DIST_PLANESIZE": "2",
    }
    assert host_of_rank_from_slurm(environ) == tuple("aabbaaba")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from(("block", "cyclic")))
def test_every_node_gets_its_count(counts, distribution):
    if not any(counts):
        counts[0] = 1
    environ = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": str(sum(counts)),
        "SLURM_JOB_NODELIST": f"n[0-{len(counts) - 1}]",
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        "SLURM_DISTRIBUTION": distribution,
    }
    hosts = host_of_rank_from_slurm(environ)
    assert hosts is not None
    assert [hosts.count(f"n{node}") for node in range(len(counts))] == counts
    if distribution == "block":
        assert list(hosts) == sorted(hosts)
    else:
        # Round k has, in order, the nodes with more than k tasks.
        rounds = [[f"n{i}" for i, c in enumerate(counts) if c > k] for k in range(max(counts))]
        assert list(hosts) == list(itertools.chain(*rounds))


@pytest.mark.parametrize(
    "missing", ["SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"]
)
def test_outside_of_a_step_there_is_no_answer(missing):
    environ = {name: value for name, value in STEP.items() if name != missing}
    assert host_of_rank_from_slurm(environ) is None
    assert host_of_rank_from_slurm({}) is None


def test_a_batch_script_is_no_step():
    # As sbatch sets them (no SLURM_STEP_...): mpirun may place ranks where it likes.
    environ = {
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_TASKS_PER_NODE": "1(x4)",
        "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
    }
    assert host_of_rank_from_slurm(environ) is None


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({"SLURM_NTASKS": "8"}, ["add up to the number of tasks", "is 7 tasks", "tasks 8"]),
        ({"SLURM_STEP_NUM_TASKS": "9"}, ["add up to the number of tasks", "tasks 9"]),
        ({"SLURM_NTASKS": "x"}, ["Slurm's number of tasks is a number", "'x'"]),
        ({"SLURM_STEP_NODELIST": "n1"}, ["a number of tasks for each node", "'n1': 1", ": 4"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(3x)"}, ["'2(3x)' is no count"]),
        ({"SLURM_PROCID": "7"}, ["one of its step's tasks", "SLURM_PROCID 7, 7 tasks"]),
        (
            {"SLURM_PROCID": "3", "SLURM_NODEID": "3"},
            ["SLURM_NODEID is 3", "node 1 (n2)", "rank 3"],
        ),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, ["block, cyclic or plane=<size>", "'arbitrary'"]),
        ({"SLURM_DISTRIBUTION": "plane"}, ["block, cyclic or plane=<size>", "'plane'"]),
    ],
)
def test_contradictions(changes, phrases):
    message = refusal(host_of_rank_from_slurm, STEP | changes)
    assert "host_of_rank" in message
    for phrase in phrases:
        assert phrase in message
