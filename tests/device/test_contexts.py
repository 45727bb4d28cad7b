"""No thread makes a GPU current that is not its rank's: CUDA keeps 500 MiB on each that was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.double_only
ROOT = Path(__file__).resolve().parents[2]
CODE = """
import threading, time
import cupy, numpy as np, xmesh
from cupy import _devices
from xmesh.device.gpu import Gpu
from xmesh.nccl.launcher import Launcher, in_thread, wait_a_while
from xmesh.pipeline.background import Background
from xmesh.progress import Progress

cupy.cuda.Device(1).use()
layouts = [xmesh.Layout(xmesh.DeviceMesh([0, 1]), spec, (8, 6)) for spec in ("S0 R", "R S0")]
with xmesh.Resharder(xmesh.plan(*layouts, "float32"), like=cupy) as reshard:
    reshard({0: cupy.ones((4, 6), "f4"), 1: cupy.ones((4, 6), "f4")})

gpu, launcher = Gpu(), Launcher()

def work():
    assert cupy.cuda.runtime.getDevice() == 1
    memory = gpu.device_bytes(100, *launcher.lanes(gpu))
    gpu.order(gpu.outgoing, gpu.incoming)
    assert memory.nbytes == 100

jobs = [launcher.submit(gpu, work), in_thread(gpu, work)]
wait_a_while(jobs, 10)
assert all(job.over and job.error is None for job in jobs), [job.error for job in jobs]

class Item:
    over = False
    def step(self):
        if not self.over:
            work()
            self.over = True
        return False

progress, item = Progress(), Item()
progress.add(item)
background = Background(progress, True, gpu.device)
with background:
    end = time.monotonic() + 10
    while not item.over and time.monotonic() < end:
        time.sleep(1e-3)
background.close()
assert item.over
assert _devices.contexts == {1}, _devices.contexts
"""


def test_only_this_ranks_gpu_is_ever_current():
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "double")])
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"PYTHONPATH": path, "DOUBLE_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
