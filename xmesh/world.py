"""World: what the ranks of a communicator know of their cluster, and communicators on meshes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType

from mpi4py import MPI

from xmesh.agreement import Record, short
from xmesh.binding import TIMEOUT_S, agree, context_of
from xmesh.errors import ClosedError, MeshError, TopologyError, explain
from xmesh.mesh import DeviceMesh
from xmesh.progress import seconds
from xmesh.slurm import host_of_rank_from_slurm
from xmesh.topology import Topology

TOPOLOGY_SOURCES = ("auto", "mpi", "slurm")
#: Tells a rank's NIC where hosts have several.
NIC_VARIABLE = "XMESH_NIC"


class World:
    """A communicator, its topology, and communicators on meshes, made once and freed together.

    Made by all ranks of the communicator together.

    Args:
        comm: an mpi4py communicator.
        topology: a Topology, the same on all ranks; "mpi" (ranks that can share memory are on one
            host); "slurm" (from Slurm's variables); "auto": Slurm's where all ranks have them, as
            what started the ranks knows best where they are, else MPI's. Ranks that have a NIC of
            their own say which by the variable XMESH_NIC, its index in the host from 0.
        timeout_s: seconds to wait for the other ranks, here and in ``communicator``.

    Raises:
        TopologyError: the topology has too few ranks, or the source asked for is not there.
        AgreementError: ranks gave different topologies.
        TransferTimeout: a rank did not make its World in time.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        topology: Topology | str = "auto",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._context = context_of(comm)
        self.comm = comm = self._context.comm
        self._timeout_s = seconds(timeout_s)
        self._communicators: dict[tuple[int, ...], MPI.Intracomm] = {}
        self._closed = False
        source = topology.to_json() if isinstance(topology, Topology) else repr(topology)
        record = Record(comm.rank, "topology", {"topology": short(source)})
        try:
            if isinstance(topology, Topology):
                topology.require(range(comm.size))
            elif not isinstance(topology, str) or topology not in TOPOLOGY_SOURCES:
                raise TopologyError(
                    explain(
                        f"topology must be a Topology or one of {', '.join(TOPOLOGY_SOURCES)}",
                        values=f"{topology!r}",
                        remedy="leave it at 'auto'",
                    )
                )
        except TopologyError as error:
            record = Record.of_error(comm.rank, error)
        # Everything after this is collective and cannot time out, so first make sure of everyone.
        agree(self._context, tuple(range(comm.size)), record, self._timeout_s, "World")
        if isinstance(topology, Topology):
            self._topology, self.topology_source = topology, "given"
        else:
            self._topology, self.topology_source = discover(comm, topology)

    @property
    def topology(self) -> Topology:
        """Rank -> host."""
        return self._topology

    def communicator(self, mesh: DeviceMesh, axis: int | str | None = None) -> MPI.Intracomm | None:
        """A communicator on a mesh, or on this rank's line along one axis of it.

        The first time for a mesh and axis, all ranks of the mesh (or of the line) must call it; the
        result is kept by its ranks in order, and freed by ``close``. Ranks are numbered as in the
        mesh, row by row.

        Args:
            mesh: the mesh.
            axis: index or name of an axis; None for the whole mesh.

        Returns:
            The communicator; None on ranks that are not in the mesh.

        Raises:
            MeshError: the communicator lacks a rank of the mesh, or there is no such axis.
            ClosedError: the World is closed.
            TransferTimeout: a rank of the mesh, or line, did not call in time.
        """
        self.require_open(f"a communicator for mesh {mesh}")
        if not isinstance(mesh, DeviceMesh):
            raise MeshError(
                explain(
                    "a communicator is made for a DeviceMesh",
                    values=f"{mesh!r} of type {type(mesh).__name__}",
                    remedy="build one: xmesh.DeviceMesh([[0, 1], [2, 3]])",
                )
            )
        missing = [rank for rank in mesh.ranks if rank >= self.comm.size]
        if missing:
            raise MeshError(
                explain(
                    "the communicator must hold every rank of the mesh",
                    values=f"ranks {', '.join(map(str, missing[:8]))}, communicator of size "
                    f"{self.comm.size}",
                    remedy=f"start at least {max(mesh.ranks) + 1} ranks",
                )
            )
        if axis is not None:
            axis = mesh.axis(axis)
        if self.comm.rank not in mesh:
            return None
        ranks = mesh.ranks
        if axis is not None:
            ranks = next(line for line in mesh.axis_groups(axis) if self.comm.rank in line)
        if ranks not in self._communicators:
            group_ranks = tuple(sorted(ranks))
            record = Record(self.comm.rank, "mesh", {"ranks in order": short(ranks)})
            agree(self._context, group_ranks, record, self._timeout_s, f"mesh {mesh}")
            group = self.comm.Get_group().Incl(ranks)
            # The tag tells creations by overlapping sets of ranks apart.
            self._communicators[ranks] = self.comm.Create_group(group, tag=min(ranks))
            group.Free()
        return self._communicators[ranks]

    def require_open(self, purpose: str) -> None:
        """Refuse use after ``close``, or after the user freed the communicator.

        Raises:
            ClosedError: says what it was wanted for.
        """
        if self._closed or self.comm == MPI.COMM_NULL:
            raise ClosedError(
                explain(
                    "a World cannot be used after close(), nor without its communicator",
                    values=f"wanted for {purpose}",
                    remedy="close it last, or make a new one on all ranks",
                )
            )

    def close(self) -> None:
        """Free the communicators on meshes. Idempotent; the user's communicator stays."""
        if not self._closed:
            self._closed = True
            for communicator in self._communicators.values():
                communicator.Free()
            self._communicators.clear()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def discover(comm: MPI.Intracomm, source: str = "auto") -> tuple[Topology, str]:
    """Find out which ranks share a host; all ranks of the communicator call it.

    Args:
        comm: the communicator.
        source: "auto", "mpi" or "slurm", see World.

    Returns:
        The topology, and which source it came from.

    Raises:
        TopologyError: Slurm was asked for and its variables are not there on some rank; on all.
    """
    by_memory = _hosts_by_memory(comm)
    nodes = _nodes_by_slurm(comm, os.environ)
    problem = next((text for _, text in nodes if text), "")
    hosts = [host for host, _ in nodes]
    if source == "slurm" and problem:
        raise TopologyError(
            explain(
                "a topology from Slurm needs its variables on every rank",
                values=problem,
                remedy="start the ranks with srun, or use topology='mpi'",
            )
        )
    nics = _nics(comm, os.environ)
    if source == "slurm" or (source == "auto" and not problem):
        return Topology(hosts, nics), "slurm"
    return Topology(by_memory, nics), "mpi"


def _hosts_by_memory(comm: MPI.Intracomm) -> list[str]:
    """For each rank the name of its host; a number is added where hosts share a name."""
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    leader = shared.bcast(comm.rank)
    shared.Free()
    found: list[tuple[str, int]] = comm.allgather((MPI.Get_processor_name(), leader))
    names: dict[str, set[int]] = {}
    for name, first in found:
        names.setdefault(name, set()).add(first)
    return [name if len(names[name]) == 1 else f"{name}#{first}" for name, first in found]


def _nics(comm: MPI.Intracomm, environ: Mapping[str, str]) -> list[int]:
    """For each rank the index of its NIC within its host."""
    texts: list[str] = comm.allgather(environ.get(NIC_VARIABLE, "0"))
    for rank, text in enumerate(texts):
        if not text.isdecimal():
            raise TopologyError(
                explain(
                    f"the variable {NIC_VARIABLE} is the index of the rank's NIC, an integer >= 0",
                    values=f"{text!r}",
                    context=f"rank {rank}",
                    remedy="set it per rank, for example to local rank modulo number of NICs",
                )
            )
    return [int(text) for text in texts]


def _nodes_by_slurm(comm: MPI.Intracomm, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """For each rank the name of its Slurm node, and what went wrong where it is not known."""
    node, problem = "", ""
    try:
        hosts = host_of_rank_from_slurm(environ)
        if hosts is None:
            problem = f"rank {comm.rank} has none"
        else:
            node = hosts[int(environ["SLURM_PROCID"])]
    except TopologyError as error:
        # Told to all ranks below, so that none of them waits for this one.
        problem = f"rank {comm.rank}: {error}"
    return comm.allgather((node, problem))
