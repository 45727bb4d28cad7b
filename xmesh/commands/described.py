"""Options that describe a cluster, there or not, for the commands that plan: hosts, NICs, rates."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xmesh.errors import OptionError, PlanError, TopologyError, XmeshError, explain
from xmesh.planner.cost import CostModel
from xmesh.topology import Topology

CLUSTER_HELP = """\
A cluster that is not there is described by options, or by a file (--topology) that holds what
Topology.to_json gives, or kinds of hosts in the order of their ranks:

  [{"hosts": 16, "ranks_per_host": 8, "nics_per_host": 2, "nic_gbits": 200},
   {"hosts": 4, "ranks_per_host": 16, "nic_gbits": 100}]
"""
_KIND = ("hosts", "ranks_per_host", "nics_per_host", "nic_gbits")
_BPS_OF_GBITS = 1e9 / 8


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that describe hosts, and those that say how fast they are."""
    hosts = parser.add_argument_group("hosts")
    hosts.add_argument(
        "--ranks-per-host",
        type=int,
        metavar="N",
        help="hosts of N consecutive ranks (each rank is a host of its own)",
    )
    hosts.add_argument(
        "--hosts", type=int, metavar="N", help="N hosts, over which the ranks are spread evenly"
    )
    hosts.add_argument(
        "--nics-per-host", type=int, metavar="N", help="NICs of a host, shared by its ranks (1)"
    )
    hosts.add_argument(
        "--topology", metavar="FILE.json", help="hosts from a file, in place of the three above"
    )
    rates = parser.add_argument_group("rates")
    rates.add_argument(
        "--cost",
        metavar="FILE.json",
        help="cost model, as xmesh calibrate writes it: an object with any of "
        + ", ".join(CostModel().to_json()),
    )
    for name, metavar, text in (
        ("--nic-gbits", "G", "Gbit/s of a NIC in each direction"),
        ("--nic-latency-us", "US", "microseconds of a message between hosts"),
        ("--intra-gbits", "G", "Gbit/s between two ranks of a host"),
        ("--intra-latency-us", "US", "microseconds of a message inside a host"),
    ):
        rates.add_argument(name, type=float, metavar=metavar, help=text)


def topology_of(args: argparse.Namespace, num_ranks: int) -> Topology | None:
    """The hosts that the options describe; None when they describe none.

    Args:
        args: with the options of ``add_cluster_arguments``.
        num_ranks: ranks that there must be at least.

    Raises:
        TopologyError: too few ranks, or options or a file that describe no topology.
    """
    counts = (args.hosts, args.ranks_per_host, args.nics_per_host)
    if args.topology is not None:
        if any(count is not None for count in counts):
            raise TopologyError(
                explain(
                    "hosts are described once",
                    values="--topology together with --hosts, --ranks-per-host or --nics-per-host",
                    remedy="leave out one or the other",
                )
            )
        topology = _from_file(args.topology)
        if topology.nic_bandwidth_Bps is not None and args.nic_gbits is not None:
            raise TopologyError(
                explain(
                    "the rate of a NIC is given once",
                    values=f"--nic-gbits {args.nic_gbits:g}, and rates in {args.topology}",
                    remedy="leave out one or the other",
                )
            )
        return topology
    if args.hosts is None and args.ranks_per_host is None:
        if args.nics_per_host is not None:
            raise TopologyError(
                explain(
                    "NICs belong to hosts",
                    values=f"--nics-per-host {args.nics_per_host} without hosts",
                    remedy="add --hosts or --ranks-per-host",
                )
            )
        return None
    ranks_per_host = args.ranks_per_host
    if args.hosts is not None:
        if args.hosts < 1 or (ranks_per_host or num_ranks) * args.hosts < num_ranks:
            raise TopologyError(
                explain(
                    "a cluster needs a place for every rank",
                    values=f"{num_ranks:,} ranks, --hosts {args.hosts}"
                    + (f" --ranks-per-host {ranks_per_host}" if ranks_per_host else ""),
                    remedy="give more hosts, or leave one of the two out",
                )
            )
        if ranks_per_host is None:
            ranks_per_host = -(-num_ranks // args.hosts)
    nics = 1 if args.nics_per_host is None else args.nics_per_host
    return Topology.uniform(num_ranks, ranks_per_host, nics)


def cost_of(args: argparse.Namespace, base: CostModel | None = None) -> CostModel | None:
    """The rates that the options describe; ``base`` where they say nothing.

    Raises:
        PlanError: a file or a figure that is no cost model.
    """
    model = base if args.cost is None else _cost_from_file(args.cost)
    figures = {
        field: value * factor
        for field, value, factor in (
            ("nic_bandwidth_Bps", args.nic_gbits, _BPS_OF_GBITS),
            ("nic_latency_s", args.nic_latency_us, 1e-6),
            ("intra_bandwidth_Bps", args.intra_gbits, _BPS_OF_GBITS),
            ("intra_latency_s", args.intra_latency_us, 1e-6),
        )
        if value is not None
    }
    return replace(model or CostModel(), **figures) if figures else model


def _cost_from_file(path: str) -> CostModel:
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        return CostModel(**{name: float(value) for name, value in data.items()})
    except PlanError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise PlanError(
            explain(
                "a cost model is a JSON object of numbers, any of "
                + ", ".join(CostModel().to_json()),
                values=str(error),
                context=f"--cost {path}",
                remedy='write {"nic_bandwidth_Bps": 1.25e9}, for example',
            )
        ) from error


def _from_file(path: str) -> Topology:
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        if isinstance(data, Mapping) and "host_of_rank" in data:
            return Topology.from_json(data)
        return described(data)
    except (OSError, ValueError, XmeshError) as error:
        raise TopologyError(
            explain(
                "a topology is read from a file that describes one",
                values=str(error),
                context=f"--topology {path}",
                remedy='write [{"hosts": 16, "ranks_per_host": 8, "nic_gbits": 100}], for example',
            )
        ) from error


def described(kinds: Any) -> Topology:
    """A topology from kinds of hosts.

    Args:
        kinds: an object, or a list of them, with "hosts", "ranks_per_host" and, if wanted,
            "nics_per_host" (1) and "nic_gbits" (that of the cost model). Ranks are numbered kind
            by kind, host by host, and spread in blocks over the NICs of their host.

    Raises:
        OptionError: it is something else, or only some kinds have rates.
    """
    listed = [kinds] if isinstance(kinds, Mapping) else kinds
    if not isinstance(listed, list) or not listed or not all(map(_is_kind, listed)):
        raise OptionError(
            explain(
                "a kind of host is an object with hosts and ranks_per_host, ints >= 1, and perhaps "
                "nics_per_host, an int >= 1, and nic_gbits, a number > 0",
                values=json.dumps(kinds)[:200],
                remedy='write {"hosts": 16, "ranks_per_host": 8}, or a list of such objects',
            )
        )
    with_rate = sum("nic_gbits" in kind for kind in listed)
    if with_rate not in (0, len(listed)):
        raise OptionError(
            explain(
                "all kinds of hosts have a rate, or none",
                values=f"nic_gbits in {with_rate} of {len(listed)}",
                remedy="add nic_gbits to the others",
            )
        )
    host_of_rank: list[int] = []
    nic_of_rank: list[int] = []
    bandwidths_Bps: list[float] = []
    host = 0
    for kind in listed:
        ranks, nics = kind["ranks_per_host"], kind.get("nics_per_host", 1)
        mine = [rank * nics // ranks for rank in range(ranks)]
        for _ in range(kind["hosts"]):
            host_of_rank += [host] * ranks
            nic_of_rank += mine
            bandwidths_Bps += [kind.get("nic_gbits", 0) * _BPS_OF_GBITS] * len(set(mine))
            host += 1
    return Topology(
        host_of_rank, nic_of_rank, nic_bandwidth_Bps=bandwidths_Bps if with_rate else None
    )


def _is_kind(kind: Any) -> bool:
    if not isinstance(kind, Mapping) or not {"hosts", "ranks_per_host"} <= set(kind) <= {*_KIND}:
        return False
    counts = [kind[name] for name in _KIND[:3] if name in kind]
    rate = kind.get("nic_gbits", 1)
    return (
        all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in counts)
        and isinstance(rate, (int, float))
        and not isinstance(rate, bool)
        and rate > 0
    )
