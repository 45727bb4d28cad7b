"""A classifier in two stages, whose callbacks are jax.vjp of jitted functions; NumPy in between.

    mpiexec -n 4 python examples/jax_pipeline.py --steps 200        # needs: pip install jax

Points of a plane lie on three spiral arms, and the network says on which. Its first half runs on
half of the ranks, its second half on the others; within a half the points are cut over the ranks.
At the end a single process does all of it again with jax.value_and_grad, and must find the same.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import xmesh
from xmesh.pipeline import Backward, Driver, Edge, Forward, Pipeline

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    if MPI.COMM_WORLD.rank == 0:
        print("skipped, as this example needs JAX: pip install jax")
    raise SystemExit(0) from None

Array = NDArray[Any]
Weights = dict[str, Any]  # a pytree of JAX, and the names that the driver wants

POINTS, MICROBATCHES, WIDTH, ARMS, RATE = 96, 4, 32, 3, 0.2
SIZES = ((2, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, ARMS))
LAYERS_OF_STAGE = (range(0, 2), range(2, 4))


def spirals(step: int) -> tuple[Array, Array]:
    """Points of a step, (POINTS, 2), and the arm that each is on."""
    random = np.random.default_rng(step)
    arms = random.integers(0, ARMS, POINTS)
    radius = random.uniform(0.1, 1, POINTS)
    angle = 4 * radius + 2 * np.pi / ARMS * arms + 0.15 * random.standard_normal(POINTS)
    return 2 * radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1), arms


def initial(layers: range) -> Weights:
    weights: Weights = {}
    for i in layers:
        weights[f"w{i}"] = np.random.default_rng(i).standard_normal(SIZES[i]) / SIZES[i][0] ** 0.5
        weights[f"b{i}"] = np.zeros(SIZES[i][1])
    return weights


def first(weights: Weights, points: Any) -> Any:
    """The first stage: what the second one sees of the points."""
    inner = jnp.tanh(points @ weights["w0"] + weights["b0"])
    return jnp.tanh(inner @ weights["w1"] + weights["b1"])


def second(count: int, weights: Weights, hidden: Any, arms: Any) -> Any:
    """The second stage: the loss of some points, as a share of that of ``count`` ones."""
    inner = jnp.tanh(hidden @ weights["w2"] + weights["b2"])
    odds = jax.nn.log_softmax(inner @ weights["w3"] + weights["b3"])
    return -jnp.take_along_axis(odds, arms[:, None], 1).sum() / count


def descend(weights: Weights, gradients: Weights) -> Weights:
    return {name: weights[name] - RATE * gradients[name] for name in weights}


class Stages:
    """The callbacks. What crosses to the driver is NumPy, without a copy where JAX allows it.

    Args:
        weights: of this rank's stage.
        comm: the ranks of that stage.
    """

    def __init__(self, weights: Weights, comm: MPI.Intracomm) -> None:
        self.weights = weights
        self._comm = comm
        self._first = jax.jit(first)
        self._second = jax.jit(partial(second, POINTS // MICROBATCHES))

    def forward(self, stage: int, microbatch: int, inputs: dict[str, Array], data: Any) -> Forward:
        if stage == 0:
            hidden, pull = jax.vjp(self._first, self.weights, data)
            return Forward({"hidden": np.asarray(hidden)}, saved=pull)
        of_weights_and_hidden = partial(self._second, arms=data)
        loss, pull = jax.vjp(of_weights_and_hidden, self.weights, inputs["hidden"])
        return Forward(saved=pull, loss=float(loss))

    def backward(
        self, stage: int, microbatch: int, gradients: dict[str, Array], saved: Any
    ) -> Backward:
        if stage == 0:
            weights, _ = saved(jnp.asarray(gradients["hidden"]))
            return Backward(weights=jax.tree.map(np.asarray, weights))
        weights, hidden = saved(jnp.ones(()))
        return Backward({"hidden": np.asarray(hidden)}, jax.tree.map(np.asarray, weights))

    def reduce(self, stage: int, gradients: dict[str, Array]) -> None:
        for name in sorted(gradients):
            self._comm.Allreduce(MPI.IN_PLACE, gradients[name])


def pipelined(steps: int, comm: MPI.Intracomm) -> tuple[list[float], Weights]:
    """Train; the losses of all steps, and on rank 0 all weights."""
    half = comm.size // 2
    meshes = [xmesh.DeviceMesh.arange((half,)), xmesh.DeviceMesh.arange((comm.size - half,), half)]
    rows = POINTS // MICROBATCHES
    edge = Edge("hidden", 0, 1, "S0 R", "S0 R", (rows, WIDTH), "float64")
    stage = int(comm.rank >= half)
    (box,) = xmesh.Layout(meshes[stage], "S0 R", (rows, WIDTH)).boxes(comm.rank)
    mine = box.slices()[0]
    pipe = Pipeline(meshes, [edge], schedule="eager-1f1b", num_microbatches=MICROBATCHES)
    losses = []
    with xmesh.World(comm) as world:
        group = world.communicator(meshes[stage])
        assert group is not None  # every rank is in a stage
        stages = Stages(initial(LAYERS_OF_STAGE[stage]), group)
        with Driver(pipe, world, stages, gradient_scale=1 / MICROBATCHES) as driver:
            for step in range(steps):
                data = np.split(spirals(step)[stage], MICROBATCHES)
                shares = driver.step([part[mine] for part in data])
                stages.weights = descend(stages.weights, driver.gradients[stage])
                losses.append(comm.allreduce(sum(shares)) / MICROBATCHES)
                if comm.rank == 0 and (step + 1) % max(1, steps // 10) == 0:
                    print(f"step {step + 1:4d} of {steps}: loss {losses[-1]:.4f}", flush=True)
    found: Weights = {}
    for weights in comm.gather(jax.tree.map(np.asarray, stages.weights)) or []:
        found.update(weights)
    return losses, found


def alone(steps: int) -> tuple[list[float], Weights]:
    """The same without a pipeline."""

    def whole(weights: Weights, points: Any, arms: Any) -> Any:
        return second(POINTS, weights, first(weights, points), arms)

    compute = jax.jit(jax.value_and_grad(whole))
    weights, losses = initial(range(4)), []
    for step in range(steps):
        loss, gradients = compute(weights, *spirals(step))
        losses.append(float(loss))
        weights = descend(weights, gradients)
    return losses, weights


def main() -> int:
    parser = argparse.ArgumentParser(description="A pipeline whose stages are written in JAX.")
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    steps = parser.parse_args().steps
    comm = MPI.COMM_WORLD
    if comm.size < 2:
        print("two stages need two ranks: mpiexec -n 4 python examples/jax_pipeline.py")
        return 2
    jax.config.update("jax_enable_x64", True)  # so that a difference says something
    losses, weights = pipelined(steps, comm)
    right = True
    if comm.rank == 0:
        wanted_losses, wanted = alone(steps)
        apart = np.abs(np.array(losses) - wanted_losses).max(initial=0)
        weights_apart = max(np.abs(weights[name] - wanted[name]).max() for name in wanted)
        right = bool(max(apart, weights_apart) < 1e-9)
        print(
            f"largest difference to one process: losses {apart:.1e}, weights {weights_apart:.1e}: "
            + ("equal" if right else "WRONG")
        )
    return 0 if comm.bcast(right) else 1


if __name__ == "__main__":
    sys.exit(main())
