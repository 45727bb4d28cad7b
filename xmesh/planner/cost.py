"""What moving bytes costs: latency and bandwidth between hosts and inside one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from xmesh.errors import PlanError, explain
from xmesh.topology import Topology


@dataclass(frozen=True)
class CostModel:
    """Latency-bandwidth model of a cluster; NICs are full duplex.

    The defaults describe 10 Gbit/s NICs; a measured model should replace them where plans are
    compared with wall-clock time.

    Attributes:
        nic_bandwidth_Bps: bytes per second of one NIC in one direction, unless the topology gives
            its own figure for that NIC.
        nic_latency_s: seconds that a message between hosts costs beside its bytes.
        intra_bandwidth_Bps: bytes per second between two ranks of one host.
        intra_latency_s: seconds that a message inside a host costs beside its bytes.
        eager_nbytes: bytes of the largest message between hosts that the library takes off its
            sender's hands at once; larger ones occupy the sender until they have left. Matters
            where simulated messages share NICs, and there alone.

    Raises:
        PlanError: a bandwidth that is not positive and finite, or a latency that is negative.
    """

    nic_bandwidth_Bps: float = 1.25e9
    nic_latency_s: float = 20e-6
    intra_bandwidth_Bps: float = 5e9
    intra_latency_s: float = 5e-6
    eager_nbytes: float = 65536.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            least_ok = number and (value > 0 if field.name.endswith("Bps") else value >= 0)
            if not (least_ok and math.isfinite(value)):
                raise PlanError(
                    explain(
                        "a cost model needs bandwidths > 0 and latencies >= 0, sizes too, all "
                        "finite",
                        values=f"{field.name}={value!r}",
                        remedy="give bytes per second, seconds, and bytes",
                    )
                )
            # One value, one text: plans are compared by their JSON.
            object.__setattr__(self, field.name, float(value))

    def bandwidth_Bps(self, topology: Topology, nic: int) -> float:
        """Bytes per second of one NIC."""
        own = topology.nic_bandwidth_Bps
        return self.nic_bandwidth_Bps if own is None else own[nic]

    def host_bandwidth_Bps(self, topology: Topology, host: int) -> float:
        """Bytes per second of all NICs of a host together."""
        nics = {topology.nic(rank) for rank in topology.ranks_of_host(host)}
        return sum(self.bandwidth_Bps(topology, nic) for nic in sorted(nics))

    def link(self, topology: Topology, source: int, destination: int) -> tuple[float, float]:
        """Latency in seconds and bandwidth in bytes per second from one rank to another."""
        if topology.host(source) == topology.host(destination):
            return self.intra_latency_s, self.intra_bandwidth_Bps
        slower = min(
            self.bandwidth_Bps(topology, topology.nic(source)),
            self.bandwidth_Bps(topology, topology.nic(destination)),
        )
        return self.nic_latency_s, slower

    def to_json(self) -> dict[str, float]:
        """The fields as a plain dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostModel:
        """Inverse of ``to_json``; fields that are left out keep their defaults.

        Raises:
            PlanError: an unknown field, or a value that is no number.
        """
        known = [field.name for field in fields(cls)]
        read: Any = data
        if not isinstance(read, Mapping):
            data = {"": data}
        wrong = {
            name: value
            for name, value in data.items()
            if name not in known or not isinstance(value, (int, float))
        }
        if wrong:
            raise PlanError(
                explain(
                    f"a cost model has the fields {', '.join(known)}, all numbers",
                    values=", ".join(f"{name}={value!r}" for name, value in wrong.items()),
                    remedy="correct the fields, or leave them out for their defaults",
                )
            )
        return cls(**data)
