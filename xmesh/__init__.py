"""xmesh moves sharded N-d arrays between groups of MPI ranks.

A rank grid is a DeviceMesh, a ShardingSpec says how an array is cut over it, and a Layout is both
with a shape. ``plan`` works out, without MPI, who sends what to whom; a Resharder runs the plan.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xmesh import errors
from xmesh.box import Box
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import CostModel, Plan, plan
from xmesh.spec import ShardingSpec
from xmesh.topology import Topology

if TYPE_CHECKING:
    from xmesh.one_call import reshard
    from xmesh.resharder import Request, Resharder
    from xmesh.world import World

__version__ = "0.1.0"

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
    "World",
    "errors",
    "plan",
    "reshard",
]

#: What is loaded at first use: planning on a laptop needs none of it.
_LAZY = {
    "reshard": "xmesh.one_call",
    "Request": "xmesh.resharder",
    "Resharder": "xmesh.resharder",
    "World": "xmesh.world",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
