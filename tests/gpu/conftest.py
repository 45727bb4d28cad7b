"""Tests that a machine with a GPU runs: tests/gpu/run.py starts them, there or on the double.

They are in no other run of pytest: which CuPy is imported holds for a whole process.
"""

from __future__ import annotations

import os

import mpi_rank

if os.environ.get("XMESH_TEST_GPU") not in ("1", "double"):
    collect_ignore_glob = ["*"]
elif mpi_rank.RUN_DIR not in os.environ:
    collect_ignore_glob = ["ranks/*"]
