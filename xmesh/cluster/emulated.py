"""EmulatedCluster: several hosts with rate-limited NICs on one Linux machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from xmesh.cluster import launcher, processes
from xmesh.cluster.network import MAX_HOSTS, MAX_NICS, Network, Step
from xmesh.cluster.owner import Owner
from xmesh.cluster.processes import Outcome
from xmesh.errors import XmeshError, explain
from xmesh.mpiexec import Launcher
from xmesh.topology import Topology

#: One file for each cluster that is up; like the namespaces it does not outlive a boot.
RECORDS = Path("/run/xmesh-cluster")
_GRACE_S = 3.0
_REMEDIES = {
    "network namespaces": "start the container with CAP_SYS_ADMIN and CAP_NET_ADMIN "
    "(docker run --privileged)",
    "bridges": "modprobe bridge, or a kernel with CONFIG_BRIDGE",
    "veth pairs": "modprobe veth, or a kernel with CONFIG_VETH",
    "tbf queues": "modprobe sch_tbf, or a kernel with CONFIG_NET_SCH_TBF",
    "policy routing": "a kernel with CONFIG_IP_MULTIPLE_TABLES, or nics_per_host=1",
}


class EmulatedCluster:
    """Hosts with a network namespace, rate-limited NICs and a host name each.

    A context manager, or ``up`` and ``down``. Needs Linux, root and iproute2. What an earlier
    process left behind when it was killed is removed by the next ``up``.

    Args:
        num_hosts: how many hosts; they are called ``host0``, ``host1``, ...
        rate_bps: bits per second of each NIC in each direction, headers included: up to 0.96 of it
            is what arrives.
        nics_per_host: NICs of each host; rank i of n on a host uses NIC ``i * nics_per_host // n``.
        stays: whether it outlives this process: then only ``down`` for its name removes it.

    Raises:
        XmeshError: numbers out of range; by ``up``: no root, no iproute2, or a kernel that lacks
            something.
    """

    def __init__(
        self, num_hosts: int, rate_bps: float, nics_per_host: int = 1, *, stays: bool = False
    ) -> None:
        if not (1 <= num_hosts <= MAX_HOSTS and 1 <= nics_per_host <= MAX_NICS and rate_bps >= 1e5):
            raise XmeshError(
                explain(
                    f"an emulated cluster has 1 to {MAX_HOSTS} hosts, 1 to {MAX_NICS} NICs per "
                    "host and at least 1e5 bits per second per NIC",
                    values=f"num_hosts={num_hosts} nics_per_host={nics_per_host} "
                    f"rate_bps={rate_bps:g}",
                    remedy="rate_bps counts bits: 200e6 is 200 Mbit/s",
                )
            )
        self._shape = (num_hosts, round(rate_bps), nics_per_host)
        self._owner = None if stays else Owner.of()
        self._network: Network | None = None

    @staticmethod
    def missing() -> str:
        """What this machine lacks for an emulated cluster, with a remedy; "" if nothing is seen."""
        if not hasattr(os, "geteuid") or not Path("/proc/self/ns/net").exists():
            return "an emulated cluster needs Linux; use a virtual machine or a container"
        if os.geteuid() != 0:
            return "an emulated cluster needs root; call it with sudo"
        absent = [name for name in ("ip", "tc") if processes.find_tool(name) is None]
        if absent:
            return f"an emulated cluster needs {' and '.join(absent)}; apt-get install iproute2"
        absent = [name for name in ("unshare", "mount") if processes.find_tool(name) is None]
        if absent:
            return f"an emulated cluster needs {' and '.join(absent)}; apt-get install util-linux"
        if not os.access(launcher.AGENT, os.X_OK):
            return f"the agent must be executable; chmod +x {launcher.AGENT.parent}/*.sh"
        return ""

    @classmethod
    def attach(cls, name: str) -> EmulatedCluster:
        """A cluster that is up, by its name.

        Raises:
            XmeshError: there is none of that name.
        """
        network, owner = _read_record(RECORDS / f"{name}.json")
        cluster = cls(network.num_hosts, network.rate_bps, network.nics_per_host)
        cluster._network, cluster._owner = network, owner
        return cluster

    @classmethod
    def names(cls) -> list[str]:
        """Names of the clusters that are up, or of which something is left."""
        return sorted(path.stem for path in RECORDS.glob("*.json"))

    @classmethod
    def remove_leftovers(cls) -> list[str]:
        """Remove clusters whose owner is dead, and only those; their names."""
        removed = []
        for name in cls.names():
            with contextlib.suppress(XmeshError):  # somebody else was quicker
                cluster = cls.attach(name)
                if cluster._owner is not None and not cluster._owner.alive():
                    cluster.down()
                    removed.append(name)
        return removed

    @property
    def network(self) -> Network:
        """Names of hosts and namespaces.

        Raises:
            XmeshError: the cluster is not up.
        """
        if self._network is None:
            raise XmeshError(
                explain(
                    "the emulated cluster must be up",
                    values=f"{self._shape[0]} hosts, down",
                    remedy="use it as a context manager, or call up() first",
                )
            )
        return self._network

    @property
    def name(self) -> str:
        """Its name, the prefix of its namespaces."""
        return self.network.name

    def up(self) -> None:
        """Build it; after an error nothing is left of it."""
        lack = self.missing()
        if lack:
            rule, _, remedy = lack.partition("; ")
            raise XmeshError(explain(rule, values=f"user id {_user()}", remedy=remedy))
        if self._network is not None:
            return
        self.remove_leftovers()
        try:
            self._network = self._claim()
            for step in self._network.steps():
                _do(step)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End all its processes and remove it; does nothing if that has been done."""
        network = self._network
        if network is None:
            return
        # The launchers first: asked, they end their ranks and remove their files under /tmp.
        processes.end(lambda: _pids((network.switch,)), grace_s=_GRACE_S)
        processes.end(lambda: _pids(network.namespaces), grace_s=_GRACE_S, ask=False)
        for namespace in network.namespaces:
            if Path("/run/netns", namespace).exists():
                # It holds the links' ends, so they go with it.
                with contextlib.suppress(subprocess.CalledProcessError):
                    processes.call(["ip", "netns", "delete", namespace])
        (RECORDS / f"{network.name}.json").unlink(missing_ok=True)
        self._network = None

    def __enter__(self) -> EmulatedCluster:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def topology(self, ranks_per_host: int | Sequence[int]) -> Topology:
        """Host and NIC of every rank that `run` starts with these numbers, and NICs' bandwidths."""
        network = self.network
        counts = launcher.counts_per_host(network, ranks_per_host)
        places = [(host, rank) for host, count in enumerate(counts) for rank in range(count)]
        nics = [rank * network.nics_per_host // counts[host] for host, rank in places]
        used = {(host, nic) for (host, _), nic in zip(places, nics, strict=True)}
        return Topology(
            [network.hosts[host] for host, _ in places],
            nics,
            nic_bandwidth_Bps=[network.rate_bps / 8] * len(used),
        )

    def command(self, argv: Sequence[str], ranks_per_host: int | Sequence[int]) -> list[str]:
        """The words that start ``argv`` on the hosts, for callers that follow the ranks themselves.

        They need `environment`, too.
        """
        return launcher.command(self.network, Launcher.find(), argv, ranks_per_host)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment for `command`."""
        return launcher.environment(self.network, extra)

    def run(
        self,
        argv: Sequence[str],
        ranks_per_host: int | Sequence[int],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600,
        on_line: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Run a program on ranks of every host until all have ended.

        Args:
            argv: the program and its arguments, ``[sys.executable, "program.py"]`` for example.
            ranks_per_host: a number, or one for each host.
            env: more environment variables; they win over the cluster's own.
            timeout_s: seconds after which the ranks are ended.
            on_line: called with each line that a rank prints.

        Raises:
            XmeshError: no mpiexec, the cluster is not up, or out of time.
        """
        words = self.command(argv, ranks_per_host)
        return processes.follow(words, self.environment(env), timeout_s, on_line)

    def _claim(self) -> Network:
        """Take a name that nobody has, by making its record."""
        RECORDS.mkdir(mode=0o700, exist_ok=True)
        for number in itertools.count():
            name = f"xm{os.getpid()}" + (f".{number}" if number else "")
            network = Network(name, *self._shape)
            if any(Path("/run/netns", namespace).exists() for namespace in network.namespaces):
                continue  # not ours, and so not to be removed later
            record = {
                "name": name,
                "num_hosts": network.num_hosts,
                "rate_bps": network.rate_bps,
                "nics_per_host": network.nics_per_host,
                "owner": self._owner.to_json() if self._owner else None,
            }
            # Written aside and linked, so that it is never seen half, and never over another.
            draft = RECORDS / f"{name}.{Owner.of().start_time}.tmp"
            draft.write_text(json.dumps(record))
            try:
                os.link(draft, RECORDS / f"{name}.json")
                return network
            except FileExistsError:
                continue
            finally:
                draft.unlink()
        raise AssertionError("unreachable")


def _read_record(path: Path) -> tuple[Network, Owner | None]:
    try:
        record = json.loads(path.read_text())
        shape = [int(record[key]) for key in ("num_hosts", "rate_bps", "nics_per_host")]
        return Network(str(record["name"]), *shape), Owner.from_json(record["owner"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise XmeshError(
            explain(
                "an emulated cluster is known by its name",
                values=f"{path.stem!r}; there are: {', '.join(EmulatedCluster.names()) or 'none'}",
                context=str(error),
                remedy="start one: launch/emulate up",
            )
        ) from error


def _do(step: Step) -> None:
    try:
        processes.call(step.command, step.text)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or str(error)).strip()
        raise XmeshError(
            explain(
                f"this machine must be able to make {step.what} for an emulated cluster",
                values=str(said),
                context=" ".join(step.command),
                remedy=_REMEDIES.get(step.what, "try it by hand, as root"),
            )
        ) from error


def _pids(namespaces: Sequence[str]) -> list[int]:
    """The processes in namespaces: launchers in the switch's; agents, ranks, ... in the hosts'."""
    found = []
    for namespace in namespaces:
        if Path("/run/netns", namespace).exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                found += [
                    int(pid) for pid in processes.call(["ip", "netns", "pids", namespace]).split()
                ]
    return found


def _user() -> str:
    return str(os.geteuid()) if hasattr(os, "geteuid") else "unknown"
