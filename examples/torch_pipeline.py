"""A classifier in two stages, whose callbacks are PyTorch's autograd on CPUs; NumPy in between.

    mpiexec -n 4 python examples/torch_pipeline.py --steps 200      # needs: pip install torch

Points of a plane lie on three spiral arms, and the network says on which. Its first half runs on
half of the ranks, its second half on the others; within a half the points are cut over the ranks.
At the end a single process does all of it again by loss.backward(), and must find the same.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import xmesh
from xmesh.pipeline import Backward, Driver, Edge, Forward, Pipeline

try:
    import torch
except ImportError:
    if MPI.COMM_WORLD.rank == 0:
        print("skipped, as this example needs PyTorch: pip install torch")
    raise SystemExit(0) from None

Array = NDArray[Any]
Module = Any  # a torch.nn.Module; PyTorch need not be there for this to be checked

POINTS, MICROBATCHES, WIDTH, ARMS, RATE = 96, 4, 32, 3, 0.2


def spirals(step: int) -> tuple[Array, Array]:
    """Points of a step, (POINTS, 2), and the arm that each is on."""
    random = np.random.default_rng(step)
    arms = random.integers(0, ARMS, POINTS)
    radius = random.uniform(0.1, 1, POINTS)
    angle = 4 * radius + 2 * np.pi / ARMS * arms + 0.15 * random.standard_normal(POINTS)
    return 2 * radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1), arms


def make_stage(stage: int) -> Module:
    """Layers of a stage, with the same weights on every rank."""
    torch.manual_seed(stage)
    nn = torch.nn
    if stage == 0:
        return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, ARMS))


def loss_of(odds: Any, arms: Any, count: int) -> Any:
    """The loss of some points, as a share of that of ``count`` ones."""
    return torch.nn.functional.cross_entropy(odds, arms, reduction="sum") / count


class Stages:
    """The callbacks. Tensors and arrays share memory, so nothing is copied on the way.

    Args:
        module: the layers of this rank's stage.
        comm: the ranks of that stage.
    """

    def __init__(self, module: Module, comm: MPI.Intracomm) -> None:
        self.module = module
        self._comm = comm

    def forward(self, stage: int, microbatch: int, inputs: dict[str, Array], data: Any) -> Forward:
        if stage == 0:
            hidden = self.module(torch.from_numpy(data))
            return Forward({"hidden": hidden.detach().numpy()}, saved=hidden)
        hidden = torch.from_numpy(inputs["hidden"]).requires_grad_()
        loss = loss_of(self.module(hidden), torch.from_numpy(data), POINTS // MICROBATCHES)
        return Forward(saved=(hidden, loss), loss=loss.item())

    def backward(
        self, stage: int, microbatch: int, gradients: dict[str, Array], saved: Any
    ) -> Backward:
        names, weights = zip(*self.module.named_parameters(), strict=True)
        inputs = {}
        if stage == 0:
            of_hidden = torch.from_numpy(gradients["hidden"])
            found = [*torch.autograd.grad(saved, weights, of_hidden)]
        else:
            hidden, loss = saved
            of_hidden, *found = torch.autograd.grad(loss, [hidden, *weights])
            inputs = {"hidden": of_hidden.numpy()}
        return Backward(inputs, {n: g.numpy() for n, g in zip(names, found, strict=True)})

    def reduce(self, stage: int, gradients: dict[str, Array]) -> None:
        for name in sorted(gradients):
            self._comm.Allreduce(MPI.IN_PLACE, gradients[name])


def pipelined(steps: int, comm: MPI.Intracomm) -> tuple[list[float], dict[str, Array]]:
    """Train; the losses of all steps, and on rank 0 the weights of both stages."""
    half = comm.size // 2
    meshes = [xmesh.DeviceMesh.arange((half,)), xmesh.DeviceMesh.arange((comm.size - half,), half)]
    rows = POINTS // MICROBATCHES
    edge = Edge("hidden", 0, 1, "S0 R", "S0 R", (rows, WIDTH), "float64")
    stage = int(comm.rank >= half)
    (box,) = xmesh.Layout(meshes[stage], "S0 R", (rows, WIDTH)).boxes(comm.rank)
    mine = box.slices()[0]
    pipe = Pipeline(meshes, [edge], schedule="eager-1f1b", num_microbatches=MICROBATCHES)
    module = make_stage(stage)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses = []
    with xmesh.World(comm) as world:
        group = world.communicator(meshes[stage])
        assert group is not None  # every rank is in a stage
        stages = Stages(module, group)
        with Driver(pipe, world, stages, gradient_scale=1 / MICROBATCHES) as driver:
            for step in range(steps):
                data = np.split(spirals(step)[stage], MICROBATCHES)
                shares = driver.step([part[mine] for part in data])
                for name, weight in module.named_parameters():
                    weight.grad = torch.from_numpy(driver.gradients[stage][name])
                optimizer.step()
                losses.append(comm.allreduce(sum(shares)) / MICROBATCHES)
                if comm.rank == 0 and (step + 1) % max(1, steps // 10) == 0:
                    print(f"step {step + 1:4d} of {steps}: loss {losses[-1]:.4f}", flush=True)
    found: dict[str, Array] = {}
    for weights in comm.gather(weights_of(stage, module)) or []:
        found.update(weights)
    return losses, found


def alone(steps: int) -> tuple[list[float], dict[str, Array]]:
    """The same without a pipeline."""
    first, second = make_stage(0), make_stage(1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=RATE)
    losses = []
    for step in range(steps):
        points, arms = map(torch.from_numpy, spirals(step))
        loss = loss_of(second(first(points)), arms, POINTS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {**weights_of(0, first), **weights_of(1, second)}


def weights_of(stage: int, module: Module) -> dict[str, Array]:
    return {f"{stage}.{name}": w.detach().numpy() for name, w in module.named_parameters()}


def main() -> int:
    parser = argparse.ArgumentParser(description="A pipeline whose stages are written in PyTorch.")
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    steps = parser.parse_args().steps
    comm = MPI.COMM_WORLD
    if comm.size < 2:
        print("two stages need two ranks: mpiexec -n 4 python examples/torch_pipeline.py")
        return 2
    torch.set_default_dtype(torch.float64)  # so that a difference says something
    torch.set_num_threads(1)  # ranks share the machine
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
