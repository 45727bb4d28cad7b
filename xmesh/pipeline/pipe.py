"""Pipeline: stages on meshes, edges between them and a schedule; checked, and pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xmesh.errors import ScheduleError, explain
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.pipeline.check import check_order, check_program
from xmesh.pipeline.edges import Edge
from xmesh.pipeline.lower import lower
from xmesh.pipeline.schedule import PipelineSchedule
from xmesh.pipeline.schedules import schedule as schedule_of
from xmesh.pipeline.simulate import PipelineSimulation
from xmesh.pipeline.wiring import Wiring
from xmesh.planner import CostModel, Plan, plan
from xmesh.planner.simulate import simulate
from xmesh.topology import Topology


@dataclass(frozen=True)
class Tied:
    """Weights that several stages hold copies of: their gradients are summed once per step.

    Attributes:
        name: of the gradient, the same in all of these stages.
        stages: which have it; their meshes have one shape, and ranks pair by their places.
    """

    name: str
    stages: tuple[int, ...]


class Pipeline:
    """A computation cut into stages, and how micro-batches pass through them.

    Args:
        stages: the mesh of each stage. Stages of one group, which interleaved schedules have, share
            a mesh; or give the mesh of each group alone. Other meshes have no rank in common.
        edges: what goes from stage to stage, each with specs and a shape.
        schedule: a name (see ``xmesh.pipeline.schedule``), the text of a schedule, or a
            PipelineSchedule.
        num_microbatches: of each step; left out where ``schedule`` is no name, and has its own.
        weight_delay: see ``xmesh.pipeline.schedule``.
        chunks: likewise.
        tied: weights of which several stages have copies.
        strategy: how reshardings are planned, see ``xmesh.plan``.
        scheduler: likewise.

    Raises:
        ScheduleError: parts that do not go together, or a schedule that cannot run.
        LayoutError, SpecError: an edge that does not fit its meshes.
    """

    def __init__(
        self,
        stages: Sequence[DeviceMesh],
        edges: Sequence[Edge],
        schedule: str | PipelineSchedule = "1f1b",
        num_microbatches: int | None = None,
        *,
        weight_delay: bool = False,
        chunks: int | None = None,
        tied: Sequence[Tied] = (),
        strategy: str = "auto",
        scheduler: str = "auto",
    ) -> None:
        self.edges = tuple(edges)
        self.tied = tuple(tied)
        self._strategy, self._scheduler = strategy, scheduler
        groups = list(dict.fromkeys(stages))
        if isinstance(schedule, PipelineSchedule):
            self.schedule = schedule
        elif schedule.split()[:1] != [schedule]:  # more than one word
            self.schedule = PipelineSchedule.parse(schedule)
        else:
            if num_microbatches is None:
                raise _refuse(
                    "a schedule by name needs the number of micro-batches",
                    f"{schedule!r} without one",
                    f"pass num_microbatches={2 * len(groups)}, for example",
                )
            if chunks is None and len(stages) > len(groups):
                chunks = len(stages) // len(groups)
            self.schedule = schedule_of(
                schedule,
                len(groups),
                num_microbatches,
                weight_delay=weight_delay,
                chunks=chunks,
            )
        self.num_microbatches = self.schedule.num_microbatches
        if num_microbatches not in (None, self.num_microbatches):
            raise _refuse(
                "a schedule has the number of micro-batches that the pipeline has",
                f"num_microbatches={num_microbatches}, the schedule has {self.num_microbatches}",
                "leave num_microbatches out, or make the schedule for as many",
            )
        self.stages = self._meshes(tuple(stages))
        self._check_meshes()
        check_order(self.schedule)
        self.wiring = Wiring(self.schedule, self.edges)
        self.program = lower(self.schedule, self.edges)
        check_program(self.schedule, self.program, self.wiring)
        self.layouts = {edge.name: self._layouts(edge) for edge in self.edges}
        self._check_tied()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of all stages, ascending."""
        return tuple(sorted({rank for mesh in self.stages for rank in mesh.ranks}))

    def group_of_rank(self, rank: int) -> int | None:
        """The stage group that a rank is in; None for a rank in none."""
        for stage, mesh in enumerate(self.stages):
            if rank in mesh:
                return self.schedule.group_of_stage(stage)
        return None

    def plans(
        self, topology: Topology, cost: CostModel | None = None
    ) -> dict[tuple[str, bool], Plan]:
        """(edge, whether forward) -> the plan of its activations, or of their gradients."""
        found = {}
        for edge in self.edges:
            src, dst = self.layouts[edge.name]
            back = edge.differentiable and not self.schedule.forward_only
            for forward in (True, False) if back else (True,):
                found[edge.name, forward] = plan(
                    src if forward else dst,
                    dst if forward else src,
                    edge.dtype,
                    topology,
                    self._strategy,
                    self._scheduler,
                    cost=cost,
                    name=edge.name if forward else f"gradient of {edge.name}",
                )
        return found

    def simulate(
        self,
        topology: Topology | None = None,
        cost: CostModel | None = None,
        **times: Any,
    ) -> PipelineSimulation:
        """Run it on an ideal machine.

        Args:
            topology: where the ranks are: transfers then take what their plans take alone there.
            cost: latencies and bandwidths to go with it.
            times: see ``xmesh.pipeline.simulate.simulate``.

        Raises:
            OptionError: times of no meaning.
        """
        if topology is not None and "transfer_s" not in times:
            taken = {
                key: simulate(made, sharing="fair").makespan_s
                for key, made in self.plans(topology, cost).items()
            }
            times["transfer_s"] = {
                edge.name: (taken[edge.name, True], taken.get((edge.name, False), 0.0))
                for edge in self.edges
            }
        return self.schedule.simulate(self.edges, **times)

    def __str__(self) -> str:
        lines = [str(self.schedule)]
        lines += [f"stage {i}: mesh {mesh}" for i, mesh in enumerate(self.stages)]
        for edge in self.edges:
            src, dst = self.layouts[edge.name]
            lines.append(f"edge {edge}, {src} -> {dst}, shape {edge.shape}, {edge.dtype}")
        return "\n".join(lines)

    # --- Checks -----------------------------------------------------------------------------------

    def _meshes(self, given: tuple[DeviceMesh, ...]) -> tuple[DeviceMesh, ...]:
        """The mesh of each stage, from one for each stage or for each group."""
        schedule = self.schedule
        if len(given) == schedule.num_stages:
            return given
        if len(given) == schedule.num_groups:
            return tuple(given[schedule.group_of_stage(s)] for s in range(schedule.num_stages))
        raise _refuse(
            "there must be a mesh for each stage, or for each stage group",
            f"{len(given)} meshes, {schedule.num_stages} stages in {schedule.num_groups} groups",
            "give as many meshes as the schedule has stages",
        )

    def _check_meshes(self) -> None:
        home: dict[int, tuple[int, DeviceMesh]] = {}
        for stage, mesh in enumerate(self.stages):
            group = self.schedule.group_of_stage(stage)
            for rank in mesh.ranks:
                other, there = home.setdefault(rank, (group, mesh))
                if other != group or there != mesh:
                    raise _refuse(
                        "stages of one group share a mesh, and other meshes no rank",
                        f"rank {rank} is in {there} of group {other} and in {mesh} of stage "
                        f"{stage}, group {group}",
                        "give each stage group ranks of its own",
                    )

    def _layouts(self, edge: Edge) -> tuple[Layout, Layout]:
        if edge.shape is None or edge.src is None or edge.dst is None:
            raise _refuse(
                "an edge needs a shape and a spec for both of its ends",
                f"edge {edge}: shape {edge.shape}, src {edge.src}, dst {edge.dst}",
                'for example Edge("hidden", 0, 1, src="S0RR", dst="S0RR", shape=(8, 64, 512))',
            )
        return (
            Layout(self.stages[edge.src_stage], edge.src, edge.shape),
            Layout(self.stages[edge.dst_stage], edge.dst, edge.shape),
        )

    def _check_tied(self) -> None:
        for tied in self.tied:
            known = [stage for stage in tied.stages if 0 <= stage < len(self.stages)]
            shapes = {self.stages[stage].shape for stage in known}
            if len(known) != len(tied.stages) or len(set(known)) < 2 or len(shapes) > 1:
                raise _refuse(
                    "tied weights are on two stages or more, whose meshes have one shape",
                    f"{tied.name!r} on stages {tied.stages}, of {len(self.stages)}; shapes "
                    + ", ".join(map(str, sorted(shapes))),
                    'for example Tied("embedding", stages=(0, 3))',
                )


def _refuse(rule: str, values: str, remedy: str) -> ScheduleError:
    return ScheduleError(explain(rule, values=values, remedy=remedy))
