"""Options that the experiments have in common, and what they mean to the ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from xmesh.bench.calibration import calibrate
from xmesh.bench.cases import RANKS_PER_HOST
from xmesh.bench.methods import Method
from xmesh.bench.session import Tell
from xmesh.errors import OptionError
from xmesh.planner import CostModel
from xmesh.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI


def add_measurement(parser: argparse.ArgumentParser) -> None:
    """Options about what is measured: sizes, repeats and methods."""
    parser.add_argument(
        "--mbytes",
        type=positive(float),
        default=16,
        metavar="M",
        help="size of each array at most, in MiB (16)",
    )
    parser.add_argument(
        "--repeats", type=positive(int), default=5, metavar="N", help="calls that are timed (5)"
    )
    parser.add_argument(
        "--other-repeats",
        type=positive(int),
        metavar="N",
        help="the same for methods other than auto (as for auto)",
    )
    parser.add_argument(
        "--method",
        type=_method,
        nargs="+",
        action="extend",
        metavar="M",
        help="these ways to move the arrays: auto, a strategy, strategy/scheduler, mpi_isend, "
        "mpi_alltoallw, mpi_bcast; all: those of the paper and plain MPI",
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Options about the ranks and what is planned for."""
    parser.add_argument(
        "--topology",
        default="uniform",
        choices=("uniform", "discovered"),
        help="plan for hosts of 4 consecutive ranks as in the paper, or for those there are",
    )
    parser.add_argument(
        "--nic-gbits",
        type=positive(float),
        default=CostModel().nic_bandwidth_Bps * 8 / 1e9,
        metavar="G",
        help="plan for NICs of G Gbit/s in each direction (10)",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure latencies and bandwidths first, and plan for those",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows, as a JSON list")
    parser.add_argument(
        "--timeout",
        type=positive(float),
        default=600,
        metavar="S",
        help="limit of ranks started here (600)",
    )
    parser.add_argument("--events", action="store_true", help=argparse.SUPPRESS)


def chosen_methods(
    given: list[Method | None] | None, everything: tuple[Method, ...]
) -> tuple[Method, ...] | None:
    """What ``--method`` asks for, each once; None if it was not given."""
    if given is None:
        return None
    if None in given:
        return everything
    return tuple(dict.fromkeys(method for method in given if method is not None))


def topology_of(args: argparse.Namespace, comm: MPI.Intracomm) -> Topology:
    """What ``--topology`` asks for; all ranks call it."""
    from xmesh.world import World

    if args.topology == "uniform":
        return Topology.uniform(comm.size, RANKS_PER_HOST)
    with World(comm) as world:
        return world.topology


def cost_of(
    args: argparse.Namespace, comm: MPI.Intracomm, topology: Topology, tell: Tell
) -> CostModel:
    """What ``--calibrate`` and ``--nic-gbits`` ask for; all ranks call it."""
    if not args.calibrate:
        return CostModel(nic_bandwidth_Bps=args.nic_gbits * 1e9 / 8)
    cost, _ = calibrate(comm, topology)
    if comm.rank == 0:
        tell(cost)
    return cost


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """For argparse: reads a finite number above 0."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
        return value

    return number


def _method(text: str) -> Method | None:
    """A method; None for "all"."""
    if text == "all":
        return None
    try:
        return Method.parse(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
