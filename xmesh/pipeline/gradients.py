"""Weight gradients: added up in place over micro-batches, scaled once, tied copies summed once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from xmesh.clocks import wait_quietly
from xmesh.errors import ArrayError, explain
from xmesh.mesh import DeviceMesh
from xmesh.pipeline.pipe import Pipeline, Tied

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.world import World


def as_array(value: Any) -> Any:
    """What a callback returned, of whatever library: in device memory as it is, or as NumPy's."""
    return value if hasattr(value, "__cuda_array_interface__") else np.asarray(value)


class Gradients:
    """The gradients of the weights of some stages on one rank.

    One array for each weight, whatever the number of micro-batches; the arrays stay the same over
    all steps.

    Args:
        stages: of this rank.
    """

    def __init__(self, stages: Iterable[int]) -> None:
        self.of_stage: dict[int, dict[str, Any]] = {stage: {} for stage in stages}
        self._stale: dict[int, set[str]] = {stage: set() for stage in self.of_stage}

    def begin(self) -> None:
        """A step begins: what is there is of the last one."""
        self._stale = {stage: set(found) for stage, found in self.of_stage.items()}

    def add(self, stage: int, weights: Mapping[str, Any]) -> None:
        """Add the gradients of one micro-batch.

        Raises:
            ArrayError: another shape or dtype than before.
        """
        sums, stale = self.of_stage[stage], self._stale[stage]
        for name, value in weights.items():
            gradient = as_array(value)
            if name not in sums:
                sums[name] = gradient.copy()
                continue
            if sums[name].shape != gradient.shape or sums[name].dtype != gradient.dtype:
                raise ArrayError(
                    explain(
                        "the gradient of a weight has the same shape and dtype at all times",
                        values=f"{gradient.shape} {gradient.dtype}, before "
                        f"{sums[name].shape} {sums[name].dtype}",
                        context=f"weight {name!r} of stage {stage}",
                        remedy="make a new Driver for weights of another shape",
                    )
                )
            if name in stale:
                sums[name][...] = gradient
                stale.remove(name)
            else:
                sums[name] += gradient

    def finish(self, stage: int, scale: float) -> None:
        """All micro-batches are in: scale, once; what had no gradient in this step has zeros."""
        for name, total in self.of_stage[stage].items():
            if name in self._stale[stage]:
                total[...] = 0
            elif scale != 1:
                total *= scale


class TiedSum:
    """Sums the gradients of one tied weight over its stages.

    Made by all ranks of these stages together.
    """

    def __init__(self, pipe: Pipeline, tied: Tied, world: World) -> None:
        self._tied = tied
        rank = world.comm.rank
        self._mine = [stage for stage in tied.stages if rank in pipe.stages[stage]]
        meshes = list(dict.fromkeys(pipe.stages[stage] for stage in tied.stages))
        self._comm: MPI.Intracomm | None = None
        if self._mine and len(meshes) > 1:
            # Ranks at one place of their meshes are a line along the first axis of this one.
            together = DeviceMesh([list(mesh.ranks) for mesh in meshes])
            self._comm = world.communicator(together, axis=0)

    def __call__(self, gradients: Gradients) -> None:
        """Sum it; the ranks that have it call this once per step.

        Raises:
            ArrayError: a stage has no gradient of that name.
        """
        found = []
        for stage in self._mine:
            if self._tied.name not in gradients.of_stage[stage]:
                raise ArrayError(
                    explain(
                        "each stage of a tied weight must give its gradient",
                        values=f"no {self._tied.name!r} among those of stage {stage}: "
                        f"{', '.join(sorted(gradients.of_stage[stage])) or 'none'}",
                        remedy="return it from backward, or take the stage out of Tied",
                    )
                )
            found.append(gradients.of_stage[stage][self._tied.name])
        if not found:
            return
        total = found[0]
        for other in found[1:]:
            total += other
        if self._comm is not None:
            from mpi4py import MPI

            wait_quietly(self._comm.Iallreduce(MPI.IN_PLACE, total), longest_sleep_s=50e-6)
        for other in found[1:]:
            other[...] = total
