"""A test that hangs: cut by the limit of one test, long before that of the run."""

from __future__ import annotations

import pytest


def wait_inside_the_test(comm):
    comm.recv(source=comm.rank, tag=1)


@pytest.mark.timeout(4)
def test_hangs(comm):
    wait_inside_the_test(comm)
