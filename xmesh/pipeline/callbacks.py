"""What a stage computes: the callbacks that users write, and what they return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

#: A local array of any kind that a Resharder takes.
Array = Any

_NOTHING: Mapping[str, Array] = {}


class Forward(NamedTuple):
    """What a forward returns.

    Attributes:
        outputs: name of each edge that leaves the stage -> its local array.
        saved: whatever the backward of this micro-batch needs; the driver lets go of it after that.
        loss: of this micro-batch, or any other result; None where the stage has none.
    """

    outputs: Mapping[str, Array] = _NOTHING
    saved: Any = None
    loss: Any = None


class Backward(NamedTuple):
    """What a full backward returns.

    Attributes:
        inputs: name of each differentiable edge that enters the stage -> gradient of its array.
        weights: name of each weight -> gradient of this micro-batch, which the driver adds up.
    """

    inputs: Mapping[str, Array] = _NOTHING
    weights: Mapping[str, Array] = _NOTHING


class BackwardInput(NamedTuple):
    """What the first half of a backward returns.

    Attributes:
        inputs: as in Backward.
        saved: what the second half, the weights' gradients, needs.
    """

    inputs: Mapping[str, Array] = _NOTHING
    saved: Any = None


class Callbacks(Protocol):
    """What a user writes; an object with those of these methods that the schedule calls.

    Arrays that are returned for edges are sent from where they lie: leave them alone until the step
    has ended. A new array for each micro-batch does, one buffer that is written again does not.

    Gradients of an edge are cut as its activation is. Where its layout has replicas, each gives the
    same gradient, already summed over what they share. A method may use communicators of its own,
    if MPI was initialised for threads, as mpi4py does.
    """

    def forward(self, stage: int, microbatch: int, inputs: dict[str, Array], data: Any) -> Forward:
        """F: from the arrays of the edges that enter the stage to those that leave it.

        Args:
            stage: which one.
            microbatch: which one.
            inputs: name of the edge -> local array, which stays valid until the micro-batch's last
                computation on this stage.
            data: what ``step`` was given for this micro-batch on this rank; None without.
        """

    def backward(
        self, stage: int, microbatch: int, gradients: dict[str, Array], saved: Any
    ) -> Backward:
        """B: from gradients of what left the stage to those of what entered, and of the weights."""

    def backward_input(
        self, stage: int, microbatch: int, gradients: dict[str, Array], saved: Any
    ) -> BackwardInput:
        """I: the part of B that other stages wait for."""

    def backward_weight(self, stage: int, microbatch: int, saved: Any) -> Mapping[str, Array]:
        """W: the weights' gradients, from what ``backward_input`` saved."""

    def reduce(self, stage: int, gradients: dict[str, Array]) -> None:
        """REDUCE, optional: once per stage and step, when all micro-batches are in ``gradients``.

        They are scaled, and tied weights summed. A sum over a data-parallel axis belongs here, in
        place.
        """
