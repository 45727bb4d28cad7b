"""End to end: steps of the paper's models, real bytes under modelled computation (section 5.2).

A callback holds its modelled time and leaves the core free, as a GPU would. Sizes and times are
scaled together, so that a transfer takes the same part of a computation as on the paper's cluster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xmesh.bench.models import MODELS, PAPER_NIC_BPS, Model
from xmesh.bench.waiting import quiet_barrier
from xmesh.pipeline import Backward, BackwardInput, Forward, Pipeline
from xmesh.planner import CostModel

if TYPE_CHECKING:
    from xmesh.world import World

SIGNAL = "signal"


@dataclass(frozen=True)
class Method:
    """A way to run a model.

    Attributes:
        name: of the row.
        schedule: name of the schedule.
        strategy: of the reshardings.
        scheduler: likewise.
        weight_delay: see ``xmesh.pipeline.schedule``.
        transfers: see ``Driver``.
    """

    name: str
    schedule: str
    strategy: str = "broadcast"
    scheduler: str = "auto"
    weight_delay: bool = False
    transfers: str = "async"


METHODS = (
    Method("send_recv", "1f1b", "send_recv", "naive", transfers="blocking"),
    Method("alpa", "1f1b", "local_allgather", "load_balance", transfers="blocking"),
    Method("broadcast", "1f1b", transfers="blocking"),
    Method("overlap", "1f1b"),
    Method("eager-1f1b", "eager-1f1b"),
    Method("eager-1f1b+delay", "eager-1f1b", weight_delay=True),
    Method(SIGNAL, "1f1b"),
)


@dataclass(frozen=True)
class PipelineRow:
    """What came out of one model and method.

    Attributes:
        model: with its parallel configuration.
        method: name of the method.
        step_time_s: measured: median of ``times_s``.
        times_s: measured: the slowest rank of each step.
        fraction_of_signal: the step time with one byte per message, over this one.
        predicted_s: by simulation, with transfers as the cost model has them.
        verified: every byte that arrived was right.
        forward_s: seconds that a forward was modelled to take.
        transfer_s: seconds of the bytes that cross from one host to another with a micro-batch,
            one way, at the bandwidth of the cost model.
        num_microbatches: of a step.
    """

    model: str
    method: str
    step_time_s: float
    times_s: tuple[float, ...]
    fraction_of_signal: float
    predicted_s: float
    verified: bool
    forward_s: float
    transfer_s: float
    num_microbatches: int


class _Modelled:
    """Callbacks that hold their time and check what came."""

    def __init__(self, pipe: Pipeline, rank: int, forward_s: float) -> None:
        self.forward_s = forward_s
        self.wrong = 0
        self.ends = {
            (edge.name, forward): (edge.src_stage if forward else edge.dst_stage)
            for edge in pipe.edges
            for forward in (True, False)
        }
        self.shapes = {
            (edge.name, forward): pipe.layouts[edge.name][not forward].local_shape(rank)
            for (edge, forward) in ((e, f) for e in pipe.edges for f in (True, False))
            if rank in pipe.layouts[edge.name][not forward].ranks
        }

    def _made(self, stage: int, microbatch: int, forward: bool) -> dict[str, Any]:
        return {
            name: np.full(self.shapes[name, forward], _mark(name, forward, microbatch), np.uint8)
            for (name, ahead), end in self.ends.items()
            if ahead == forward and end == stage
        }

    def _check(self, arrays: dict[str, Any], forward: bool, microbatch: int) -> None:
        for name, array in arrays.items():
            self.wrong += int(np.count_nonzero(array != _mark(name, forward, microbatch)))

    def forward(self, stage: int, microbatch: int, inputs: dict[str, Any], data: Any) -> Forward:
        """Hold F."""
        began_s = time.perf_counter()
        self._check(inputs, True, microbatch)
        made = self._made(stage, microbatch, True)
        _hold(began_s, self.forward_s)
        return Forward(made)

    def backward(
        self, stage: int, microbatch: int, gradients: dict[str, Any], saved: Any
    ) -> Backward:
        """Hold B."""
        began_s = time.perf_counter()
        self._check(gradients, False, microbatch)
        made = self._made(stage, microbatch, False)
        _hold(began_s, 2 * self.forward_s)
        return Backward(made)

    def backward_input(
        self, stage: int, microbatch: int, gradients: dict[str, Any], saved: Any
    ) -> BackwardInput:
        """Hold I."""
        began_s = time.perf_counter()
        self._check(gradients, False, microbatch)
        made = self._made(stage, microbatch, False)
        _hold(began_s, self.forward_s)
        return BackwardInput(made)

    def backward_weight(self, stage: int, microbatch: int, saved: Any) -> dict[str, Any]:
        """Hold W."""
        time.sleep(self.forward_s)
        return {}


def _mark(name: str, forward: bool, microbatch: int) -> int:
    return (7 * microbatch + 3 * len(name) + ord(name[-1]) + forward) % 251


def _hold(began_s: float, seconds: float) -> None:
    time.sleep(max(0.0, began_s + seconds - time.perf_counter()))


def run(
    world: World,
    *,
    cost: CostModel,
    nic_Bps: float,
    time_scale: float,
    repeats: int = 3,
    models: Sequence[Model] = MODELS,
    methods: Sequence[Method] = METHODS,
    tell: Callable[[str], None] = lambda text: None,
) -> list[PipelineRow]:
    """Run models by methods; all ranks of the World call it.

    Args:
        world: ranks and where they are.
        cost: what the NICs really do, for plans and predictions.
        nic_Bps: nominal bytes per second of a NIC here, as the paper's is 10 Gbit/s.
        time_scale: seconds here for a second of the paper's cluster.
        repeats: steps that are timed, after one that is not.
        models: which.
        methods: which; the signal bound is always among them.
        tell: called on rank 0 with a line for each result.

    Returns:
        A row for each model and method, on every rank.
    """
    rows: list[PipelineRow] = []
    ordered = sorted(methods, key=lambda method: method.name != SIGNAL)
    if not ordered or ordered[0].name != SIGNAL:
        ordered.insert(0, METHODS[-1])
    for model in models:
        signal_s = 0.0
        found: dict[str, PipelineRow] = {}
        for method in ordered:
            scale = 0.0 if method.name == SIGNAL else time_scale * nic_Bps / PAPER_NIC_BPS
            row = _measure(world, model, method, cost, scale, time_scale, repeats, signal_s)
            signal_s = signal_s or row.step_time_s
            found[method.name] = row
            if world.comm.rank == 0:
                tell(
                    f"{model.name}, {method.name}: {row.step_time_s:.3f} s, "
                    f"{row.fraction_of_signal:.2f} of the bound"
                )
        rows += [found[method.name] for method in (*methods, METHODS[-1]) if method.name in found]
    return list(dict.fromkeys(rows))


def _measure(
    world: World,
    model: Model,
    method: Method,
    cost: CostModel,
    scale: float,
    time_scale: float,
    repeats: int,
    signal_s: float,
) -> PipelineRow:
    from mpi4py import MPI

    from xmesh.pipeline import Driver

    forward_s = model.forward_s * time_scale
    pipe = Pipeline(
        model.stage_meshes(),
        model.edges(scale),
        method.schedule,
        model.num_microbatches,
        weight_delay=method.weight_delay,
        strategy=method.strategy,
        scheduler=method.scheduler,
    )
    callbacks = _Modelled(pipe, world.comm.rank, forward_s)
    times_s = []
    progress = "poll" if method.transfers == "blocking" else "auto"
    with Driver(
        pipe, world, callbacks, cost=cost, transfers=method.transfers, progress=progress
    ) as driver:
        for step in range(repeats + 1):
            quiet_barrier(world.comm)
            began_s = time.perf_counter()
            driver.step()
            elapsed_s = time.perf_counter() - began_s
            quiet_barrier(world.comm, longest_poll_s=5e-3)
            slowest_s: float = world.comm.allreduce(elapsed_s, op=MPI.MAX)
            if step:
                times_s.append(slowest_s)
    wrong: int = world.comm.allreduce(callbacks.wrong)
    step_time_s = statistics.median(times_s)
    simulated = pipe.simulate(
        world.topology,
        cost,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        transfers=method.transfers,
    )
    return PipelineRow(
        model=model.name,
        method=method.name,
        step_time_s=step_time_s,
        times_s=tuple(times_s),
        fraction_of_signal=(signal_s or step_time_s) / step_time_s,
        predicted_s=float(simulated.makespan_s),
        verified=wrong == 0,
        forward_s=forward_s,
        transfer_s=sum(edge.nbytes or 0 for edge in pipe.edges) / cost.nic_bandwidth_Bps,
        num_microbatches=model.num_microbatches,
    )


def table(rows: Sequence[PipelineRow]) -> list[str]:
    """The rows as lines of text."""
    lines = [
        f"{'model':<28}{'method':<18}{'step, s':>9}{'of signal':>11}{'predicted':>11}"
        f"{'pred./meas.':>12}{'check':>7}"
    ]
    for row in rows:
        lines.append(
            f"{row.model:<28}{row.method:<18}{row.step_time_s:>9.3f}"
            f"{row.fraction_of_signal:>11.3f}{row.predicted_s:>11.3f}"
            f"{row.predicted_s / row.step_time_s:>12.3f}{'ok' if row.verified else 'WRONG':>7}"
        )
    for model in dict.fromkeys(row.model for row in rows):
        moving = [row for row in rows if row.model == model and row.method != SIGNAL]
        for one in moving[:1]:
            lines.append(
                f"{model}: F {one.forward_s * 1e3:.1f} ms, B twice that, "
                f"{one.num_microbatches} micro-batches; all tensors one way "
                f"{one.transfer_s * 1e3:.1f} ms at the NIC's rate"
            )
    return lines
