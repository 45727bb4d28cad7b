"""What of the emulated cluster needs no root: its commands, arguments, errors and owners."""

from __future__ import annotations

import subprocess
import sys

import pytest

from xmesh.cluster import EmulatedCluster, LocalSlurm, emulated, launcher
from xmesh.cluster.__main__ import main
from xmesh.cluster.network import Network
from xmesh.cluster.owner import Owner
from xmesh.cluster.processes import split_at_dashes
from xmesh.errors import XmeshError
from xmesh.mpiexec import Launcher

NETWORK = Network("xm7", 2, 200_000_000, 1)
TWO_NICS = Network("xm7", 2, 200_000_000, 2)


def text(network: Network) -> str:
    return "\n".join(" ".join(step.command) + "\n" + step.text for step in network.steps())


def test_every_end_of_every_link_is_limited():
    lines = text(TWO_NICS).splitlines()
    limited = [line.split()[3] for line in lines if line.startswith("qdisc add")]
    assert sorted(limited) == sorted(
        ["eth0", "eth1", "eth0", "eth1", "h0n0", "h0n1", "h1n0", "h1n1"]
    )
    rates = {line.partition("root ")[2] for line in lines if line.startswith("qdisc add")}
    assert rates == {"tbf rate 200000000bit burst 131072b latency 25ms"}


def test_everything_is_in_namespaces_of_its_name():
    assert NETWORK.namespaces == ("xm7-host0", "xm7-host1", "xm7-switch")
    for step in TWO_NICS.steps():
        if step.what == "network namespaces":
            assert all(line.startswith("netns add xm7-") for line in step.text.splitlines())
        else:
            assert any(word.startswith("xm7-") for word in step.command)


def test_one_nic_needs_no_routes():
    assert "rule add" not in text(NETWORK)
    assert "rule add from 10.77.1.2 lookup 101" in text(TWO_NICS)


@pytest.mark.parametrize(
    ("open_mpi", "words"),
    [
        (False, "-launcher ssh -launcher-exec AGENT -iface br0 -hosts host0:2,host1:1 -n 3"),
        (
            True,
            "--mca plm_rsh_agent AGENT --host host0:2,host1:1 --oversubscribe --bind-to none "
            "--allow-run-as-root -n 3",
        ),
    ],
)
def test_commands(open_mpi, words):
    mpi = Launcher("mpiexec", open_mpi)
    start = ["ip", "netns", "exec", "xm7-switch", "mpiexec"]
    middle = words.replace("AGENT", str(launcher.AGENT)).split()
    assert launcher.command(NETWORK, mpi, ["prog", "a b"], [2, 1]) == [
        *start,
        *middle,
        "prog",
        "a b",
    ]
    bound = launcher.command(TWO_NICS, mpi, ["prog"], [2, 1])
    assert bound[-3].endswith("nic.sh")
    assert bound[-2:] == ["2", "prog"]


def test_hosts_without_ranks_are_left_out():
    words = launcher.command(NETWORK, Launcher("mpiexec", False), ["prog"], [0, 3])
    assert "host1:3" in words


@pytest.mark.parametrize("wrong", [0, -1, [1], [1, 2, 3], [0, 0], [2, -1]])
def test_ranks_per_host_that_do_not_fit(wrong):
    with pytest.raises(XmeshError, match="ranks_per_host") as caught:
        launcher.counts_per_host(NETWORK, wrong)
    assert "remedy" in str(caught.value)


@pytest.mark.parametrize("wrong", [(0, 1e9, 1), (300, 1e9, 1), (2, 10, 1), (2, 1e9, 0)])
def test_clusters_that_cannot_be(wrong):
    with pytest.raises(XmeshError, match="an emulated cluster has 1 to 250 hosts"):
        EmulatedCluster(*wrong)


def test_without_root_or_tools_there_is_a_remedy(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "sudo" in EmulatedCluster.missing()
    with pytest.raises(XmeshError, match="needs root") as caught:
        EmulatedCluster(2, 1e9).up()
    assert "remedy:  call it with sudo" in str(caught.value)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("xmesh.cluster.processes.find_tool", lambda name: None)
    assert "apt-get install iproute2" in EmulatedCluster.missing()
    assert "apt-get install slurm-wlm munge" in LocalSlurm.missing()
    with pytest.raises(XmeshError, match="apt-get install"):
        LocalSlurm().up()


def test_a_kernel_that_lacks_something_is_named(monkeypatch):
    def fail(*args):
        raise subprocess.CalledProcessError(1, "tc", stderr="Unknown qdisc")

    monkeypatch.setattr("xmesh.cluster.processes.call", fail)
    step = next(step for step in NETWORK.steps() if step.what == "tbf queues")
    with pytest.raises(XmeshError, match="Unknown qdisc") as caught:
        emulated._do(step)
    assert "modprobe sch_tbf" in str(caught.value)


def test_a_cluster_that_is_down_says_so():
    with pytest.raises(XmeshError, match="must be up"):
        EmulatedCluster(2, 1e9).run(["true"], 1)
    with pytest.raises(XmeshError, match="must be up"):
        LocalSlurm().run(["srun", "true"])
    EmulatedCluster(2, 1e9).down()
    LocalSlurm().down()


def test_topology_is_that_of_the_ranks():
    cluster = EmulatedCluster(2, 200e6, 2)
    cluster._network = TWO_NICS
    topology = cluster.topology([4, 1])
    assert topology.host_of_rank == (0, 0, 0, 0, 1)
    assert topology.nic_of_rank == (0, 0, 1, 1, 0)
    assert topology.host_names == ("host0", "host1")
    assert topology.nic_bandwidth_Bps == (25e6,) * 3


def test_owners_die():
    own = Owner.of()
    assert own.alive()
    assert Owner.from_json(own.to_json()) == own
    assert not Owner(own.pid, "1").alive()  # the same id, another process
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(child.pid)
    assert owner.alive()
    child.kill()
    child.communicate()
    assert not owner.alive()
    assert Owner.from_json(None) is None


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["run", "--ranks-per-host", "2"], "after --"),
        (["up", "--hosts", "2", "--rate", "fast"], "200mbit"),
        (["up", "--hosts", "2"], "--rate"),
    ],
)
def test_command_lines_that_cannot_be(capsys, words, phrase):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert phrase in capsys.readouterr().err


def test_command_line_errors_are_texts(capsys):
    assert main(["run", "--ranks-per-host", "two", "--", "true"]) == 2
    assert "--ranks-per-host is a number" in capsys.readouterr().err
    assert main(["run", "--ranks-per-host", "2", "--name", "nobody", "--", "true"]) == 2
    assert "known by its name" in capsys.readouterr().err
    assert main(["run", "--hosts", "2", "--ranks-per-host", "2", "--", "true"]) == 2
    assert "needs --hosts and --rate" in capsys.readouterr().err


def test_words_after_dashes():
    assert split_at_dashes(["run", "--", "a", "--", "b"]) == (["run"], ["a", "--", "b"])
    assert split_at_dashes(["list"]) == (["list"], [])
