"""End to end: steps of the paper's models, real bytes under modelled computation (section 5.2).

A callback holds its modelled time and leaves the core free, as a GPU would. Sizes and times are
scaled together, so that a transfer takes the same part of a computation as on the paper's cluster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xmesh.bench.models import MODELS, PAPER_NIC_BPS, RANKS_PER_HOST, Model, num_ranks
from xmesh.bench.options import positive
from xmesh.bench.waiting import quiet_barrier
from xmesh.errors import XmeshError, explain
from xmesh.pipeline import Backward, BackwardInput, Forward, Pipeline
from xmesh.pipeline.simulate import TRANSFERS
from xmesh.planner import CostModel

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.world import World

HOSTS = 2
#: For blocking methods: messages of this size or more are handed over, not copied aside, so that a
#: send really blocks until its receiver takes it, as those of GPUs do.
_RENDEZVOUS = {"UCX_RNDV_THRESH": "16384", "OMPI_MCA_btl_tcp_eager_limit": "16384"}
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


# --- The command ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """``xmesh bench pipeline``: under mpiexec on its ranks, otherwise on an emulated cluster.

    Returns:
        0; 1 when a byte was wrong.

    Raises:
        XmeshError: no emulated cluster here, or ranks that failed.
    """
    from xmesh.bench.session import started_ranks

    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(words)
    comm = started_ranks()
    if comm is None:
        return _on_emulated_cluster(args, words)
    rows = _on_these_ranks(args, comm)
    if comm.rank:
        return 0
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(*table(rows), sep="\n")
    return 0 if all(row.verified for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xmesh bench pipeline",
        description="Steps of GPT and U-Transformer as in the paper: real bytes over rate-limited "
        "NICs, under callbacks that hold their modelled time and leave the core free.",
        epilog="Without mpiexec it starts an emulated cluster (root, iproute2); about 8 minutes.",
    )
    names = [method.name for method in METHODS]
    parser.add_argument("--model", nargs="+", metavar="TEXT", help="models whose name has this")
    parser.add_argument("--method", nargs="+", choices=names, default=names, metavar="M")
    parser.add_argument(
        "--repeats", type=positive(int), default=3, metavar="N", help="steps that are timed (3)"
    )
    parser.add_argument(
        "--rate", type=positive(float), default=200, metavar="MBIT", help="Mbit/s of a NIC (200)"
    )
    parser.add_argument(
        "--time-scale",
        type=positive(float),
        default=0.2,
        metavar="X",
        help="seconds here for a second of the paper's cluster (0.2)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows, as a JSON list")
    parser.add_argument(
        "--timeout", type=positive(float), default=1800, metavar="S", help="limit (1800)"
    )
    return parser


def _models(args: argparse.Namespace) -> list[Model]:
    wanted = [
        model
        for model in MODELS
        if not args.model or any(text.lower() in model.name.lower() for text in args.model)
    ]
    if not wanted:
        raise XmeshError(
            explain(
                "--model must be part of the name of a model",
                values=" ".join(args.model),
                remedy="choose from: " + ", ".join(model.name for model in MODELS),
            )
        )
    return wanted


def _on_these_ranks(args: argparse.Namespace, comm: MPI.Intracomm) -> list[PipelineRow]:
    from xmesh.bench.calibration import calibrate
    from xmesh.world import World

    models = _models(args)
    if comm.size < num_ranks(models):
        raise XmeshError(
            explain(
                "there must be a rank for every place of all stages",
                values=f"{comm.size} ranks, {num_ranks(models)} are needed",
                remedy=f"mpiexec -n {num_ranks(models)} xmesh bench pipeline",
            )
        )
    with World(comm) as world:
        cost, _ = calibrate(comm, world.topology)
        return run(
            world,
            cost=cost,
            nic_Bps=args.rate * 1e6 / 8,
            time_scale=args.time_scale,
            repeats=args.repeats,
            models=models,
            methods=[method for method in METHODS if method.name in args.method],
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        )


def _on_emulated_cluster(args: argparse.Namespace, words: Sequence[str]) -> int:
    from xmesh.cluster import EmulatedCluster

    rows: list[PipelineRow] = []
    chosen = [method for method in METHODS if method.name in args.method]
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedCluster(HOSTS, args.rate * 1e6) as cluster,
    ):
        for transfers in TRANSFERS:
            names = [method.name for method in chosen if method.transfers == transfers]
            if not names:
                continue
            file = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "xmesh", "bench", "pipeline", *words]
            outcome = cluster.run(
                [*command, "--method", *names, "--json", str(file)],
                RANKS_PER_HOST,
                env=_RENDEZVOUS if transfers == "blocking" else {},
                timeout_s=args.timeout,
                on_line=lambda line: print(line, flush=True) if ", " in line[:40] else None,
            )
            if outcome.status:
                print(outcome.output, file=sys.stderr)
                return outcome.status
            found = [PipelineRow(**row) for row in json.loads(file.read_text())]
            rows += [row for row in found if row.method in names]
    rows.sort(key=lambda row: row.model)
    print(*table(rows), sep="\n")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
