"""``xmesh.reshard``: plan, bind, move and free, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from xmesh.agreement import DTYPE_LIMIT, Record, short
from xmesh.binding import TIMEOUT_S, choose_transport, connect, context_of, require_ranks
from xmesh.device.array import DeviceArray
from xmesh.dtypes import as_dtype, dtype_name, named_dtype
from xmesh.errors import ArrayError, XmeshError, explain
from xmesh.interop import as_memory
from xmesh.layout import Layout
from xmesh.planner import plan
from xmesh.planner.make_plan import check_types
from xmesh.progress import seconds
from xmesh.resharder import Resharder
from xmesh.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

    from xmesh.world import World


def reshard(
    local: Any,
    src: Layout,
    dst: Layout,
    comm: MPI.Intracomm | World | None = None,
    *,
    out: Any = None,
    dtype: Any = None,
    topology: Topology | None = None,
    strategy: str = "auto",
    scheduler: str = "auto",
    seed: int = 0,
    name: str = "array",
    transport: str = "auto",
    timeout_s: float = TIMEOUT_S,
    like: Any = None,
) -> Any:
    """Move an array from one layout to another; every rank of either layout calls it.

    Convenient for a single use. A Resharder does the set-up once and is much faster after that.

    Args:
        local: on source ranks the array they hold, None elsewhere; without a communicator a dict
            from rank to array for all source ranks.
        src: layout that holds the array.
        dst: layout that needs it.
        comm: an mpi4py communicator that holds every rank of both meshes, or a World.
        out: where to write on destination ranks; default new arrays.
        dtype: element type; default that of the source ranks' arrays.
        topology: rank -> host; default that of the World, or the hosts that MPI names.
        strategy: see ``plan``.
        scheduler: see ``plan``.
        seed: see ``plan``.
        name: what error texts call the array.
        transport: see ``Resharder``.
        timeout_s: seconds for each of the steps.
        like: see ``Resharder``; default ``local`` or ``out``, where this rank passes one.

    Returns:
        The array on destination ranks, None elsewhere (a dict by rank without a communicator).

    Raises:
        XmeshError: see ``plan`` and ``Resharder``; on all ranks.
    """
    check_types(src, dst, topology, None, name)
    timeout_s = seconds(timeout_s)
    given = next((each for each in (local, out) if each is not None), None)
    if choose_transport(comm, transport) == "loopback":
        arrays = tuple(local.values()) if isinstance(local, Mapping) else ()
        element = _dtype_name(dtype, arrays, f"tensor {name!r}")
        made = plan(src, dst, _known(element, name), topology, strategy, scheduler, seed, name=name)
        with Resharder(made, transport="loopback", timeout_s=timeout_s, like=like) as resharder:
            return resharder(local, out)
    context = context_of(comm)
    rank = context.comm.rank
    ranks = tuple(sorted({*src.ranks, *dst.ranks}))
    if rank not in ranks:
        require_ranks(context, ranks)
        return None
    if topology is None:
        # A World's; an mpi4py communicator has an attribute of this name too, a number.
        found = getattr(comm, "topology", None)
        topology = found if isinstance(found, Topology) else None
    subject = "layouts, topology and options"
    try:
        require_ranks(context, ranks)
        inputs = {
            "src": src.to_json(),
            "dst": dst.to_json(),
            "topology": None if topology is None else topology.to_json(),
            "strategy": str(strategy),
            "scheduler": str(scheduler),
            "seed": str(seed),
            "name": name,
        }
        shared = {part: short(value) for part, value in inputs.items()}
        where = f"rank {rank}, tensor {name!r}"
        record = Record(rank, subject, shared, dtype=_dtype_name(dtype, local, where))
    except XmeshError as error:
        record = Record.of_error(rank, error)
    members = tuple(r for r in ranks if r < context.comm.size)
    endpoint, verdict = connect(context, members, record, timeout_s, f"tensor {name!r}")
    try:
        if topology is None:
            # Ranks that take no part need a host too: any will do that all ranks agree on.
            topology = Topology(
                [endpoint.host_name(r) if r in ranks else f"rank {r}" for r in range(ranks[-1] + 1)]
            )
        made = plan(
            src, dst, _known(verdict.dtype, name), topology, strategy, scheduler, seed, name=name
        )
        with Resharder(
            made,
            comm,
            transport=transport,
            timeout_s=timeout_s,
            like=_like(given) if like is None else like,
        ) as resharder:
            return resharder(local, out)
    finally:
        endpoint.release()


def _like(given: Any) -> Any:
    """What says where new outputs lie: an array on a GPU, so that all ranks may choose NCCL."""
    first = given[0] if isinstance(given, (list, tuple)) and given else given
    if first is None or type(first) is np.ndarray:
        return None
    try:
        return first if isinstance(as_memory(first, "local"), DeviceArray) else None
    except ArrayError:
        return None  # the call itself says what is wrong with it


def _dtype_name(dtype: Any, local: Any, where: str) -> str:
    """Name of the dtype that this rank knows of, or ""."""
    if dtype is not None:
        return _sendable(dtype_name(as_dtype(dtype)), where)
    if isinstance(local, (list, tuple)):  # one array for each box
        return next(filter(None, (_dtype_name(None, array, where) for array in local)), "")
    try:
        array = None if local is None else as_memory(local, "local")
    except ArrayError as error:
        raise ArrayError(f"{error}\n  context: {where}") from None
    return "" if array is None else _sendable(dtype_name(array.dtype), where)


def _sendable(name: str, where: str) -> str:
    """The name of a dtype, if it is short enough to be told to the other ranks."""
    if len(name) <= DTYPE_LIMIT:
        return name
    raise ArrayError(
        explain(
            f"the dtype of a single call has a name of at most {DTYPE_LIMIT} characters",
            values=f"{len(name)} characters: {name[:60]}...",
            context=where,
            remedy="plan with xmesh.plan(src, dst, dtype) and use a Resharder, or shorten the "
            "names of the fields",
        )
    )


def _known(name: str, tensor: str) -> Any:
    if not name:
        raise ArrayError(
            explain(
                "a dtype is needed: some source rank must pass its array",
                values="all source ranks passed None",
                context=f"tensor {tensor!r}",
                remedy="pass the local array on source ranks, or dtype=...",
            )
        )
    return named_dtype(name)
