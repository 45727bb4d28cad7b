"""Ranks that collect different tests."""

from __future__ import annotations

import pytest
from mpi4py import MPI


@pytest.mark.parametrize("number", range(1 + MPI.COMM_WORLD.rank))
def test_numbered(number):
    assert number >= 0
