"""Binding a plan to NCCL: all ranks find out whether they can, then make communicators together."""

from __future__ import annotations

from xmesh.device.gpu import Gpu
from xmesh.errors import TransportError, XmeshError
from xmesh.nccl.communicators import Communicators
from xmesh.nccl.library import load_nccl, version_text
from xmesh.nccl.link import NcclLink
from xmesh.nccl.making import connect_all, require_own_gpus
from xmesh.nccl.program import compile_nccl
from xmesh.nccl.telling import tell
from xmesh.planner import Plan
from xmesh.transport.mpi import MpiContext, MpiEndpoint


def bind_nccl(
    endpoint: MpiEndpoint,
    plan: Plan,
    context: MpiContext,
    gpu: Gpu,
    timeout_s: float,
    must: bool,
) -> tuple[NcclLink | None, str]:
    """What takes the place of messages where all ranks can use NCCL; all of them call it.

    Args:
        endpoint: all ranks of the plan.
        plan: the plan.
        context: of the user's communicator.
        gpu: of this rank.
        timeout_s: seconds for each of the steps.
        must: else "auto": where NCCL cannot be used, it stays with messages.

    Returns:
        The link, or None where it stays with messages; and why.

    Raises:
        TransportError: NCCL must be used and cannot; on all ranks alike.
        TransferTimeout: a rank stayed away.
    """
    subject = f"tensor {plan.name!r}, {plan.src} -> {plan.dst}"
    try:
        version = version_text(load_nccl().get_version())
        gpu.compile()
        told = {"gpu": gpu.bus, "why": "", "version": version}
    except XmeshError as error:
        told = {"gpu": "", "why": _one_line(error)}
    heard = tell(context, endpoint, told, timeout_s, subject)
    try:
        for rank, state in sorted(heard.of_rank.items()):
            if state["why"]:
                raise TransportError(f"rank {rank}: {state['why']}")
        names = {rank: state["gpu"] for rank, state in heard.of_rank.items()}
        require_own_gpus(names, endpoint, subject)
    except TransportError as error:
        if must:
            raise
        return None, f"NCCL cannot be used: {_one_line(error)}"
    program = compile_nccl(plan, endpoint.rank)
    try:
        connected = connect_all(context, endpoint, program.groups, gpu, timeout_s, subject)
    except TransportError as error:  # of all ranks alike
        if must:
            raise
        return None, f"NCCL cannot be used: {_one_line(error)}"
    kept = Communicators.of(context)
    link = NcclLink(plan, program, endpoint, connected, kept, gpu, context.progress)
    versions = sorted({state["version"] for state in heard.of_rank.values()})
    return link, f"NCCL {' and '.join(versions)}, a GPU of its own for each rank"


def _one_line(error: Exception) -> str:
    """The rule and the values of an error."""
    rule, *more = str(error).splitlines()
    values = [line.partition(":")[2].strip() for line in more if line.startswith("  values:")]
    return ": ".join([rule, *values])
