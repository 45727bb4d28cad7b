"""The loopback transport, with arrays on the host and on a device."""

from __future__ import annotations

import conformance
import pytest

from xmesh.planner import STRATEGIES

pytestmark = pytest.mark.double_only
NAMES = ("host", "device")


@pytest.fixture(params=NAMES)
def world(request):
    conformance.engine.counters.clear()
    yield conformance.Loopback(6, request.param == "device")
    assert conformance.engine.counters["deviceSynchronize"] == 0
    conformance.engine.check(0)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_random_pairs(world, strategy):
    conformance.random_pairs(world, strategy, count=25)


@pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.__name__)
def test_case(world, case):
    case(world)


@pytest.mark.parametrize("case", conformance.ON_DEVICES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("world", ["device"], indirect=True)
def test_device_case(world, case):
    case(world)
