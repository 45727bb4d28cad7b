"""How MPICH's and Open MPI's mpiexec start ranks on the hosts of an emulated cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from xmesh.cluster.network import BRIDGE, Network
from xmesh.cluster.processes import full_path
from xmesh.errors import XmeshError, explain
from xmesh.mpiexec import Launcher

_HERE = Path(__file__).parent
AGENT = _HERE / "agent.sh"
_NIC = _HERE / "nic.sh"


def counts_per_host(network: Network, ranks_per_host: int | Sequence[int]) -> tuple[int, ...]:
    """The number of ranks of each host.

    Raises:
        XmeshError: not one for each host, or no ranks at all.
    """
    if isinstance(ranks_per_host, int):
        counts = (ranks_per_host,) * network.num_hosts
    else:
        counts = tuple(ranks_per_host)
    if len(counts) != network.num_hosts or min(counts) < 0 or not any(counts):
        raise XmeshError(
            explain(
                "ranks_per_host is a number, or one for each host, and not all are 0",
                values=f"ranks_per_host={ranks_per_host!r}, {network.num_hosts} hosts",
                remedy="give for example 2, or [2, 2, 1, 0] for four hosts",
            )
        )
    return counts


def command(
    network: Network, launcher: Launcher, argv: Sequence[str], ranks_per_host: int | Sequence[int]
) -> list[str]:
    """The words that start a program on every rank; ranks are numbered host by host."""
    counts = counts_per_host(network, ranks_per_host)
    places = [f"{host}:{count}" for host, count in zip(network.hosts, counts, strict=True) if count]
    words = ["ip", "netns", "exec", network.switch, launcher.path]
    if launcher.open_mpi:
        words += ["--mca", "plm_rsh_agent", str(AGENT), "--host", ",".join(places)]
        words += ["--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]
    else:
        words += ["-launcher", "ssh", "-launcher-exec", str(AGENT), "-iface", BRIDGE]
        words += ["-hosts", ",".join(places)]
    words += ["-n", str(sum(counts))]
    if network.nics_per_host > 1:
        words += [str(_NIC), str(network.nics_per_host)]
    return [*words, *argv]


def environment(network: Network, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with what keeps MPI's traffic on the emulated NICs.

    Args:
        network: the network.
        extra: variables of the caller's, which win.
    """
    result = dict(os.environ)
    # Many ranks on few cores: one thread each, and a rank that waits gives its core up.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        result.setdefault(name, "1")
    result.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    result.setdefault("XMESH_WAIT", "sleep")
    result |= {"PYTHONUNBUFFERED": "1", "PATH": full_path()}
    # Between hosts TCP alone. Within a host MPICH has shared memory of its own, Open MPI "sm".
    result |= {
        "XMESH_CLUSTER": network.name,
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "eth0",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
    }
    return result | dict(extra or {})
