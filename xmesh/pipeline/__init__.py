"""Pipelines over stage meshes: schedules as data, checked and simulated, and run on real ranks.

All but ``Driver`` works without MPI. ``check``, ``lower`` and ``simulate`` stand in modules of
their names.
"""

from typing import TYPE_CHECKING, Any

from xmesh.pipeline.action import Action
from xmesh.pipeline.callbacks import Backward, BackwardInput, Callbacks, Forward
from xmesh.pipeline.edges import Edge, chain
from xmesh.pipeline.pipe import Pipeline, Tied
from xmesh.pipeline.schedule import PipelineSchedule
from xmesh.pipeline.schedules import SCHEDULES, schedule

if TYPE_CHECKING:
    from xmesh.pipeline.driver import Driver

__all__ = [
    "SCHEDULES",
    "Action",
    "Backward",
    "BackwardInput",
    "Callbacks",
    "Driver",
    "Edge",
    "Forward",
    "Pipeline",
    "PipelineSchedule",
    "Tied",
    "chain",
    "schedule",
]


def __getattr__(name: str) -> Any:
    """``Driver`` at its first use: it needs mpi4py."""
    if name == "Driver":
        from xmesh.pipeline.driver import Driver

        return Driver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
