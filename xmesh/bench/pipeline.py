"""``xmesh bench pipeline``: the end-to-end experiment, on an emulated cluster or given ranks."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from xmesh.bench.end_to_end import METHODS, PipelineRow, run, table
from xmesh.bench.models import MODELS, RANKS_PER_HOST, Model, num_ranks
from xmesh.bench.options import positive
from xmesh.errors import XmeshError, explain
from xmesh.pipeline.simulate import TRANSFERS

if TYPE_CHECKING:
    from mpi4py import MPI


HOSTS = 2
#: For blocking methods: messages of this size or more are handed over, not copied aside, so that a
#: send really blocks until its receiver takes it, as those of GPUs do.
_RENDEZVOUS = {"UCX_RNDV_THRESH": "16384", "OMPI_MCA_btl_tcp_eager_limit": "16384"}


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


if __name__ == "__main__":
    sys.exit(main())
