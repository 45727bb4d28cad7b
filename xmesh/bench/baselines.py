"""Baselines: what a careful programmer would write with plain MPI, to compare with.

Subarray types, communicators and buffers are made beforehand and are not timed. Where an array is
replicated, the work goes round among the replicas. The calls are the nonblocking ones, because the
blocking ones spin while they wait, which 20 ranks on few cores would pay for dearly; see
``xmesh.bench.waiting``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xmesh.bench.methods import Method
from xmesh.bench.waiting import quiet_wait
from xmesh.box import Box
from xmesh.layout import Layout
from xmesh.planner.unit_task import Streams, UnitTask

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[np.uint32]


class Piece(NamedTuple):
    """What one rank gets from one other.

    Attributes:
        task: index of the unit task.
        box: the region.
        sender: rank that gives it; the receiver itself when that holds it.
        receiver: rank that needs it.
    """

    task: int
    box: Box
    sender: int
    receiver: int


def applies(method: Method, src: Layout, dst: Layout) -> bool:
    """Whether a baseline makes sense: a broadcast needs a box that several ranks lack."""
    if method.strategy != "mpi_bcast":
        return True
    return most_receivers(Streams(src, dst).unit_tasks()) > 1


def most_receivers(tasks: Iterable[UnitTask]) -> int:
    """The most ranks that lack the box of one unit task."""
    return max((len(_lacking(task)) for task in tasks), default=0)


def pieces(src: Layout, dst: Layout) -> list[Piece]:
    """Who gets what from whom; replicas of a box of the source take turns."""
    found = []
    turns: dict[tuple[int, ...], int] = {}
    for task in Streams(src, dst).unit_tasks():
        for receiver in task.receivers:
            if receiver in task.senders:
                sender = receiver
            else:
                turn = turns.get(task.senders, 0)
                sender = task.senders[turn % len(task.senders)]
                turns[task.senders] = turn + 1
            found.append(Piece(task.index, task.box, sender, receiver))
    return found


def _lacking(task: UnitTask) -> list[int]:
    return [rank for rank in task.receivers if rank not in task.senders]


class Baseline:
    """Moves an array from layout to layout by plain MPI.

    A context manager. All ranks of the communicator make it; a rank holds one box of a layout at
    most.

    Args:
        comm: has the ranks of both layouts.
        src: layout that holds the array.
        dst: layout that needs it.
    """

    def __init__(self, comm: MPI.Intracomm, src: Layout, dst: Layout) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.src_box: Box | None
        self.dst_box: Box | None
        (self.src_box,) = src.boxes(self.rank) or (None,)
        (self.dst_box,) = dst.boxes(self.rank) or (None,)
        self._made: list[Any] = []
        self.prepare(src, dst)

    def prepare(self, src: Layout, dst: Layout) -> None:
        """Make all that calls have in common."""
        raise NotImplementedError

    def __call__(self, local: Array | None, out: Array | None) -> None:
        """Move an array.

        Args:
            local: this rank's box of the source; None where it has none.
            out: where this rank's box of the destination goes; None where it has none.
        """
        raise NotImplementedError

    def __enter__(self) -> Baseline:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._made:
            each.Free()

    def part_of(self, whole: Box | None, box: Box) -> MPI.Datatype:
        """A subarray type: a region of an array that holds a box."""
        from mpi4py import MPI

        assert whole is not None
        start = box.offset(whole.start).start
        made = MPI.UINT32_T.Create_subarray(whole.shape, box.shape, start).Commit()
        self._made.append(made)
        return made

    def group(self, ranks: list[int]) -> MPI.Intracomm:
        """A communicator of some ranks, in this order; they alone call it."""
        made = self.comm.Create_group(self.comm.group.Incl(ranks))
        self._made.append(made)
        return made

    def copy(self, box: Box, local: Array | None, out: Array | None) -> None:
        """What this rank holds and needs."""
        if local is not None and out is not None:
            out[box.slices(self.dst_box)] = local[box.slices(self.src_box)]


class Alltoallw(Baseline):
    """One ``MPI_Ialltoallw`` over the ranks of both meshes, with a subarray type for each pair."""

    def prepare(self, src: Layout, dst: Layout) -> None:
        """See Baseline."""
        from mpi4py import MPI

        ranks = sorted({*src.ranks, *dst.ranks})
        self._group = self.group(ranks) if self.rank in ranks else None
        place = {rank: i for i, rank in enumerate(ranks)}
        count = len(ranks)
        self._sends, self._receives = (
            ([0] * count, [0] * count, [MPI.BYTE] * count) for _ in range(2)
        )
        for piece in pieces(src, dst):
            if self.rank == piece.sender:
                self._sends[0][place[piece.receiver]] = 1
                self._sends[2][place[piece.receiver]] = self.part_of(self.src_box, piece.box)
            if self.rank == piece.receiver:
                self._receives[0][place[piece.sender]] = 1
                self._receives[2][place[piece.sender]] = self.part_of(self.dst_box, piece.box)

    def __call__(self, local: Array | None, out: Array | None) -> None:
        """See Baseline."""
        if self._group is None:
            return
        nothing = np.empty(0, np.uint32)
        request = self._group.Ialltoallw(
            [nothing if local is None else local, *self._sends],
            [nothing if out is None else out, *self._receives],
        )
        quiet_wait([request])


class Isend(Baseline):
    """``MPI_Isend`` and ``MPI_Irecv`` of whole boxes of the source; each takes its part of them."""

    def prepare(self, src: Layout, dst: Layout) -> None:
        """See Baseline."""
        found = pieces(src, dst)
        self._receivers = sorted(p.receiver for p in found if p.sender == self.rank != p.receiver)
        self._own = [p.box for p in found if p.sender == self.rank == p.receiver]
        self._wanted = []
        for piece in found:
            if piece.receiver == self.rank != piece.sender:
                (whole,) = src.boxes(piece.sender)
                buffer = np.empty(whole.shape, np.uint32)
                self._wanted.append((piece.sender, buffer, piece.box, whole))

    def __call__(self, local: Array | None, out: Array | None) -> None:
        """See Baseline."""
        receives = [self.comm.Irecv(buffer, sender) for sender, buffer, *_ in self._wanted]
        sends = [self.comm.Isend(local, receiver) for receiver in self._receivers]
        for box in self._own:
            self.copy(box, local, out)
        quiet_wait(receives + sends)
        if out is not None:
            for _, buffer, box, whole in self._wanted:
                out[box.slices(self.dst_box)] = buffer[box.slices(whole)]


class Bcast(Baseline):
    """One ``MPI_Ibcast`` for each unit task, all at once, from a sender to those that lack it."""

    def prepare(self, src: Layout, dst: Layout) -> None:
        """See Baseline."""
        self._own: list[Box] = []
        self._parts: list[tuple[MPI.Intracomm, bool, MPI.Datatype]] = []
        turn = 0
        for task in Streams(src, dst).unit_tasks():
            if self.rank in task.senders and self.rank in task.receivers:
                self._own.append(task.box)
            lacking = _lacking(task)
            if not lacking:
                continue
            # A host's ranks are neighbours: half the list further is another host, if there is one.
            count = len(task.senders)
            sender = task.senders[(turn * max(1, count // 2) + turn // 2) % count]
            turn += 1
            if self.rank == sender:
                self._parts.append(
                    (self.group([sender, *lacking]), True, self.part_of(self.src_box, task.box))
                )
            elif self.rank in lacking:
                self._parts.append(
                    (self.group([sender, *lacking]), False, self.part_of(self.dst_box, task.box))
                )

    def __call__(self, local: Array | None, out: Array | None) -> None:
        """See Baseline."""
        requests = [
            group.Ibcast([local if sends else out, 1, part]) for group, sends, part in self._parts
        ]
        for box in self._own:
            self.copy(box, local, out)
        quiet_wait(requests)


MOVERS: dict[str, Callable[[MPI.Intracomm, Layout, Layout], Baseline]] = {
    "mpi_isend": Isend,
    "mpi_alltoallw": Alltoallw,
    "mpi_bcast": Bcast,
}
