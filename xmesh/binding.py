"""Binding: from a plan and a communicator to endpoints that all ranks have agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xmesh.agreement import Agreement, Record, short
from xmesh.device.gpu import Gpu
from xmesh.errors import PlanError, TransferTimeout, TransportError, XmeshError, explain
from xmesh.planner import Plan
from xmesh.program import Program, compile_program
from xmesh.progress import Progress
from xmesh.transport.base import Endpoint
from xmesh.transport.loopback import LoopbackGroup
from xmesh.wait_policy import sleep

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.nccl.link import NcclLink
    from xmesh.transport.mpi import MpiContext, MpiEndpoint
    from xmesh.world import World

#: Seconds after which a wait gives up, unless told otherwise.
TIMEOUT_S = 300.0
TRANSPORTS = ("auto", "mpi", "nccl", "loopback")


@dataclass
class Binding:
    """How the ranks of this process reach the others.

    Attributes:
        endpoints: one for each rank of the plan that runs here.
        programs: what those ranks do, in the same order.
        first_tag: first of the tags reserved, the same on all ranks.
        progress: moves what is in flight.
        transport: "loopback" (all ranks run here), "mpi", "nccl"; "none" on ranks without a part.
        why: what decided on it.
        nccl: what replaces messages for the rank that runs here, under "nccl".
    """

    endpoints: Sequence[Endpoint]
    programs: Sequence[Program]
    first_tag: int
    progress: Progress
    transport: str
    why: str
    nccl: NcclLink | None = None

    @property
    def loopback(self) -> bool:
        """All ranks run here."""
        return self.transport == "loopback"

    def release(self) -> None:
        """Give the endpoints back."""
        if self.nccl is not None:
            self.nccl.release()
            self.nccl = None
        for endpoint in self.endpoints:
            endpoint.release()
        self.endpoints = ()


def bind(
    plan: Plan,
    comm: MPI.Intracomm | World | None,
    transport: str,
    timeout_s: float,
    num_tags: int,
    problem: XmeshError | None = None,
    gpu: Gpu | None = None,
) -> Binding:
    """Connect the ranks of a plan, once all of them are known to have the same one.

    Args:
        plan: the plan.
        comm: see Resharder.
        transport: see Resharder.
        timeout_s: seconds to wait for the others.
        num_tags: tags to reserve.
        problem: what is wrong with this rank's other options; all ranks raise it.
        gpu: this rank's, where its arrays are to lie there.

    Raises:
        AgreementError, PlanError, TransferTimeout, TransportError: see Resharder.
    """
    chosen = choose_transport(comm, transport)
    if chosen == "loopback":
        if problem is not None:
            raise problem
        group = LoopbackGroup(plan.ranks)
        endpoints = [group.endpoint(rank) for rank in plan.ranks]
        programs = [compile_program(plan, rank) for rank in plan.ranks]
        return Binding(endpoints, programs, 0, Progress(), "loopback", "no communicator was given")
    context = context_of(comm)
    rank = context.comm.rank
    if rank not in plan.ranks:
        require_ranks(context, plan.ranks)
        return Binding((), (), 0, context.progress, "none", "this rank takes no part")
    ranks = tuple(r for r in plan.ranks if r < context.comm.size)
    shared = plan_parts(plan) | {"transport": transport}
    record = Record(rank, subject="plan", shared=shared, off_gpu=-1 if gpu is not None else rank)
    programs = []
    try:
        if problem is not None:
            raise problem
        require_ranks(context, plan.ranks)
        programs = [compile_program(plan, rank)]
        if chosen == "nccl":
            from xmesh.nccl.library import load_nccl

            load_nccl()
            gpu = gpu or Gpu()
    except XmeshError as error:
        record = Record.of_error(rank, _of_rank(error, rank, plan.name))
    subject = f"tensor {plan.name!r}"
    endpoint, verdict = connect(context, ranks, record, timeout_s, subject, num_tags)
    endpoint.reserve_tags(verdict.next_tag, num_tags)
    bound = Binding((endpoint,), programs, verdict.next_tag, context.progress, "mpi", "")
    if chosen == "mpi":
        bound.why = "it was asked for"
    elif transport == "auto" and verdict.off_gpu >= 0:
        bound.why = f"rank {verdict.off_gpu} has not said, by like=, that its arrays lie on a GPU"
    else:
        from xmesh.nccl.bind import bind_nccl

        assert gpu is not None  # else this rank's record was an error, or said so
        try:
            bound.nccl, bound.why = bind_nccl(
                endpoint, plan, context, gpu, timeout_s, must=chosen == "nccl"
            )
        except BaseException:
            bound.release()
            raise
        if bound.nccl is not None:
            bound.transport = "nccl"
    return bound


def _of_rank(error: XmeshError, rank: int, name: str) -> XmeshError:
    """An error that all ranks will raise, with the rank whose it is."""
    text = str(error)
    if f"rank {rank}" in text:
        return error
    from mpi4py import MPI

    where = f"rank {rank} (host {MPI.Get_processor_name()}), tensor {name!r}"
    return type(error)(f"{text}\n  context: {where}")


def plan_parts(plan: Plan) -> dict[str, str]:
    """What all ranks must have alike of a plan."""
    return {part: short(value) for part, value in plan.fields().items()}


def choose_transport(comm: Any, transport: str) -> str:
    """The transport meant by an argument; with a communicator "auto" stays open.

    Raises:
        TransportError: no such transport, or it does not go with the communicator.
    """
    if not isinstance(transport, str) or transport not in TRANSPORTS:
        raise TransportError(
            explain(
                f"transport must be one of {', '.join(TRANSPORTS)}",
                values=f"{transport!r}",
                remedy="leave it at 'auto'",
            )
        )
    chosen = "loopback" if transport == "auto" and comm is None else transport
    if (chosen == "loopback") != (comm is None):
        raise TransportError(
            explain(
                "loopback runs without a communicator, and MPI and NCCL with one",
                values=f"transport={transport!r}, comm={type(comm).__name__}",
                remedy="pass comm=MPI.COMM_WORLD for MPI or NCCL, or no comm for loopback",
            )
        )
    return chosen


def context_of(comm: Any) -> MpiContext:
    """The context of a communicator or World.

    Raises:
        TransportError: it is neither, or mpi4py is not installed.
    """
    try:
        from mpi4py import MPI

        from xmesh.transport.mpi import MpiContext
    except ImportError as error:
        raise TransportError(
            explain(
                "the MPI transport needs mpi4py and an MPI library",
                values=str(error),
                remedy="pip install 'xmesh[mpich]', or mpi4py for the MPI of your cluster",
            )
        ) from error
    if MPI.Is_finalized():
        raise TransportError(
            explain(
                "MPI can only be used before it is finalized",
                values="MPI_Finalize was called",
                remedy="let the program's end finalize MPI",
            )
        )
    inner = comm
    if not isinstance(comm, MPI.Comm) and hasattr(comm, "require_open"):
        comm.require_open("a resharding")
        inner = comm.comm
    if not isinstance(inner, MPI.Intracomm) or inner == MPI.COMM_NULL:
        raise TransportError(
            explain(
                "comm must be an mpi4py communicator (one group, not MPI.COMM_NULL) or a World",
                values=f"{type(comm).__name__}",
                remedy="pass MPI.COMM_WORLD or a communicator split from it",
            )
        )
    return MpiContext.of(inner)


def require_ranks(context: MpiContext, ranks: Sequence[int]) -> None:
    """Check that a communicator holds some ranks.

    Raises:
        PlanError: it does not.
    """
    missing = [rank for rank in ranks if rank >= context.comm.size]
    if missing:
        raise PlanError(
            explain(
                "the communicator must hold every rank of both meshes",
                values=f"ranks {', '.join(map(str, missing[:8]))} of the plan, "
                f"communicator of size {context.comm.size}",
                remedy=f"start at least {max(ranks) + 1} ranks (mpiexec -n {max(ranks) + 1})",
            )
        )


def agree(
    context: MpiContext,
    ranks: tuple[int, ...],
    record: Record,
    timeout_s: float,
    subject: str,
) -> Record:
    """Compare records with a group over the user's communicator; what comes next may be collective.

    Returns:
        The verdict, without an error.

    Raises:
        XmeshError: what any rank's record says, on all of them.
        TransferTimeout: a rank was not heard from.
    """
    agreement = Agreement(context.public(ranks), context.handshake_tag, record)

    def give_up() -> XmeshError:
        missing = ", ".join(map(str, agreement.waiting_for()))
        return TransferTimeout(
            explain(
                f"all {len(ranks)} ranks must call within {timeout_s:g} s",
                values=f"rank {record.rank} has heard nothing from rank {missing}"
                + (", which may itself wait for another" if agreement.waits_above else ""),
                context=f"{subject}, set-up among ranks {', '.join(map(str, ranks[:16]))}"
                + (" ..." if len(ranks) > 16 else ""),
                remedy="look for an error on that rank, or for a call that it did not make",
            )
        )

    context.progress.add(agreement)
    try:
        context.progress.wait(agreement, timeout_s, give_up, sleep)
    except BaseException:
        # Also after an interrupt: a receive left behind would take a later agreement's message.
        agreement.abandon()
        context.gave_up = True
        raise
    finally:
        context.progress.remove(agreement)
    verdict = agreement.verdict or record
    error = verdict.error()
    if error is not None:
        raise error
    return verdict


def agree_all(
    comm: Any, subject: str, timeout_s: float = TIMEOUT_S, problem: XmeshError | None = None
) -> MpiContext:
    """Make sure that all ranks of a communicator are there: what comes next is collective.

    Args:
        comm: a communicator or World.
        subject: what they are there for, for the error text.
        timeout_s: seconds to wait for them.
        problem: what is wrong on this rank; all ranks raise it.

    Raises:
        XmeshError: what any rank's problem is, on all of them.
        TransferTimeout: a rank was not heard from.
    """
    context = context_of(comm)
    rank = context.comm.rank
    record = Record(rank) if problem is None else Record.of_error(rank, problem)
    agree(context, tuple(range(context.comm.size)), record, timeout_s, subject)
    return context


def connect(
    context: MpiContext,
    ranks: tuple[int, ...],
    record: Record,
    timeout_s: float,
    subject: str,
    num_tags: int = 0,
) -> tuple[MpiEndpoint, Record]:
    """Agree with a group, and get this rank's endpoint in it; ``release`` it after use.

    The endpoint is new where some rank has none, or none with as many tags left as are wanted.

    Raises:
        XmeshError, TransferTimeout: see ``agree``.
    """
    cached = context.cached(ranks)
    next_tag = 0 if cached is None else cached.next_tag
    full = next_tag + num_tags > context.handshake_tag
    record = replace(record, next_tag=next_tag, fresh=cached is None or full)
    verdict = agree(context, ranks, record, timeout_s, subject)
    endpoint = context.endpoint(ranks, verdict.fresh)
    return endpoint, replace(verdict, next_tag=0) if verdict.fresh else verdict
