"""xmesh moves sharded N-d arrays between groups of MPI ranks.

A rank grid is a DeviceMesh, a ShardingSpec says how an array is cut over it, and a Layout is both
with a shape. ``plan`` works out, without MPI, who sends what to whom; a Resharder runs the plan.
"""

from __future__ import annotations

import atexit
import importlib
from typing import TYPE_CHECKING, Any

from xmesh import errors
from xmesh.at_exit import drain_world

if TYPE_CHECKING:
    from xmesh.box import Box
    from xmesh.layout import Layout
    from xmesh.mesh import DeviceMesh
    from xmesh.one_call import reshard
    from xmesh.planner import CostModel, Plan, plan
    from xmesh.request import Request
    from xmesh.resharder import Resharder
    from xmesh.spec import ShardingSpec
    from xmesh.topology import Topology
    from xmesh.trace import Trace
    from xmesh.world import World

__version__ = "0.1.0"

atexit.register(drain_world)

__all__ = [
    "Box",
    "CostModel",
    "DeviceMesh",
    "Layout",
    "Plan",
    "Request",
    "Resharder",
    "ShardingSpec",
    "Topology",
    "Trace",
    "World",
    "errors",
    "plan",
    "reshard",
]

#: Where each name lives. All are loaded at first use: an import then costs nothing for what is not
#: needed, and planning on a laptop needs no MPI.
_HOME = {
    "Box": "xmesh.box",
    "CostModel": "xmesh.planner",
    "DeviceMesh": "xmesh.mesh",
    "Layout": "xmesh.layout",
    "Plan": "xmesh.planner",
    "Request": "xmesh.resharder",
    "Resharder": "xmesh.resharder",
    "ShardingSpec": "xmesh.spec",
    "Topology": "xmesh.topology",
    "Trace": "xmesh.trace",
    "World": "xmesh.world",
    "plan": "xmesh.planner",
    "reshard": "xmesh.one_call",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
