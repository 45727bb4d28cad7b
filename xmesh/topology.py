"""Topology: which host, and which of its NICs, each rank uses, and how fast the NICs are."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from xmesh.errors import TopologyError, explain


@dataclass(frozen=True, init=False)
class Topology:
    """Where ranks ``0 .. num_ranks - 1`` run: hosts and NICs of the cost model.

    Source: DESIGN, "The planner"; the paper has hosts with one NIC each.

    Hosts are numbered in the order in which their first rank comes; NICs densely in order of
    (host, index within the host). Only NICs that a rank uses are counted. Two topologies are equal
    when all fields are.

    Args:
        host_of_rank: the host of each rank, by rank: a sequence, or a mapping whose keys are 0 to
            n - 1. A host is any hashable, a number or a host name for example.
        nic_of_rank: index of the rank's NIC within its host, >= 0; default: one NIC per host.
        host_names: a name per host, where ``host_of_rank`` numbers hosts in order of first
            appearance; default: the hosts as given (``host3`` for the number 3).
        nic_bandwidth_Bps: bytes per second of each NIC and direction, by global NIC index.

    Raises:
        TopologyError: no ranks, ranks with gaps, lengths that differ, a NIC index or bandwidth out
            of range, or names that do not tell hosts apart.
    """

    host_of_rank: tuple[int, ...]
    nic_of_rank: tuple[int, ...]
    """Index of the NIC within its host; `nic` gives the global index."""
    host_names: tuple[str, ...]
    nic_bandwidth_Bps: tuple[float, ...] | None

    def __init__(
        self,
        host_of_rank: Sequence[Hashable] | Mapping[int, Hashable],
        nic_of_rank: Sequence[int] | Mapping[int, int] | None = None,
        host_names: Sequence[str] | None = None,
        nic_bandwidth_Bps: Sequence[float] | None = None,
    ) -> None:
        labels = _by_rank(host_of_rank, "host_of_rank")
        number: dict[Hashable, int] = {}
        hosts = tuple(number.setdefault(label, len(number)) for label in labels)
        nics = (0,) * len(hosts) if nic_of_rank is None else _by_rank(nic_of_rank, "nic_of_rank")
        object.__setattr__(self, "host_of_rank", hosts)
        object.__setattr__(self, "nic_of_rank", _checked_nics(nics, len(hosts)))
        object.__setattr__(self, "host_names", _checked_names(tuple(number), host_names))
        bandwidths = _checked_bandwidths(nic_bandwidth_Bps, self.num_nics)
        object.__setattr__(self, "nic_bandwidth_Bps", bandwidths)

    @classmethod
    def uniform(cls, num_ranks: int, ranks_per_host: int, nics_per_host: int = 1) -> Topology:
        """Hosts of ``ranks_per_host`` consecutive ranks, spread in blocks over the host's NICs.

        The last host has fewer ranks where ``num_ranks`` is not a multiple.

        Raises:
            TopologyError: a number below 1.
        """
        counts = (num_ranks, ranks_per_host, nics_per_host)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
            raise TopologyError(
                explain(
                    "a uniform topology needs ints >= 1",
                    values=f"num_ranks={num_ranks!r} ranks_per_host={ranks_per_host!r} "
                    f"nics_per_host={nics_per_host!r}",
                    remedy="give at least one rank, one rank per host and one NIC per host",
                )
            )
        return cls(
            [rank // ranks_per_host for rank in range(num_ranks)],
            [rank % ranks_per_host * nics_per_host // ranks_per_host for rank in range(num_ranks)],
        )

    @classmethod
    def one_rank_per_host(cls, num_ranks: int) -> Topology:
        """Every rank on a host, and with a NIC, of its own.

        Raises:
            TopologyError: ``num_ranks`` below 1.
        """
        return cls.uniform(num_ranks, 1)

    @property
    def num_ranks(self) -> int:
        """Number of ranks; they are 0 to this less one."""
        return len(self.host_of_rank)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self.host_names)

    @property
    def num_nics(self) -> int:
        """Number of NICs of all hosts together that some rank uses."""
        return len(self._host_of_nic)

    def host(self, rank: int) -> int:
        """Index of the rank's host.

        Raises:
            TopologyError: no such rank.
        """
        # Asked for every message of a plan, so the full check only runs to word its error.
        if not 0 <= rank < len(self.host_of_rank):
            self.require((rank,))
        return self.host_of_rank[rank]

    def host_name(self, rank: int) -> str:
        """Name of the rank's host, for people to read.

        Raises:
            TopologyError: no such rank.
        """
        return self.host_names[self.host(rank)]

    def nic(self, rank: int) -> int:
        """Global index of the rank's NIC.

        Raises:
            TopologyError: no such rank.
        """
        if not 0 <= rank < len(self.host_of_rank):
            self.require((rank,))
        return self._nic_of_rank[rank]

    def nic_host(self, nic: int) -> int:
        """Index of the host of a NIC given by its global index.

        Raises:
            TopologyError: no such NIC.
        """
        self._require_index(nic, self.num_nics, "NIC")
        return self._host_of_nic[nic]

    def ranks_of_host(self, host: int) -> tuple[int, ...]:
        """Ranks of a host, ascending.

        Raises:
            TopologyError: no such host.
        """
        self._require_index(host, self.num_hosts, "host")
        return self._ranks_of_host[host]

    def require(self, ranks: Iterable[int]) -> None:
        """Make sure that every one of ``ranks`` is there.

        Raises:
            TopologyError: names those that are not.
        """
        strangers = [rank for rank in ranks if not 0 <= rank < self.num_ranks]
        if strangers:
            shown = ", ".join(map(str, strangers[:16])) + (", ..." if len(strangers) > 16 else "")
            raise TopologyError(
                explain(
                    "every rank needs a host in the topology",
                    values=f"not in it: {'rank' if len(strangers) == 1 else 'ranks'} {shown}",
                    context=f"topology of ranks 0..{self.num_ranks - 1} on {self.num_hosts} hosts",
                    remedy="give the topology of the whole communicator, "
                    "one host_of_rank entry for every rank",
                )
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; `from_json` reads it back."""
        bandwidths = self.nic_bandwidth_Bps
        return {
            "host_of_rank": list(self.host_of_rank),
            "nic_of_rank": list(self.nic_of_rank),
            "host_names": list(self.host_names),
            "nic_bandwidth_Bps": None if bandwidths is None else list(bandwidths),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Topology:
        """The topology that `to_json` wrote.

        Raises:
            TopologyError: a part is missing, or what is there is no topology.
        """
        try:
            parts = [data[field.name] for field in fields(cls)]
        except (KeyError, TypeError) as error:
            raise TopologyError(
                explain(
                    "the JSON of a topology holds " + ", ".join(f.name for f in fields(cls)),
                    values=repr(data)[:200],
                    remedy="pass what Topology.to_json returned",
                )
            ) from error
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks on {self.num_hosts} hosts with {self.num_nics} NICs"

    @cached_property
    def _host_of_nic(self) -> tuple[int, ...]:
        pairs = set(zip(self.host_of_rank, self.nic_of_rank, strict=True))
        return tuple(host for host, _ in sorted(pairs))

    @cached_property
    def _nic_of_rank(self) -> tuple[int, ...]:
        pairs = list(zip(self.host_of_rank, self.nic_of_rank, strict=True))
        number = {pair: i for i, pair in enumerate(sorted(set(pairs)))}
        return tuple(number[pair] for pair in pairs)

    @cached_property
    def _ranks_of_host(self) -> tuple[tuple[int, ...], ...]:
        ranks: list[list[int]] = [[] for _ in self.host_names]
        for rank, host in enumerate(self.host_of_rank):
            ranks[host].append(rank)
        return tuple(map(tuple, ranks))

    def __getstate__(self) -> dict[str, Any]:
        # What is cached can be computed again, so it does not travel.
        return {field.name: self.__dict__[field.name] for field in fields(self)}

    @staticmethod
    def _require_index(index: int, count: int, what: str) -> None:
        if not 0 <= index < count:
            raise TopologyError(
                explain(
                    f"a {what} is given by its index in the topology",
                    values=f"{what} {index}",
                    remedy=f"give an index from 0 to {count - 1}",
                )
            )


def _by_rank(values: Any, name: str) -> tuple[Any, ...]:
    """A sequence as it is; a mapping in the order of its keys, which must be 0 to n - 1."""
    if isinstance(values, str):
        checked: tuple[Any, ...] = ()  # one host name, or a list that was joined by mistake
    elif not isinstance(values, Mapping):
        checked = tuple(values) if isinstance(values, Iterable) else ()
    else:
        missing = [rank for rank in range(len(values)) if rank not in values]
        if missing:
            raise TopologyError(
                explain(
                    f"{name} must have every rank from 0 up, without gaps",
                    values=f"{len(values)} keys, and no "
                    + ", ".join(f"rank {rank}" for rank in missing[:8]),
                    remedy="give an entry for every rank of the communicator",
                )
            )
        checked = tuple(values[rank] for rank in range(len(values)))
    if not checked:
        raise TopologyError(
            explain(
                f"{name} needs an entry for every rank",
                values=f"{name}={values!r}",
                remedy="give a sequence with at least one entry",
            )
        )
    return checked


def _checked_nics(nics: tuple[Any, ...], num_ranks: int) -> tuple[int, ...]:
    bad = [n for n in nics if isinstance(n, bool) or not hasattr(n, "__index__") or n < 0]
    if bad or len(nics) != num_ranks:
        raise TopologyError(
            explain(
                "nic_of_rank holds, for each rank, the index >= 0 of a NIC of its host",
                values=f"{bad[0]!r}" if bad else f"{len(nics)} entries for {num_ranks} ranks",
                remedy="number the NICs of each host from 0",
            )
        )
    return tuple(map(operator.index, nics))


def _checked_names(labels: tuple[Hashable, ...], names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        checked = tuple(f"host{x}" if isinstance(x, int) else str(x) for x in labels)
    else:
        checked = tuple(names)
        # With hosts numbered otherwise, names[i] could mean two different hosts.
        if labels != tuple(range(len(checked))):
            raise TopologyError(
                explain(
                    "host_names need hosts numbered 0, 1, ... in order of their first rank",
                    values=f"hosts {list(labels[:16])}, {len(checked)} names",
                    remedy="put the names into host_of_rank itself, and leave host_names out",
                )
            )
    if len(set(checked)) != len(checked) or not all(isinstance(x, str) and x for x in checked):
        raise TopologyError(
            explain(
                "host names must be strings that tell the hosts apart",
                values=f"host names {list(checked[:16])}",
                remedy="give each host a name of its own",
            )
        )
    return checked


def _checked_bandwidths(
    bandwidths: Sequence[float] | None, num_nics: int
) -> tuple[float, ...] | None:
    if bandwidths is None:
        return None
    checked = tuple(map(float, bandwidths))
    if len(checked) != num_nics or not all(0 < b < math.inf for b in checked):
        raise TopologyError(
            explain(
                f"nic_bandwidth_Bps holds a finite number > 0 for each of the {num_nics} NICs",
                values=f"nic_bandwidth_Bps={checked[:16]}",
                remedy="give bytes per second and direction, in order of (host, NIC)",
            )
        )
    return checked
