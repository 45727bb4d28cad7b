"""Wait policies: what a rank does between two looks at messages that have not come.

On a core of its own a rank looks again at once, which costs least time per message. Where ranks
share cores, one that looks takes the core from the one that has work, so it sleeps, and the longer
the longer nothing comes. Yielding alone is worse: who yields is back at once to look in vain.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from xmesh.errors import OptionError, explain

#: Called after each look that found nothing, with the number of such looks in a row.
Pause = Callable[[int], None]

WAIT_POLICIES = ("auto", "spin", "sleep")
#: Sets the policy for a whole program.
WAIT_VARIABLE = "XMESH_WAIT"

#: Looks before a rank that spins begins to yield: a few milliseconds, longer than messages take.
_SPINS = 10_000
#: Sleep after the first look in vain, by which each further one is longer, and the longest.
_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 500e-6
#: In this process's environment: how many ranks its launcher has started on this host.
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def spin(idle: int) -> None:
    """Look again at once; after a while let others have the core, should there be any."""
    if idle > _SPINS:
        os.sched_yield()


def sleep(idle: int) -> None:
    """Leave the core to others."""
    time.sleep(min(_LONGEST_SLEEP_S, _SLEEP_S * idle))


def wanted_policy(policy: str, environ: Mapping[str, str]) -> str:
    """The policy asked for: by the caller, else by the environment, else "auto".

    Raises:
        OptionError: no such policy.
    """
    wanted = policy if policy != "auto" else environ.get(WAIT_VARIABLE, "auto")
    if wanted not in WAIT_POLICIES:
        source = "wait" if policy != "auto" else f"the variable {WAIT_VARIABLE}"
        raise OptionError(
            explain(
                f"{source} must be one of {', '.join(WAIT_POLICIES)}",
                values=f"{wanted!r}",
                remedy="leave it out: ranks then spin only where each has a core of its own",
            )
        )
    return wanted


def choose_pause(policy: str, dedicated: bool) -> Pause:
    """What a wait does.

    Args:
        policy: from ``wanted_policy``.
        dedicated: each rank of this host has a core of its own; decides under "auto".
    """
    return spin if policy == "spin" or (policy == "auto" and dedicated) else sleep


def have_own_cores(cores: Sequence[frozenset[int]], environ: Mapping[str, str]) -> bool:
    """Whether each rank of this host has a core of its own.

    Args:
        cores: for each rank known on this host, the cores that it may run on.
        environ: of this process; says of some launchers how many ranks they started here, as there
            may be more than are known.
    """
    texts = [environ.get(name, "") for name in _LOCAL_SIZES]
    num_ranks = max([len(cores), *(int(text) for text in texts if text.isdecimal())])
    return num_ranks <= len(frozenset().union(*cores))


def own_cores() -> frozenset[int]:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
