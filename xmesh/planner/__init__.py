"""Planning: from two layouts to who sends what to whom, and when. Pure; knows no MPI."""

from xmesh.planner.cost import CostModel
from xmesh.planner.make_plan import plan
from xmesh.planner.plans import Plan
from xmesh.planner.strategy import STRATEGIES
from xmesh.planner.transfer import Op, Transfer
from xmesh.planner.unit_task import UnitTask

__all__ = ["STRATEGIES", "CostModel", "Op", "Plan", "Transfer", "UnitTask", "plan"]
