"""The scripts in launch/, on the hosts of an emulated cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xmesh.cluster import EmulatedCluster, launcher
from xmesh.mpiexec import Launcher

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
CHECK = str(LAUNCH / "check-topology")


@pytest.fixture
def env(environment):
    return {**environment, "PYTHON": sys.executable}


@pytest.mark.parametrize(
    ("ranks", "asked", "status", "phrase"),
    [
        ([2, 1], ["--hosts", "2", "--ranks-per-host", "2,1"], 0, "3 ranks on 2 hosts"),
        ([2, 1], ["--ranks-per-host", "2"], 1, "the hosts must have 2 ranks each"),
        ([2, 0], ["--hosts", "2"], 1, "there must be 2 hosts"),
    ],
)
def test_check_topology(env, ranks, asked, status, phrase):
    with EmulatedCluster(2, 1e9) as cluster:
        outcome = cluster.run([CHECK, *asked], ranks, env=env, timeout_s=60)
    assert phrase in outcome.output
    assert (outcome.status == 0) == (status == 0), outcome.output


def test_mpirun(env, tmp_path):
    """The script for this environment's MPI; the agent stands in for ssh."""
    mpi = Launcher.find()
    if mpi.open_mpi:
        script, hosts = "mpirun-openmpi.sh", "host0 slots=2\nhost1 slots=2\n"
        options = f"--mca plm_rsh_agent {launcher.AGENT}"
    else:
        script, hosts = "mpirun-mpich.sh", "host0:2\nhost1:2\n"
        options = f"-launcher ssh -launcher-exec {launcher.AGENT} -iface br0"
    (tmp_path / "hosts").write_text(hosts)
    command = [str(LAUNCH / script), str(tmp_path / "hosts"), "4"]
    command += [CHECK, "--hosts", "2", "--ranks-per-host", "2"]
    with EmulatedCluster(2, 1e9) as cluster:
        environment = {
            **os.environ,
            **env,
            "XMESH_CLUSTER": cluster.name,
            "NETWORK_DEVICE": "eth0",
            "MPIEXEC": mpi.path,
            "MPIEXEC_OPTIONS": options,
        }
        answer = subprocess.run(
            ["ip", "netns", "exec", cluster.network.switch, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "4 ranks on 2 hosts" in answer.stdout
    usage = subprocess.run([str(LAUNCH / script)], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert "HOSTFILE RANKS PROGRAM" in usage.stderr


def test_emulate_from_the_shell(env):
    answer = subprocess.run(
        [
            *(str(LAUNCH / "emulate"), "run", "--hosts", "2", "--rate", "1gbit"),
            *("--ranks-per-host", "1", "--", CHECK, "--hosts", "2"),
        ],
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "host0: 1 ranks, 0" in answer.stdout
