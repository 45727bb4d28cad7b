"""Weight gradients: added up in place over micro-batches, scaled once, tied copies summed once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from xmesh.device.array import DeviceArray
from xmesh.device.gpu import load_cupy, wait_for_stream
from xmesh.errors import ArrayError, TransferTimeout, explain
from xmesh.interop import as_memory
from xmesh.mesh import DeviceMesh
from xmesh.pipeline.pipe import Pipeline, Tied

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.world import World


def as_array(value: Any) -> Any:
    """What a callback returned, of whatever library: in device memory as it is, or as NumPy's.

    Raises:
        ArrayError: it is neither an array (see ``xmesh.interop.as_memory``) nor made of numbers.
    """
    if isinstance(value, (bool, int, float, complex, list, tuple)):
        return np.asarray(value)
    memory = as_memory(value, "what a callback returns")
    return value if isinstance(memory, DeviceArray) else memory


def _summable(value: Any) -> Any:
    """A gradient that can be added up in place: NumPy's, or CuPy's over the same GPU memory."""
    array = as_array(value)
    if isinstance(array, np.ndarray):
        return array
    cupy = load_cupy()
    return array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array)


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
            gradient = _summable(value)
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

    Args:
        pipe: whose weight it is.
        tied: which one.
        world: the ranks.
        timeout_s: seconds to wait for the other stages.
    """

    def __init__(self, pipe: Pipeline, tied: Tied, world: World, timeout_s: float) -> None:
        self._tied, self._timeout_s = tied, timeout_s
        rank = world.comm.rank
        self._mine = [stage for stage in tied.stages if rank in pipe.stages[stage]]
        meshes = list(dict.fromkeys(pipe.stages[stage] for stage in tied.stages))
        self._comm: MPI.Intracomm | None = None
        #: Where others stayed away: MPI may still write to what these are about.
        self._abandoned: list[MPI.Request] = []
        self._compared = False
        if self._mine and len(meshes) > 1:
            # Ranks at one place of their meshes are a line along the first axis of this one.
            together = DeviceMesh([list(mesh.ranks) for mesh in meshes])
            self._comm = world.communicator(together, axis=0)

    def check(self, gradients: Gradients) -> None:
        """Raise where a stage of this rank lacks the gradient, before anybody waits for it.

        Raises:
            ArrayError: a stage has no gradient of that name, or one of another shape or dtype.
        """
        kinds = {}
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
            kinds[stage] = _kind(gradients.of_stage[stage][self._tied.name])
        self._require_alike(kinds)

    def __call__(self, gradients: Gradients) -> None:
        """Sum it; the ranks that have it call this once per step, when ``check`` passed on all.

        Raises:
            ArrayError: stages have gradients of other shapes; on all ranks that have it.
            TransferTimeout: another stage stayed away.
        """
        found = [gradients.of_stage[stage][self._tied.name] for stage in self._mine]
        if not found:
            return
        total = found[0]
        for other in found[1:]:
            total += other
        if self._comm is not None:
            from mpi4py import MPI

            if not self._compared:  # shapes stay the same afterwards, see Gradients.add
                everyone = self._comm.allgather((self._mine[0], _kind(total)))
                self._require_alike(dict(everyone))
                self._compared = True
            # Not every MPI knows GPU memory, and some that do know it not in reductions.
            on_gpu = not isinstance(total, np.ndarray)
            if on_gpu and not wait_for_stream(load_cupy(), self._timeout_s):
                raise self._late("this rank's GPU has not come to the end of the step")
            summed = total.get() if on_gpu else total
            self._wait(self._comm.Iallreduce(MPI.IN_PLACE, summed))
            if on_gpu:
                total.set(summed)
        for other in found[1:]:
            other[...] = total

    def _wait(self, request: MPI.Request) -> None:
        end_s = time.monotonic() + self._timeout_s
        while not request.Test():
            if time.monotonic() > end_s:
                self._abandoned.append(request)
                raise self._late("another stage stayed away")
            time.sleep(50e-6)

    def _late(self, why: str) -> TransferTimeout:
        return TransferTimeout(
            explain(
                f"all stages of a tied weight must sum it within {self._timeout_s:g} s",
                values=why,
                context=f"tied weight {self._tied.name!r} of stages {self._tied.stages}",
                remedy="look for an error on their ranks, or raise timeout_s",
            )
        )

    def _require_alike(self, kinds: Mapping[int, str]) -> None:
        if len(set(kinds.values())) > 1:
            raise ArrayError(
                explain(
                    "copies of a tied weight have gradients of one shape and dtype",
                    values=", ".join(f"stage {stage}: {kind}" for stage, kind in kinds.items()),
                    context=f"tied weight {self._tied.name!r}",
                    remedy="give all copies the same shape, and none of them transposed",
                )
            )


def _kind(array: Any) -> str:
    return f"{tuple(array.shape)} {array.dtype}"
