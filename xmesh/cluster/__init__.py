"""Clusters on one Linux machine, for tests and measurements: emulated hosts, and a real Slurm.

`EmulatedCluster` gives every host a network namespace with rate-limited NICs and a name of its own;
`LocalSlurm` runs Slurm's daemons for several nodes. docs/cluster.md says what that is good for.
"""

from __future__ import annotations

from xmesh.cluster.emulated import EmulatedCluster
from xmesh.cluster.local_slurm import LocalSlurm
from xmesh.cluster.processes import Outcome

__all__ = ["EmulatedCluster", "LocalSlurm", "Outcome"]
