"""What a rank does between two looks: chosen from ranks and cores, or set."""

from __future__ import annotations

import pytest

from xmesh.errors import OptionError
from xmesh.wait_policy import choose_pause, have_own_cores, own_cores, sleep, spin, wanted_policy


def cores(*groups: set[int]) -> list[frozenset[int]]:
    return [frozenset(group) for group in groups]


@pytest.mark.parametrize(
    ("found", "environ", "own"),
    [
        (cores({0, 1}, {0, 1}), {}, True),
        (cores({0, 1}, {0, 1}, {0, 1}), {}, False),
        (cores({0}, {1}, {2}), {}, True),  # each bound to its own
        (cores({0}, {0}), {}, False),  # bound to the same one
        (cores({0, 1}), {"MPI_LOCALNRANKS": "3"}, False),  # others are not in the plan
        (cores({0, 1}), {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True),
        (cores({0, 1}), {"MPI_LOCALNRANKS": "many"}, True),
    ],
)
def test_whether_each_rank_has_a_core_of_its_own(found, environ, own):
    assert have_own_cores(found, environ) is own


def test_the_policy_follows_the_cores_unless_it_is_set():
    assert choose_pause("auto", dedicated=True) is spin
    assert choose_pause("auto", dedicated=False) is sleep
    assert choose_pause("sleep", dedicated=True) is sleep
    assert choose_pause("spin", dedicated=False) is spin


def test_the_caller_comes_before_the_environment():
    assert wanted_policy("auto", {}) == "auto"
    assert wanted_policy("auto", {"XMESH_WAIT": "sleep"}) == "sleep"
    assert wanted_policy("spin", {"XMESH_WAIT": "sleep"}) == "spin"


def test_a_policy_that_is_none_is_refused_by_name():
    with pytest.raises(
        OptionError, match=r"wait must be one of auto, spin, sleep\s+values:  'busy'"
    ):
        wanted_policy("busy", {})
    with pytest.raises(OptionError, match="the variable XMESH_WAIT must be one of"):
        wanted_policy("auto", {"XMESH_WAIT": "busy"})


def test_this_process_may_run_somewhere():
    assert own_cores()


def test_pauses_return(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("xmesh.wait_policy.time.sleep", slept.append)
    for idle in (1, 2, 10_000):
        sleep(idle)
    assert slept == [20e-6, 40e-6, 500e-6]
    spin(1)
    spin(20_000)
    assert len(slept) == 3
