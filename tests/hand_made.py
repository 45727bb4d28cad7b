"""Plans small enough to work out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from xmesh.box import Box
from xmesh.layout import Layout
from xmesh.mesh import DeviceMesh
from xmesh.planner import CostModel, Plan, plan
from xmesh.planner.plans import ListedTransfers
from xmesh.topology import Topology

#: Bytes per second between hosts are 1, so seconds are bytes; inside a host all is free.
NICS_ONLY = CostModel(1.0, 0.0, 1e15, 0.0)


def broadcast_plan(hosts: int, per_host: int, strategy: str, nbytes: int, **options) -> Plan:
    """Rank 0, alone on its host, to ``hosts`` hosts of ``per_host`` ranks that need everything."""
    n = hosts * per_host
    settings: dict[str, Any] = {
        "dtype": "int8",
        "topology": Topology([0, *(1 + rank // per_host for rank in range(n))]),
        "strategy": strategy,
        "cost": NICS_ONLY,
    }
    return plan(
        Layout(DeviceMesh([0]), "R", (nbytes,)),
        Layout(DeviceMesh.arange((n,), start=1), "R", (nbytes,)),
        **settings | options,
    )


GRIDS = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2), (5, 4)]


def listed(src: Layout, dst: Layout, topology: Topology, transfers, cost=NICS_ONLY) -> Plan:
    made = plan(src, dst, "int8", topology, strategy="send_recv", cost=cost)
    return dataclasses.replace(made, table=ListedTransfers(tuple(transfers)))


def span(a: int, b: int) -> tuple[Box, ...]:
    return (Box((a,), (b,)),)
