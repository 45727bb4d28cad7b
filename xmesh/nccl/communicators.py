"""NCCL communicators: few, made up front by all ranks together, shared, freed by their last user.

Making one is collective and knows no time-out, so ranks first tell each other what they lack, over
MPI, together with whatever is wrong; and they tell each other how it went before anyone uses it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xmesh.errors
from xmesh.device.gpu import Gpu
from xmesh.errors import TransferTimeout, TransportError, XmeshError, explain
from xmesh.nccl.library import InThread, can_split, id_of, id_text, load_nccl
from xmesh.nccl.order import LaunchOrder
from xmesh.transport.mpi import MpiContext, MpiEndpoint
from xmesh.wait_policy import sleep

Group = tuple[int, ...]

#: Seconds that ``close()`` waits for NCCL to free a communicator: other ranks may close later.
_FREE_S = 5.0


@dataclass(eq=False)
class Communicator:
    """An NCCL communicator of some ranks.

    Attributes:
        group: its ranks, as in the plan, ascending; a rank's place is its number in NCCL.
        handle: CuPy's object.
        gpu: whose current device it was made on.
        parent: from which it was split.
        users: resharders of this process that use it, and communicators split from it.
        broken: why it cannot be used any more; "" while it can.
    """

    group: Group
    handle: Any
    gpu: Gpu
    parent: Communicator | None = None
    users: int = 0
    broken: str = ""

    def abort(self, why: str) -> None:
        """End its kernels, wherever they are: the last resort. Idempotent."""
        if not self.broken:
            self.broken = why
            # NCCL means it not to wait, but nothing promises that.
            _wait_a_moment(InThread(self.gpu, self.handle.abort))


def _wait_a_moment(work: InThread) -> None:
    deadline = time.monotonic() + _FREE_S
    idle = 0
    while not work.over and time.monotonic() < deadline:
        idle += 1
        sleep(idle)


class Communicators:
    """Those of one user communicator in this process.

    Attributes:
        order: of the launches of this process, on whatever communicator.
    """

    def __init__(self, order: LaunchOrder) -> None:
        self.order = order
        self._found: dict[tuple[Group, bool], Communicator] = {}

    @classmethod
    def of(cls, context: MpiContext) -> Communicators:
        """Those of a context, made at the first call."""
        from mpi4py import MPI

        if cls not in context.kept:
            # What belongs to the process is kept on the communicator that only it has.
            process = MpiContext.of(MPI.COMM_SELF)
            order = process.kept.setdefault(LaunchOrder, LaunchOrder(MPI.COMM_WORLD.rank))
            context.kept[cls] = cls(order)
        found: Communicators = context.kept[cls]
        return found

    def sound(self, group: Group, parent: bool = False) -> Communicator | None:
        """The communicator of a group, where there is one that can be used."""
        found = self._found.get((group, parent))
        return None if found is None or found.broken else found

    def keep(self, made: Communicator, parent: bool = False) -> None:
        """Let later resharders use it, too."""
        self._found[made.group, parent] = made

    def release(self, users_of: Sequence[Communicator]) -> None:
        """A user is done with some; those without users are freed."""
        for communicator in users_of:
            communicator.users -= 1
            if communicator.users:
                continue
            for key, found in tuple(self._found.items()):
                if found is communicator:
                    del self._found[key]
            if not communicator.broken:
                communicator.broken = "it was freed"
                # A daemon thread: NCCL may wait for ranks of this host that close later.
                _wait_a_moment(InThread(communicator.gpu, communicator.handle.destroy))
            if communicator.parent is not None:
                self.release([communicator.parent])


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
    finally:
        context.progress.remove(gathering)
    texts = gathering.texts or []
    return Gathered(dict(zip(endpoint.ranks, map(json.loads, texts), strict=True)))


def _late(endpoint: MpiEndpoint, timeout_s: float, subject: str) -> XmeshError:
    endpoint.abandon([], [])  # the collective may still be under way: a new one next time
    return TransferTimeout(
        explain(
            f"all ranks must take part in the set-up of NCCL within {timeout_s:g} s",
            values=f"rank {endpoint.rank} (host {endpoint.host_name(endpoint.rank)}) has not heard "
            "from all of them",
            context=f"{subject}, ranks {_some(endpoint.ranks)}",
            remedy="look for a rank that has died, or for an error on one",
        )
    )


def failed(error: XmeshError) -> dict[str, Any]:
    """An error for ``tell``."""
    return {"error": [type(error).__name__, str(error)]}


def gpu_name(gpu: Gpu) -> str:
    """The GPU itself, whatever number this process gives it: its place on the PCI bus."""
    return str(gpu.cupy.cuda.runtime.deviceGetPCIBusId(gpu.device))


def require_own_gpus(names: Mapping[int, str], endpoint: MpiEndpoint, subject: str) -> None:
    """Refuse ranks that share a GPU: NCCL would hang, or refuse them in words of its own.

    Args:
        names: by rank, from ``gpu_name``.
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
) -> dict[Group, Communicator]:
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
        Those that this rank is in, by group; ``Communicators.release`` them after use.

    Raises:
        TransportError: NCCL failed on a rank; on all ranks alike.
        TransferTimeout: a rank stayed away, or making them took too long.
    """
    kept = Communicators.of(context)
    rank = endpoint.rank
    lacks = [i for i, group in enumerate(groups) if rank in group and kept.sound(group) is None]
    orphan = kept.sound(endpoint.ranks, parent=True) is None
    told = {"lacks": lacks, "orphan": orphan}
    heard = tell(context, endpoint, told, timeout_s, subject)
    wanted = sorted({i for state in heard.of_rank.values() for i in state["lacks"]})
    if wanted:
        orphans = any(state["orphan"] for state in heard.of_rank.values())
        maker = _Maker(context, endpoint, gpu, timeout_s, subject, kept)
        maker.make([groups[i] for i in wanted], orphans)
    mine = {}
    for group in groups:
        if rank in group:
            communicator = kept.sound(group)
            assert communicator is not None  # just made, or seen above
            communicator.users += 1
            mine[group] = communicator
    return mine


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

    def make(self, groups: Sequence[Group], orphans: bool) -> None:
        """Make them, and keep them once all ranks have theirs."""
        everyone = self._endpoint.ranks
        split = can_split(self._nccl) and list(groups) != [everyone]
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
        except XmeshError:
            for communicator, _ in self._made:
                communicator.abort("it was not made on all ranks")
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
        running = InThread(self._gpu, work)
        where = (
            f"{self._subject}, rank {self._endpoint.rank} (host "
            f"{self._endpoint.host_name(self._endpoint.rank)}), communicators of ranks "
            + ("; ".join(_some(group) for group in groups[:4]) or "other than this one")
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


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")
