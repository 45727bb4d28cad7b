"""Pipelines over stage meshes: schedules as data, checked and simulated before they run.

Nothing here needs MPI. ``check``, ``lower`` and ``simulate`` stand in modules of their names.
"""

from xmesh.pipeline.action import Action
from xmesh.pipeline.edges import Edge, chain
from xmesh.pipeline.schedule import PipelineSchedule
from xmesh.pipeline.schedules import SCHEDULES, schedule

__all__ = ["SCHEDULES", "Action", "Edge", "PipelineSchedule", "chain", "schedule"]
