"""Emulated clusters, for real: hosts, names, rates, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from xmesh.cluster import EmulatedCluster
from xmesh.cluster.__main__ import main
from xmesh.cluster.emulated import RECORDS
from xmesh.cluster.network import Network
from xmesh.cluster.processes import marked
from xmesh.errors import XmeshError

HERE = Path(__file__).parent
RATE_BPS = 200e6
# Whole lines in one write each, since ranks write at one time.
NAME = "import socket; print(socket.gethostname() + '\\n', end='')"
SLEEP = "import time; print('started\\n', end='', flush=True); time.sleep(1000)"


def left_of(name):
    """Namespaces, records and processes that bear a name."""
    namespaces = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return (
        [line for line in namespaces if line.startswith(f"{name}-")],
        list(RECORDS.glob(f"{name}*")),
        marked("XMESH_CLUSTER", name),
    )


def links():
    listing = subprocess.run(
        ["ip", "-o", "link"], capture_output=True, text=True, check=True
    ).stdout
    return sorted(line.split(":")[1] for line in listing.splitlines())


def result(outcome):
    lines = [line for line in outcome.output.splitlines() if line.startswith("RESULT ")]
    assert outcome.status == 0, outcome.output
    assert len(lines) == 1, outcome.output
    return json.loads(lines[0].removeprefix("RESULT "))


def python(name, *words):
    return [sys.executable, str(HERE / name), *words]


@pytest.fixture
def command(environment):
    """The command line in a process of its own, which a test may end."""
    started = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, "-m", "xmesh.cluster", *words],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_up_run_down(environment):
    before = links()
    with EmulatedCluster(3, RATE_BPS) as cluster:
        name = cluster.name
        assert len(left_of(name)[0]) == 4
        assert links() == before  # nothing of it is in the machine's own network
        assert name in EmulatedCluster.names()
        env = {**environment, "GIVEN": "a 'quoted' $word"}
        seen = result(cluster.run(python("ranks_hosts.py"), 2, env=env, timeout_s=60))
        uneven = result(cluster.run(python("ranks_hosts.py"), [1, 0, 2], env=env, timeout_s=60))
        expected = cluster.topology([1, 0, 2])
    assert left_of(name) == ([], [], [])
    assert links() == before
    assert [rank["host_name"] for rank in seen["ranks"]] == ["host0"] * 2 + ["host1"] * 2 + [
        "host2"
    ] * 2
    assert {rank["shares_memory_with"] for rank in seen["ranks"]} == {2}
    assert {rank["given"] for rank in seen["ranks"]} == {"a 'quoted' $word"}
    assert seen["topology"]["host_of_rank"] == [0, 0, 1, 1, 2, 2]
    assert uneven["topology"]["host_of_rank"] == list(expected.host_of_rank) == [0, 1, 1]
    cluster.down()  # a second time does nothing
    cluster.up()  # and it can be used again
    try:
        assert len(left_of(cluster.name)[0]) == 4
    finally:
        cluster.down()


def check_rates(cluster, ranks_per_host, expected, environment):
    """Measure lists of pairs that send at one time; ``expected`` has the limit of each, in NICs.

    No rate may be over its limit. Nor far below it, but that may be because others use the cores:
    the best of a few attempts counts.
    """
    words = python("ranks_rate.py", "8", json.dumps([pairs for pairs, _ in expected.values()]))
    best = dict.fromkeys(expected, 0.0)
    for _ in range(5):
        outcome = cluster.run(words, ranks_per_host, env=environment, timeout_s=100)
        for (what, (_, limit)), rate in zip(expected.items(), result(outcome), strict=True):
            fraction = rate * 1e6 / RATE_BPS / limit
            assert fraction < 1, (what, fraction)
            best[what] = max(best[what], fraction)
        if min(best.values()) > 0.85:
            return
    pytest.fail(f"fractions of the NICs' rates: {best}")


@pytest.mark.timeout(500)
def test_nics_have_the_set_rate(environment):
    expected = {
        "one": ([[0, 2]], 1),
        "back": ([[2, 0]], 1),
        # By two pairs of ranks: Open MPI has one connection for both directions of a pair, over
        # which these may take turns.
        "full duplex": ([[0, 2], [3, 1]], 2),
        "two into one": ([[0, 4], [2, 4]], 1),
        "one into two": ([[4, 0], [4, 2]], 1),
    }
    with EmulatedCluster(3, RATE_BPS) as cluster:
        check_rates(cluster, 2, expected, environment)


@pytest.mark.timeout(500)
def test_two_nics_per_host(environment):
    expected = {
        "first": ([[0, 2]], 1),
        "second": ([[1, 3]], 1),
        "across": ([[0, 3]], 1),
        "both": ([[0, 2], [1, 3]], 2),
        "both across": ([[0, 3], [1, 2]], 2),
        "both into one": ([[0, 2], [1, 2]], 1),
    }
    with EmulatedCluster(2, RATE_BPS, nics_per_host=2) as cluster:
        check_rates(cluster, 2, expected, environment)
        seen = result(cluster.run(python("ranks_hosts.py"), 2, env=environment, timeout_s=60))
        topology = cluster.topology(2)
    assert [rank["nic"] for rank in seen["ranks"]] == ["0", "1", "0", "1"]
    assert topology.nic_of_rank == (0, 1, 0, 1)
    assert seen["topology"]["host_of_rank"] == [0, 0, 1, 1]


def test_a_rank_that_fails_is_told_and_leaves_nothing(environment):
    code = "import sys; from mpi4py import MPI; sys.exit(3 if MPI.COMM_WORLD.rank == 1 else 0)"
    with EmulatedCluster(2, RATE_BPS) as cluster:
        name = cluster.name
        assert cluster.run([sys.executable, "-c", code], 1, env=environment).status != 0
        assert marked("XMESH_CLUSTER", name) == []
    assert left_of(name) == ([], [], [])


def test_ranks_that_do_not_end(environment):
    name = ""
    with pytest.raises(XmeshError, match="must end within 3 s") as caught:  # noqa: SIM117, PT012
        with EmulatedCluster(2, RATE_BPS) as cluster:
            name = cluster.name
            cluster.run([sys.executable, "-c", SLEEP], 1, env=environment, timeout_s=3)
    assert "started" in str(caught.value)  # what they had said
    assert left_of(name) == ([], [], [])


def test_an_error_while_it_is_built_leaves_nothing(monkeypatch):
    line = "qdisc add dev {} root no-such-thing\n".format
    monkeypatch.setattr(Network, "_limit", lambda self, interface: line(interface))
    with pytest.raises(XmeshError, match="able to make tbf queues") as caught:
        EmulatedCluster(2, RATE_BPS).up()
    assert "modprobe sch_tbf" in str(caught.value)
    assert left_of(f"xm{os.getpid()}") == ([], [], [])


def start_run(command):
    process = command(
        *("run", "--hosts", "2", "--rate", "200mbit", "--ranks-per-host", "2"),
        *("--", sys.executable, "-c", SLEEP),
    )
    seen: list[str] = []
    while seen.count("started\n") < 4:
        seen.append(process.stdout.readline())
        assert seen[-1], seen  # it has ended
    name = f"xm{process.pid}"
    assert len(left_of(name)[0]) == 3
    return process, name


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(command, number, status):
    process, name = start_run(command)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == status
    assert left_of(name) == ([], [], [])


def test_killed(command, capsys):
    process, name = start_run(command)
    with EmulatedCluster(1, RATE_BPS) as other:
        alive = other.name
        # Taken for a leftover only once its owner is dead; nor are those of the living.
        assert main(["down", "--all"]) == 0
        assert name not in capsys.readouterr().out
        assert len(left_of(name)[0]) == 3
        process.kill()
        process.communicate(timeout=30)
        assert len(left_of(name)[0]) == 3
        assert main(["down", "--all"]) == 0
        assert name in capsys.readouterr().out
        assert left_of(name) == ([], [], [])
        assert len(left_of(alive)[0]) == 2
    assert left_of(alive) == ([], [], [])


def test_the_next_one_removes_what_a_killed_one_left(command):
    process, name = start_run(command)
    process.kill()
    process.communicate(timeout=30)
    with EmulatedCluster(1, RATE_BPS):
        assert left_of(name) == ([], [], [])


def test_one_that_stays(command):
    process = command("up", "--hosts", "2", "--rate", "1gbit")
    name = process.communicate(timeout=30)[0].strip()
    try:
        assert process.returncode == 0
        assert len(left_of(name)[0]) == 3
        assert main(["down", "--all"]) == 0
        assert len(left_of(name)[0]) == 3
        run = command(
            *("run", "--name", name, "--ranks-per-host", "1", "--"),
            *(sys.executable, "-c", NAME),
        )
        assert sorted(run.communicate(timeout=60)[0].split()) == ["host0", "host1"]
        shown = command("list").communicate(timeout=30)[0]
        assert f"{name}: 2 hosts, 1 NICs per host, 1000 Mbit/s" in shown
    finally:
        assert main(["down", name]) == 0
    assert left_of(name) == ([], [], [])


def test_several_at_once(environment):
    with EmulatedCluster(2, RATE_BPS) as one, EmulatedCluster(2, RATE_BPS) as two:
        assert one.name != two.name
        for cluster in (one, two):
            assert len(left_of(cluster.name)[0]) >= 3
        one.down()
        words = [sys.executable, "-c", NAME]
        assert two.run(words, 1, env=environment).output.split() != []


def test_a_namespace_of_that_name_is_not_taken():
    foreign = f"xm{os.getpid()}-host0"
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    try:
        with EmulatedCluster(1, RATE_BPS) as cluster:
            assert cluster.name == f"xm{os.getpid()}.1"
        assert (
            foreign
            in subprocess.run(
                ["ip", "netns", "list"], capture_output=True, text=True, check=True
            ).stdout.split()
        )
    finally:
        subprocess.run(["ip", "netns", "delete", foreign], check=True)


def test_memory_is_not_shared_between_hosts(environment):
    """A file in /dev/shm is one host's, and gone with the run."""
    name = f"xmesh-test-{os.getpid()}"
    code = f"""
import os
from mpi4py import MPI
open('/dev/shm/{name}-' + os.uname().nodename, 'w').close()
MPI.COMM_WORLD.Barrier()
print(*(word + chr(10) for word in os.listdir('/dev/shm') if word.startswith('{name}')), end='')
"""
    with EmulatedCluster(2, RATE_BPS) as cluster:
        outcome = cluster.run([sys.executable, "-c", code], 1, env=environment)
    seen = [line for line in outcome.output.splitlines() if line.startswith(name)]
    assert sorted(seen) == [f"{name}-host{host}" for host in (0, 1)]
    assert not list(Path("/dev/shm").glob(f"{name}*"))
