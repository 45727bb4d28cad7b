"""launch/mpirun-gpu.sh: each rank's own GPU comes first, under whichever MPI is there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from xmesh.errors import XmeshError
from xmesh.mpiexec import Launcher

SCRIPT = Path(__file__).resolve().parent.parent / "launch" / "mpirun-gpu.sh"


def launch(tmp_path, visible):
    try:
        launcher = Launcher.find()
    except XmeshError as error:
        pytest.skip(str(error))
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n" if launcher.open_mpi else "localhost:2\n")
    options = "--oversubscribe --bind-to none" if launcher.open_mpi else ""
    return subprocess.run(
        [str(SCRIPT), str(hosts), "2", "sh", "-c", "echo got $CUDA_VISIBLE_DEVICES"],
        env={
            **{k: v for k, v in os.environ.items() if k != "SLURM_LOCALID"},
            "MPIEXEC": launcher.path,
            "MPIEXEC_OPTIONS": options,
            "CUDA_VISIBLE_DEVICES": visible,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_rank_has_a_gpu_of_its_own(tmp_path):
    done = launch(tmp_path, "4,5")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "got 4,5", "got 5,4"]


def test_more_ranks_than_gpus_are_refused(tmp_path):
    done = launch(tmp_path, "4")
    assert done.returncode != 0
    assert "local rank 1 has no GPU" in done.stderr + done.stdout
