"""Calibration: latency and bandwidth between and inside hosts, measured by plain MPI messages."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xmesh.bench.waiting import quiet_barrier
from xmesh.planner import CostModel
from xmesh.planner.fair import SENDS_IN_FLIGHT
from xmesh.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

#: Bytes of a message that shows latency.
_SMALL_NBYTES = 64
#: Sizes by which the largest eager message is found, and how long one may take to be taken over.
_EAGER_NBYTES = tuple(2**power for power in range(10, 25))
_EAGER_S = 0.05


@dataclass(frozen=True)
class Link:
    """What was measured between two ranks.

    Attributes:
        latency_s: seconds of one small message, one way.
        bandwidth_Bps: bytes per second of a stream of large messages, one way.
    """

    latency_s: float
    bandwidth_Bps: float


def calibrate(
    comm: MPI.Intracomm, topology: Topology, nbytes: int = 8 * 2**20, repeats: int = 5
) -> tuple[CostModel, list[tuple[int, int, Link]]]:
    """Measure the links of a cluster; all ranks of the communicator call it.

    Between hosts, the first ranks of neighbouring hosts, one pair at a time; inside a host, the
    first two ranks of each. Which messages are eager is a matter of the library: one pair
    shows it. A figure for which there is no pair keeps its default.

    Args:
        comm: the ranks.
        topology: where they are.
        nbytes: bytes of a stream from which a bandwidth is taken.
        repeats: of which the median counts.

    Returns:
        A cost model of the medians over all pairs, and (rank, rank, link) for each pair; the same
        on every rank.
    """
    leaders = [topology.ranks_of_host(host)[0] for host in range(topology.num_hosts)]
    between = list(itertools.pairwise(leaders))
    inside = [
        (ranks[0], ranks[1])
        for host in range(topology.num_hosts)
        if len(ranks := topology.ranks_of_host(host)) > 1
    ]
    links = [(a, b, _measure(comm, a, b, nbytes, repeats)) for a, b in (*between, *inside)]
    defaults = CostModel()
    outer, inner = links[: len(between)], links[len(between) :]
    cost = CostModel(
        nic_bandwidth_Bps=_median([link.bandwidth_Bps for *_, link in outer])
        or defaults.nic_bandwidth_Bps,
        nic_latency_s=_median([link.latency_s for *_, link in outer]) or defaults.nic_latency_s,
        intra_bandwidth_Bps=_median([link.bandwidth_Bps for *_, link in inner])
        or defaults.intra_bandwidth_Bps,
        intra_latency_s=_median([link.latency_s for *_, link in inner]) or defaults.intra_latency_s,
        eager_nbytes=_eager_nbytes(comm, *between[0]) if between else defaults.eager_nbytes,
    )
    return cost, links


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _measure(comm: MPI.Intracomm, a: int, b: int, nbytes: int, repeats: int) -> Link:
    """One pair; the others wait at the end, so that pairs do not disturb each other."""
    link = None
    if comm.rank in (a, b):
        peer = b if comm.rank == a else a
        first = comm.rank == a
        # Once beforehand: connections are made at first use.
        _round_trip_s(comm, peer, first)
        trips = [_round_trip_s(comm, peer, first) for _ in range(10 * repeats)]
        latency_s = statistics.median(trips) / 2
        streams = [_stream_s(comm, peer, first, nbytes) for _ in range(repeats + 1)][1:]
        # The acknowledgement costs one latency, which is no part of the bandwidth.
        seconds = max(statistics.median(streams) - latency_s, 1e-9)
        link = Link(latency_s, nbytes / seconds)
    # Those that wait must not take the cores from the pair.
    quiet_barrier(comm, longest_poll_s=5e-3)
    measured: Link = comm.bcast(link, root=a)
    return measured


def _eager_nbytes(comm: MPI.Intracomm, a: int, b: int) -> int:
    """The largest of some sizes up to which sends end before a receive is posted; 0 for none."""
    found = 0
    if comm.rank in (a, b):
        for nbytes in _EAGER_NBYTES:
            eager = _is_eager(comm, b if comm.rank == a else a, comm.rank == a, nbytes)
            if not eager:
                break
            found = nbytes
    quiet_barrier(comm, longest_poll_s=5e-3)
    measured: int = comm.bcast(found, root=a)
    return measured


def _is_eager(comm: MPI.Intracomm, peer: int, first: bool, nbytes: int) -> bool:
    from mpi4py import MPI

    message = np.zeros(nbytes, np.uint8)
    verdict = np.zeros(1, np.uint8)
    if first:
        request = comm.Isend([message, MPI.BYTE], peer, 0)
        end_s = time.perf_counter() + _EAGER_S
        while not (done := request.Test()) and time.perf_counter() < end_s:
            pass
        verdict[0] = done
        comm.Send([verdict, MPI.BYTE], peer, 1)
        request.Wait()
    else:
        # The message itself is received only after its sender knows.
        comm.Recv([verdict, MPI.BYTE], peer, 1)
        comm.Recv([message, MPI.BYTE], peer, 0)
    return bool(verdict[0])


def _round_trip_s(comm: MPI.Intracomm, peer: int, first: bool) -> float:
    from mpi4py import MPI

    message = np.zeros(_SMALL_NBYTES, np.uint8)
    start_s = time.perf_counter()
    if first:
        comm.Send([message, MPI.BYTE], peer)
        comm.Recv([message, MPI.BYTE], peer)
    else:
        comm.Recv([message, MPI.BYTE], peer)
        comm.Send([message, MPI.BYTE], peer)
    return time.perf_counter() - start_s


def _stream_s(comm: MPI.Intracomm, peer: int, first: bool, nbytes: int) -> float:
    """Seconds until a stream of chunks from the first rank has arrived and is acknowledged."""
    from mpi4py import MPI

    chunk = max(1, nbytes // 16)
    buffer = np.zeros(nbytes, np.uint8)
    chunks = [buffer[at : at + chunk] for at in range(0, nbytes, chunk)]
    acknowledgement = np.zeros(1, np.uint8)
    post = comm.Isend if first else comm.Irecv
    start_s = time.perf_counter()
    requests: list[MPI.Request] = []
    for piece in chunks:
        if len(requests) >= SENDS_IN_FLIGHT:
            requests.pop(0).Wait()
        requests.append(post([piece, MPI.BYTE], peer))
    MPI.Request.Waitall(requests)
    if first:
        comm.Recv([acknowledgement, MPI.BYTE], peer)
    else:
        comm.Send([acknowledgement, MPI.BYTE], peer)
    return time.perf_counter() - start_s
