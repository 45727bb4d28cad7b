"""The command ``launch/check-topology``: are the ranks where they were asked to be?

Run by every rank of a job, under mpiexec or srun.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mpi4py import MPI

from xmesh.errors import TopologyError, XmeshError, explain
from xmesh.slurm import host_of_rank_from_slurm
from xmesh.topology import Topology
from xmesh.world import TOPOLOGY_SOURCES, World


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, on all ranks together.

    Args:
        argv: its words; default: those of the process.

    Returns:
        Exit status, the same on all ranks: 0, 1 where the ranks are elsewhere, 2 after an error.
    """
    comm = MPI.COMM_WORLD
    parser = argparse.ArgumentParser(
        prog="check-topology",
        description="Show the ranks of each host as xmesh sees them; run it under mpiexec or srun.",
    )
    parser.add_argument("--hosts", type=int, metavar="K", help="fail unless there are K hosts")
    parser.add_argument("--ranks-per-host", metavar="R", help="fail unless so: 2, or 2,2,1")
    parser.add_argument("--source", choices=TOPOLOGY_SOURCES, default="auto", help="where from")
    args = parser.parse_args(argv)
    try:
        with World(comm, topology=args.source) as world:
            topology, source = world.topology, world.topology_source
    except XmeshError as error:
        print(f"check-topology: rank {comm.rank}: {error}", file=sys.stderr, flush=True)
        return 2
    problems = differences(topology, args.hosts, args.ranks_per_host)
    if source != "slurm":
        problems += disagreement_with_slurm(topology)
    if comm.rank == 0:
        print(f"{topology}, known from {source}")
        for host, name in enumerate(topology.host_names):
            ranks = topology.ranks_of_host(host)
            print(f"  {name}: {len(ranks)} ranks, {', '.join(map(str, ranks))}")
        for problem in problems:
            print(f"check-topology: {problem}", file=sys.stderr)
        sys.stdout.flush()
    comm.Barrier()  # nobody ends, and has the others ended, before it stands there
    return 1 if problems else 0


def differences(topology: Topology, hosts: int | None, ranks_per_host: str | None) -> list[str]:
    """What is not as asked.

    Args:
        topology: the ranks' places.
        hosts: number of hosts asked for; None: any.
        ranks_per_host: ``"2"``, or one number for each host in order: ``"2,2,1"``; None: any.
    """
    found = []
    if hosts is not None and topology.num_hosts != hosts:
        found.append(
            explain(
                f"there must be {hosts} hosts",
                values=f"{topology.num_hosts}: {', '.join(topology.host_names)}",
                remedy="look at the host file, at --nodes, or at how the MPI names hosts",
            )
        )
    if ranks_per_host is not None:
        asked = [int(word) for word in ranks_per_host.split(",")]
        counts = [len(topology.ranks_of_host(host)) for host in range(topology.num_hosts)]
        if counts != (asked * len(counts) if len(asked) == 1 else asked):
            found.append(
                explain(
                    f"the hosts must have {ranks_per_host} ranks each",
                    values=", ".join(map(str, counts)),
                    remedy="look at the slots in the host file, or at --ntasks-per-node",
                )
            )
    return found


def disagreement_with_slurm(topology: Topology) -> list[str]:
    """What MPI and Slurm say differently of this job step, if anything."""
    try:
        hosts = host_of_rank_from_slurm(os.environ)
    except TopologyError:
        return []
    if hosts is None or len(hosts) != topology.num_ranks:
        return []
    if Topology(hosts).host_of_rank == topology.host_of_rank:
        return []
    return [
        explain(
            "MPI and Slurm must agree on which ranks share a host",
            values=f"MPI: {topology.host_of_rank}\nSlurm: {', '.join(hosts)}",
            remedy="World(comm, topology='slurm') where Slurm is right; see docs/cluster.md",
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
