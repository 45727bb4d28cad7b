"""A pipeline whose results one process works out, element by element, for tests on MPI ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from xmesh import DeviceMesh, Layout
from xmesh.errors import (
    XmeshError,
)
from xmesh.pipeline import (
    Backward,
    BackwardInput,
    Driver,
    Edge,
    Forward,
    Pipeline,
)

SIZE = MPI.COMM_WORLD.size
SHAPE = (6, 5)


def cut_in_groups(num_groups: int) -> list[DeviceMesh]:
    """Meshes of all ranks, of different sizes where they do not divide."""
    cuts = [SIZE * i // num_groups for i in range(num_groups + 1)]
    return [DeviceMesh(range(a, b)) for a, b in itertools.pairwise(cuts)]


class Model:
    """Each stage multiplies the sum of what it gets; every edge scales. All of it elementwise.

    A stage's weight gradient is kept element by element, so that any element that went the wrong
    way, or twice, shows.
    """

    def __init__(self, num_stages: int, seed: int = 0, skips: int = 0) -> None:
        rng = random.Random(seed)
        self.num_stages = num_stages
        self.weights = [rng.choice([-2.0, 0.5, 3.0]) for _ in range(num_stages)]
        self.specs = [rng.choice(["S0 R", "R S0", "R R"]) for _ in range(num_stages)]
        ends = [(s, s + 1) for s in range(num_stages - 1)]
        for _ in range(skips if num_stages > 1 else 0):
            a, b = sorted(rng.sample(range(num_stages), 2))
            ends.append((a, b))
        self.edges = [
            Edge(
                f"e{i}",
                a,
                b,
                src=self.specs[a],
                dst=self.specs[b],
                shape=SHAPE,
                dtype="float64",
                differentiable=i < num_stages - 1 or rng.random() < 0.7,
            )
            for i, (a, b) in enumerate(ends)
        ]
        self.factors = {edge.name: rng.choice([1.0, -1.5, 2.0]) for edge in self.edges}

    def into(self, stage: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.dst_stage == stage]

    def out_of(self, stage: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.src_stage == stage]

    def reference(self, batch: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Output of the last stage for each micro-batch, and the sum of each weight's gradient."""
        outputs = []
        gradients = [np.zeros(SHAPE) for _ in range(self.num_stages)]
        for data in batch:
            sums, results = [], []
            on_edge: dict[str, np.ndarray] = {}
            for stage in range(self.num_stages):
                z = sum((on_edge[e.name] for e in self.into(stage)), np.zeros(SHAPE))
                sums.append(z + (data if stage == 0 else 0))
                results.append(self.weights[stage] * sums[-1])
                on_edge |= {e.name: self.factors[e.name] * results[-1] for e in self.out_of(stage)}
            outputs.append(results[-1])
            back: dict[str, np.ndarray] = {}
            for stage in reversed(range(self.num_stages)):
                dy = np.full(SHAPE, 1.0 if stage == self.num_stages - 1 else 0.0)
                for e in self.out_of(stage):
                    if e.differentiable:
                        dy = dy + self.factors[e.name] * back[e.name]
                gradients[stage] += dy * sums[stage]
                back |= {e.name: self.weights[stage] * dy for e in self.into(stage)}
        return outputs, gradients


class Stage:
    """The model's callbacks on this rank, in NumPy or another module like it."""

    def __init__(self, model: Model, pipe: Pipeline, rank: int, xp: Any = np) -> None:
        self.model, self.pipe, self.rank, self.xp = model, pipe, rank, xp
        self.reduced: list[int] = []
        self.before: Callable[[str, int, int], None] = lambda op, stage, microbatch: None

    def slices(self, stage: int) -> Any:
        layout = Layout(self.pipe.stages[stage], self.model.specs[stage], SHAPE)
        (box,) = layout.boxes(self.rank)
        return box.slices()

    def forward(self, stage, microbatch, inputs, data):
        self.before("F", stage, microbatch)
        assert set(inputs) == {edge.name for edge in self.model.into(stage)}
        z = self.xp.asarray((data if stage == 0 else np.zeros(SHAPE))[self.slices(stage)])
        z = sum(inputs.values(), z)
        y = self.model.weights[stage] * z
        outputs = {e.name: self.model.factors[e.name] * y for e in self.model.out_of(stage)}
        last = stage == self.model.num_stages - 1
        return Forward(outputs, saved=z, loss=y if last else None)

    def backward_input(self, stage, microbatch, gradients, saved):
        self.before("I", stage, microbatch)
        wanted = {edge.name for edge in self.model.out_of(stage) if edge.differentiable}
        assert set(gradients) == wanted
        dy = self.xp.full(saved.shape, 1.0 if stage == self.model.num_stages - 1 else 0.0)
        for name, gradient in gradients.items():
            dy = dy + self.model.factors[name] * gradient
        dz = self.model.weights[stage] * dy
        inputs = {e.name: dz for e in self.model.into(stage) if e.differentiable}
        return BackwardInput(inputs, saved=(dy, saved))

    def backward_weight(self, stage, microbatch, saved):
        self.before("W", stage, microbatch)
        dy, z = saved
        return {"w": dy * z}

    def backward(self, stage, microbatch, gradients, saved):
        inputs, more = self.backward_input(stage, microbatch, gradients, saved)
        return Backward(inputs, self.backward_weight(stage, microbatch, more))

    def reduce(self, stage, gradients):
        self.reduced.append(stage)


def batch_of(count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-3, 4, SHAPE).astype("f8") for _ in range(count)]


def on_host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()


def compare(driver: Driver, stage: Stage, losses: list[Any], batch: list[np.ndarray]) -> str:
    """What is wrong on this rank."""
    outputs, gradients = stage.model.reference(batch)
    last = stage.model.num_stages - 1
    if stage.rank in stage.pipe.stages[last]:
        for found, wanted in zip(losses, outputs, strict=True):
            if not np.array_equal(on_host(found), wanted[stage.slices(last)]):
                return f"rank {stage.rank}: wrong output\n{found}\n{wanted[stage.slices(last)]}"
    elif losses:
        return f"rank {stage.rank} has losses"
    for number, found in driver.gradients.items() if not stage.pipe.schedule.forward_only else ():
        wanted = gradients[number][stage.slices(number)] * driver.gradient_scale
        if not np.array_equal(on_host(found["w"]), wanted):
            return f"rank {stage.rank}, stage {number}: gradient\n{found['w']}\n{wanted}"
    return ""


def raised(call: Callable[[], Any]) -> XmeshError | None:
    try:
        call()
    except XmeshError as error:
        return error
    return None


def pipeline(name: str, groups: int, count: int, seed: int = 0, **options: Any):
    """A model and its pipeline; interleaved ones have two stages on each group."""
    skips = options.pop("skips", 0)
    meshes = cut_in_groups(groups) * (options.get("chunks") or 1)
    model = Model(len(meshes), seed, skips)
    return model, Pipeline(meshes, model.edges, name, count, **options)
