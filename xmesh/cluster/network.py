"""The emulated network: namespaces, links and rate limits, as the commands that make them.

Pure text, so that it can be read and tested without root. One namespace is the switch: a bridge,
with an address of its own for the launcher. Each host is a namespace with one veth pair per NIC to
that bridge, and a token bucket (tbf) on both ends of the pair: full-duplex NICs of the set rate.
Nothing of this is in the machine's own network, so no address or interface can clash with it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

BRIDGE = "br0"
PREFIX = "10.77"  # not seen outside of the cluster's namespaces
SWITCH_ADDRESS = f"{PREFIX}.255.254"
#: Not the machine's own choice, so that all machines measure the same; every kernel has this one.
CONGESTION = "reno"
_CONGESTION_FILE = "/proc/sys/net/ipv4/tcp_congestion_control"
MAX_HOSTS = 250
MAX_NICS = 8
_MIN_BURST_BYTES = 128 * 1024
_BURST_S = 1e-3
#: Long enough for many flows; with 100 ms calls vary more, and some take a tenth longer.
_QUEUE_S = 0.025
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def rate_bps(text: str) -> float:
    """Read a rate for argparse: ``200mbit``, ``1gbit`` or a plain number of bits per second."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmg]?)(?:bit|bps)?(?:/s)?", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give bits per second, such as 200mbit")
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class Step:
    """Part of the network's construction.

    Attributes:
        what: what the machine must offer for it, for people.
        command: the words of a command.
        text: its standard input.
    """

    what: str
    command: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Network:
    """Names and construction of one emulated network.

    Attributes:
        name: prefix of all namespaces.
        num_hosts: how many hosts.
        rate_bps: bits per second of each NIC and direction.
        nics_per_host: how many NICs each host has.
    """

    name: str
    num_hosts: int
    rate_bps: int
    nics_per_host: int

    @property
    def switch(self) -> str:
        """Namespace of the bridge."""
        return f"{self.name}-switch"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts, as their processes see them."""
        return tuple(f"host{host}" for host in range(self.num_hosts))

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Every namespace, the switch last."""
        return (*(f"{self.name}-{host}" for host in self.hosts), self.switch)

    def steps(self) -> Iterator[Step]:
        """The commands that make it, in order."""
        yield Step(
            "network namespaces",
            ("ip", "-batch", "-"),
            "".join(f"netns add {namespace}\n" for namespace in self.namespaces),
        )
        yield Step(
            "bridges",
            ("ip", "-n", self.switch, "-batch", "-"),
            f"link set lo up\nlink add {BRIDGE} type bridge\nlink set {BRIDGE} up\n"
            f"addr add {SWITCH_ADDRESS}/16 dev {BRIDGE}\n",
        )
        yield Step("veth pairs", ("ip", "-n", self.switch, "-batch", "-"), self._links())
        for host in range(self.num_hosts):
            namespace = self.namespaces[host]
            yield Step("addresses", ("ip", "-n", namespace, "-batch", "-"), self._host(host))
            shell = ("ip", "netns", "exec", namespace, "sh", "-e")
            yield Step("TCP settings", shell, f"echo {CONGESTION} >{_CONGESTION_FILE}\n")
            if self.nics_per_host > 1:
                yield Step("ARP settings", shell, self._arp())
                policy = ("ip", "-n", namespace, "-batch", "-")
                yield Step("policy routing", policy, self._policy(host))
            yield Step("tbf queues", ("tc", "-n", namespace, "-batch", "-"), self._limits())
        ports = [port for host in range(self.num_hosts) for port in self._ports(host)]
        yield Step(
            "tbf queues",
            ("tc", "-n", self.switch, "-batch", "-"),
            "".join(self._limit(port) for port in ports),
        )

    def _ports(self, host: int) -> list[str]:
        return [f"h{host}n{nic}" for nic in range(self.nics_per_host)]

    def _address(self, host: int, nic: int) -> str:
        return f"{PREFIX}.{nic}.{host + 1}"

    def _links(self) -> str:
        return "".join(
            f"link add {port} type veth peer name eth{nic} netns {self.namespaces[host]}\n"
            f"link set {port} master {BRIDGE} up\n"
            for host in range(self.num_hosts)
            for nic, port in enumerate(self._ports(host))
        )

    def _host(self, host: int) -> str:
        return "link set lo up\n" + "".join(
            f"link set eth{nic} up\naddr add {self._address(host, nic)}/16 dev eth{nic}\n"
            for nic in range(self.nics_per_host)
        )

    def _arp(self) -> str:
        # All NICs are on one wire: each must answer for, and speak in, its own address alone.
        settings = {"arp_ignore": 1, "arp_announce": 2, "rp_filter": 0}
        return "".join(
            f"echo {value} >/proc/sys/net/ipv4/conf/{interface}/{name}\n"
            for name, value in settings.items()
            for interface in ("all", *(f"eth{nic}" for nic in range(self.nics_per_host)))
        )

    def _policy(self, host: int) -> str:
        lines = []
        for nic in range(self.nics_per_host):
            # What is sent from a NIC's address leaves by that NIC, not by the first that fits.
            lines.append(f"route add {PREFIX}.0.0/16 dev eth{nic} table {100 + nic}")
            lines.append(f"rule add from {self._address(host, nic)} lookup {100 + nic}")
            # UCX believes in a peer only where a route by the rank's own NIC leads to it, and looks
            # for one even where the peer is on the same host. The kernel never uses these.
            lines += [
                f"route add {self._address(host, other)}/32 dev eth{nic}"
                for other in range(self.nics_per_host)
                if other != nic
            ]
        return "".join(f"{line}\n" for line in lines)

    def _limits(self) -> str:
        return "".join(self._limit(f"eth{nic}") for nic in range(self.nics_per_host))

    def _limit(self, interface: str) -> str:
        burst = max(_MIN_BURST_BYTES, round(self.rate_bps / 8 * _BURST_S))
        return (
            f"qdisc add dev {interface} root tbf rate {self.rate_bps}bit burst {burst}b "
            f"latency {_QUEUE_S * 1e3:g}ms\n"
        )
