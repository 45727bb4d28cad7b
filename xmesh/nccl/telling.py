"""What ranks tell each other, over MPI, while NCCL is set up: plain data, and errors for all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xmesh.errors
from xmesh.errors import TransferTimeout, XmeshError, explain
from xmesh.transport.mpi import MpiContext, MpiEndpoint
from xmesh.wait_policy import sleep


@dataclass(frozen=True)
class Gathered:
    """What ranks told each other.

    Attributes:
        of_rank: by rank.
    """

    of_rank: Mapping[int, dict[str, Any]]

    def raise_first(self) -> None:
        """Raise, on all ranks alike, the error of the lowest rank that has one.

        Raises:
            XmeshError: that.
        """
        for _, told in sorted(self.of_rank.items()):
            if told.get("error"):
                kind = getattr(xmesh.errors, told["error"][0], XmeshError)
                error: XmeshError = kind(told["error"][1])
                raise error


def tell(
    context: MpiContext,
    endpoint: MpiEndpoint,
    told: dict[str, Any],
    timeout_s: float,
    subject: str,
) -> Gathered:
    """Tell all ranks of a group something, and hear what they tell.

    Args:
        context: whose transfers are moved on meanwhile.
        endpoint: the group.
        told: plain data; under "error" type and text of an error.
        timeout_s: seconds to wait for the others.
        subject: what is being set up, for the error text.

    Raises:
        TransferTimeout: not all ranks were heard from in time.
    """
    gathering = endpoint.gather_texts(json.dumps(told))
    context.progress.add(gathering)
    try:
        context.progress.wait(
            gathering, timeout_s, lambda: _late(endpoint, timeout_s, subject), sleep
        )
    except BaseException:
        gathering.abandon(endpoint)
        raise
    finally:
        context.progress.remove(gathering)
    texts = gathering.texts or []
    return Gathered(dict(zip(endpoint.ranks, map(json.loads, texts), strict=True)))


def _late(endpoint: MpiEndpoint, timeout_s: float, subject: str) -> XmeshError:
    return TransferTimeout(
        explain(
            f"all ranks must take part in the set-up of NCCL within {timeout_s:g} s",
            values=f"rank {endpoint.rank} (host {endpoint.host_name(endpoint.rank)}) has not heard "
            "from all of them",
            context=f"{subject}, ranks {some(endpoint.ranks)}",
            remedy="look for a rank that has died, or for an error on one",
        )
    )


def failed(error: XmeshError) -> dict[str, Any]:
    """An error for ``tell``."""
    return {"error": [type(error).__name__, str(error)]}


def some(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return ", ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")
