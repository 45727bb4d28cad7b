"""Making NCCL communicators: all ranks of a plan together, up front.

It is collective and knows no time-out, so ranks first tell each other what they lack, over MPI,
together with whatever is wrong; and they tell each other how it went before anyone uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from xmesh.device.gpu import Gpu
from xmesh.errors import TransferTimeout, TransportError, XmeshError, explain
from xmesh.nccl.communicators import Communicator, Communicators, Group, abort_all
from xmesh.nccl.launcher import in_thread
from xmesh.nccl.library import can_split, id_of, id_text, load_nccl
from xmesh.nccl.telling import failed, some, tell
from xmesh.transport.mpi import MpiContext, MpiEndpoint
from xmesh.wait_policy import sleep


class Connected(NamedTuple):
    """Communicators of one rank for one plan.

    Attributes:
        of_group: by group.
        used: all that it uses, those from which others were split too.
    """

    of_group: dict[Group, Communicator]
    used: list[Communicator]


def require_own_gpus(names: Mapping[int, str], endpoint: MpiEndpoint, subject: str) -> None:
    """Refuse ranks that share a GPU: NCCL would hang, or refuse them in words of its own.

    Args:
        names: by rank, ``Gpu.bus``.
        endpoint: knows the ranks' hosts.
        subject: what is being set up.

    Raises:
        TransportError: two ranks share one; on all ranks alike.
    """
    seen: dict[tuple[str, str], int] = {}
    for rank, name in sorted(names.items()):
        host = endpoint.host_name(rank)
        first = seen.setdefault((host, name), rank)
        if first != rank:
            raise TransportError(
                explain(
                    "NCCL needs a GPU of its own for each rank",
                    values=f"ranks {first} and {rank} both use GPU {name} of host {host}",
                    context=subject,
                    remedy="start one rank per GPU (launch/bind-gpu.sh), or transport='mpi'",
                )
            )


def connect_all(
    context: MpiContext,
    endpoint: MpiEndpoint,
    groups: Sequence[Group],
    gpu: Gpu,
    timeout_s: float,
    subject: str,
) -> Connected:
    """Communicators of this rank's groups; all ranks of the endpoint call it.

    Each rank must have a GPU of its own, see ``require_own_gpus``.

    Args:
        context: of the user's communicator.
        endpoint: all ranks of the plan.
        groups: the same on all ranks, in the same order.
        gpu: of this rank.
        timeout_s: seconds for each of the steps.
        subject: what is being set up, for error texts.

    Returns:
        Those that this rank is in, and what to give to ``Communicators.release`` after use.

    Raises:
        TransportError: NCCL failed on a rank; on all ranks alike.
        TransferTimeout: a rank stayed away, or making them took too long.
    """
    kept = Communicators.of(context)
    rank = endpoint.rank
    lacks = [i for i, group in enumerate(groups) if rank in group and kept.sound(group) is None]
    orphan = kept.sound(endpoint.ranks, parent=True) is None
    told = {"lacks": lacks, "orphan": orphan, "splits": can_split(load_nccl())}
    states = tell(context, endpoint, told, timeout_s, subject).of_rank.values()
    wanted = sorted({i for state in states for i in state["lacks"]})
    if wanted:
        orphans = any(state["orphan"] for state in states)
        splits = all(state["splits"] for state in states)
        maker = _Maker(context, endpoint, gpu, timeout_s, subject, kept)
        maker.make([groups[i] for i in wanted], orphans, splits)
    mine = {}
    for group in groups:
        if rank in group:
            communicator = kept.sound(group)
            assert communicator is not None  # just made, or seen above
            mine[group] = communicator
    # Ranks without a part in what was split use the parent, too: all have it, or none.
    parent = kept.sound(endpoint.ranks, parent=True)
    used = [*mine.values(), *([parent] if parent is not None else [])]
    for communicator in used:
        communicator.users += 1
    return Connected(mine, used)


class _Maker:
    """Makes communicators of some groups, collectively over an endpoint."""

    def __init__(
        self,
        context: MpiContext,
        endpoint: MpiEndpoint,
        gpu: Gpu,
        timeout_s: float,
        subject: str,
        kept: Communicators,
    ) -> None:
        self._context, self._endpoint, self._gpu = context, endpoint, gpu
        self._timeout_s, self._subject, self._kept = timeout_s, subject, kept
        self._nccl = load_nccl()
        self._made: list[tuple[Communicator, bool]] = []

    def make(self, groups: Sequence[Group], orphans: bool, splits: bool) -> None:
        """Make them, and keep them once all ranks have theirs.

        Args:
            groups: of which communicators are made.
            orphans: a rank has no parent to split from.
            splits: all ranks can split; all of these are the same on all ranks.
        """
        everyone = self._endpoint.ranks
        split = splits and list(groups) != [everyone]
        # By itself: each group; or the parent of all of them, where there is none yet.
        ids = self._share_ids([everyone] if split and orphans else [] if split else groups)

        def work() -> None:
            if not split:
                for group, text in zip(groups, ids, strict=True):
                    self._by_itself(group, text, parent=False)
                return
            if orphans:
                self._by_itself(everyone, ids[0], parent=True)
                parent = self._made[0][0]
            else:
                found = self._kept.sound(everyone, parent=True)
                assert found is not None  # no rank said that it has none
                parent = found
            for disjoint in _rounds(groups):
                self._split(parent, disjoint)

        error: XmeshError | None = None
        try:
            self._in_time(work, [group for group in groups if self._endpoint.rank in group])
        except XmeshError as failure:
            error = failure
        try:
            told = failed(error) if error is not None else {}
            # A rank that failed at once waits here for those that wait in vain for it.
            limit_s = 2 * self._timeout_s
            tell(self._context, self._endpoint, told, limit_s, self._subject).raise_first()
        except XmeshError as failure:
            abort_all([made for made, _ in self._made], "it was not made on all ranks")
            if error is not None and isinstance(failure, TransferTimeout):
                raise error from None  # says more than that others were not heard of
            raise
        for communicator, parent in self._made:
            self._kept.keep(communicator, parent)
            if communicator.parent is not None:
                communicator.parent.users += 1

    def _share_ids(self, groups: Sequence[Group]) -> list[str]:
        """A unique id for each group, from its lowest rank, or that rank's error for all."""
        told: dict[str, Any] = {}
        try:
            mine = [i for i, group in enumerate(groups) if group[0] == self._endpoint.rank]
            told = {"ids": {str(i): id_text(self._nccl.get_unique_id()) for i in mine}}
        except Exception as error:
            told = failed(
                TransportError(
                    explain(
                        "NCCL must give a unique id for a new communicator",
                        values=f"{type(error).__name__}: {error}",
                        context=f"rank {self._endpoint.rank} (host "
                        f"{self._endpoint.host_name(self._endpoint.rank)}), {self._subject}",
                        remedy="set NCCL_DEBUG=INFO for its reason (often NCCL_SOCKET_IFNAME)",
                    )
                )
            )
        heard = tell(self._context, self._endpoint, told, self._timeout_s, self._subject)
        heard.raise_first()
        ids: dict[str, str] = {}
        for state in heard.of_rank.values():
            ids |= state["ids"]
        return [ids[str(i)] for i in range(len(groups))]

    def _by_itself(self, group: Group, text: str, parent: bool) -> None:
        rank = self._endpoint.rank
        if rank in group:
            handle = self._nccl.NcclCommunicator(len(group), id_of(text), group.index(rank))
            self._made.append((Communicator(group, handle, self._gpu), parent))

    def _split(self, parent: Communicator, disjoint: Sequence[Group]) -> None:
        rank = self._endpoint.rank
        color, mine = next(
            ((color, group) for color, group in enumerate(disjoint) if rank in group), (-1, ())
        )
        handle = parent.handle.commSplit(color, mine.index(rank) if mine else 0)
        if mine:
            self._made.append((Communicator(mine, handle, self._gpu, parent), False))

    def _in_time(self, work: Callable[[], None], groups: Sequence[Group]) -> None:
        """Do what may block for ever, within the time-out."""
        running = in_thread(self._gpu, work)
        where = (
            f"{self._subject}, rank {self._endpoint.rank} (host "
            f"{self._endpoint.host_name(self._endpoint.rank)}), communicators of ranks "
            + ("; ".join(some(group) for group in groups[:4]) or "other than this one")
        )
        self._context.progress.wait(
            running,
            self._timeout_s,
            lambda: TransferTimeout(
                explain(
                    f"NCCL must make its communicators within {self._timeout_s:g} s",
                    context=where,
                    remedy="set NCCL_DEBUG=INFO to see what it waits for; raise timeout_s for many "
                    "ranks",
                )
            ),
            sleep,
        )
        if running.error is not None:
            raise TransportError(
                explain(
                    "NCCL must make its communicators",
                    values=f"{type(running.error).__name__}: {running.error}",
                    context=where,
                    remedy="set NCCL_DEBUG=INFO for its reason",
                )
            ) from running.error


def _rounds(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that can be split off at once, as none of them share a rank."""
    rounds: list[list[Group]] = []
    for group in groups:
        for disjoint in rounds:
            if not any(set(group) & set(other) for other in disjoint):
                disjoint.append(group)
                break
        else:
            rounds.append([group])
    return rounds
