"""A double of ``cupy.cuda.nccl`` for ranks without GPUs: it moves data, and keeps NCCL's rules.

All ranks' operations meet in one process, the judge (`_judge.py`), which also finds out whether the
ranks break a rule that real NCCL would answer with a hang or with wrong data.

DOUBLE_CUPY_VERSION=13... gives what CuPy 13 has: ids that are tuples, and no commSplit.
"""

from __future__ import annotations

import collections
import operator
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cupy import _engine
from cupy.cuda import _wire, runtime
from cupy.cuda._faults import counts, faults
from cupy.cuda._launch import Call, Unit, end_dropped
from cupy.cuda._link import Link, Membership, Refused, any_link, link_to, meeting_place

NCCL_INT8 = NCCL_CHAR = 0
NCCL_UINT8 = 1
NCCL_INT32 = NCCL_INT = 2
NCCL_UINT32 = 3
NCCL_INT64 = 4
NCCL_UINT64 = 5
NCCL_FLOAT16 = NCCL_HALF = 6
NCCL_FLOAT32 = NCCL_FLOAT = 7
NCCL_FLOAT64 = NCCL_DOUBLE = 8
NCCL_BFLOAT16 = 9

NCCL_SUM = 0
NCCL_PROD = 1
NCCL_MAX = 2
NCCL_MIN = 3
NCCL_AVG = 4

available = True

_CUPY_13 = os.environ.get("DOUBLE_CUPY_VERSION", "").startswith("13.")
_ID_BYTES = 128
_ERRORS = {
    0: "NCCL_ERROR_SUCCESS: no error",
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}


class NcclError(RuntimeError):
    """What NCCL returns as a status; with what the double knows about it."""

    def __init__(self, status: int, *, _detail: str = "") -> None:
        self.status = status
        super().__init__(_ERRORS[status] + (f": {_detail}" if _detail else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.status,))


def get_build_version() -> int:
    return 22501


def get_version() -> int:
    return int(os.environ.get("DOUBLE_NCCL_VERSION", "23203"))


def get_unique_id() -> bytes | tuple[int, ...]:
    """An id that names a judge's socket; the judge runs from now on."""
    if faults.unique_ids > 0:
        faults.unique_ids -= 1
        raise NcclError(_wire.SYSTEM_ERROR, _detail="asked for by the test")
    path = meeting_place()
    link_to(path)
    unique = (os.urandom(12) + os.fsencode(path)).ljust(_ID_BYTES, b"\0")
    return tuple(byte - 256 * (byte > 127) for byte in unique) if _CUPY_13 else unique


class _Group(threading.local):
    """The group that a thread has open."""

    depth = 0
    error: NcclError | None = None

    def __init__(self) -> None:
        self.calls: list[Call] = []


_group = _Group()


def groupStart() -> None:
    _group.depth += 1


def groupEnd() -> None:
    if _group.depth == 0:
        raise _violation("groupEnd without groupStart", any_link())
    _group.depth -= 1
    if _group.depth > 0:
        return
    calls, _group.calls = _group.calls, []
    error, _group.error = _group.error, None
    if error is not None:
        raise NcclError(error.status, _detail=f"a call of the group had failed: {error}")
    if any(call.membership.freed for call in calls):
        raise NcclError(_wire.INVALID_ARGUMENT, _detail="a communicator of the group was freed")
    if len({call.membership.link for call in calls}) > 1:
        raise NotImplementedError("communicators of two judges in a group: set DOUBLE_NCCL_SOCKET")
    if calls:
        Unit(calls).launch()


class NcclConfig:
    """Configuration of a communicator; nothing in it changes what the double does."""

    def __init__(self, split_share: int = 0) -> None:
        self._split_share = operator.index(split_share)

    @property
    def split_share(self) -> int:
        return self._split_share


class NcclCommunicator:
    """One rank's end of a communicator."""

    _membership: Membership | None = None

    def __init__(self, ndev: int, commId: Any, rank: int, config: NcclConfig | None = None) -> None:
        ndev, rank = operator.index(ndev), operator.index(rank)
        unique = _bytes_of_id(commId)
        if _CUPY_13 and config is not None:
            raise TypeError("__init__() takes exactly 3 positional arguments")
        if _group.depth:
            raise NotImplementedError("the double makes no communicators in groups")
        if not 0 <= rank < ndev:
            raise _violation(f"rank {rank} of {ndev} ranks", any_link(), _wire.INVALID_ARGUMENT)
        link = link_to(os.fsdecode(unique[12:].rstrip(b"\0")))
        if faults.creation == rank:
            if not faults.silent:
                link.tell("give_up", unique, rank)
            raise NcclError(_wire.SYSTEM_ERROR, _detail="asked for by the test")
        if faults.late == rank:
            time.sleep(faults.late_s)
        device = runtime.getDevice()
        self._take(_asked(link, "create", unique, ndev, rank, _gpu(device)), device)

    @staticmethod
    def initAll(devices: Any) -> list[NcclCommunicator]:
        raise NotImplementedError("the double has one device per rank")

    def __del__(self) -> None:
        # Only noted: a destructor runs anywhere, also where locks of the double are held.
        if self._membership is not None:
            _deserted.append(self._membership)

    @property
    def comm(self) -> int:
        return self._membership.number if self._membership else 0

    def destroy(self) -> None:
        if self._membership is not None:
            membership, self._membership = self._membership, None
            error = _destroyed(membership)
            if error is not None:
                raise error

    def abort(self) -> None:
        if self._membership is not None:
            membership, self._membership = self._membership, None
            _free(membership, "abort")
            _engine.wake()

    def device_id(self) -> int:
        return self._living().device

    def rank_id(self) -> int:
        return self._living().rank

    def size(self) -> int:
        return self._living().size

    def check_async_error(self) -> None:
        membership = self._living()
        if faults.checks is not None:
            faults.checks -= 1
            if faults.checks < 0:
                raise NcclError(faults.status, _detail="asked for by the test")
        if membership.error is not None:
            raise NcclError(membership.error[0], _detail=membership.error[1])

    def allReduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        self._call("allReduce", sendbuf, recvbuf, count, datatype, None, stream, op=op)

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        raise NotImplementedError("the double has no reduce")

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        self._call("broadcast", sendbuff, recvbuff, count, datatype, root, stream)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._call("broadcast", buff, buff, count, datatype, root, stream)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        raise NotImplementedError("the double has no reduceScatter")

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._call("allGather", sendbuf, recvbuf, count, datatype, None, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("send", sendbuf, None, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("recv", None, recvbuf, count, datatype, peer, stream)

    def commSplit(
        self, color: int, key: int, config: NcclConfig | None = None
    ) -> NcclCommunicator | None:
        color, key = operator.index(color), operator.index(key)
        membership = self._usable()
        if _group.depth:
            raise NotImplementedError("the double splits no communicators in groups")
        end_dropped()
        if color < -1:
            raise NcclError(_wire.INVALID_ARGUMENT, _detail=f"color {color}")
        if membership.outstanding:
            outstanding = ", ".join(_kinds(membership))
            text = f"commSplit of {membership.name} with outstanding operations: {outstanding}"
            raise _violation(text, membership.link, number=membership.number)
        values = (membership.number, membership.rank, color, key)
        made = _asked(membership.link, "split", *values)
        if made is None:
            return None
        part = NcclCommunicator.__new__(NcclCommunicator)
        part._take(made, membership.device)
        return part

    def _take(self, membership: Membership, device: int) -> None:
        membership.device = device
        self._membership = membership
        counts.created += 1

    def _living(self) -> Membership:
        _destroy_deserted()
        if self._membership is None:
            raise NcclError(_wire.INVALID_ARGUMENT, _detail="destroyed or aborted, or never made")
        return self._membership

    def _usable(self) -> Membership:
        membership = self._living()
        if membership.error is not None:
            raise NcclError(membership.error[0], _detail=membership.error[1])
        device = runtime.getDevice()
        if device != membership.device:
            text = f"device {device} is current, {membership.name} is on {membership.device}"
            raise _violation(text, membership.link)
        return membership

    def _call(
        self,
        kind: str,
        source: int | None,
        target: int | None,
        count: int,
        datatype: int,
        peer: int | None,
        stream: int,
        op: int | None = None,
    ) -> None:
        if operator.index(count) < 0:
            raise OverflowError("can't convert negative value to size_t")
        try:
            call = self._checked(kind, source, target, count, datatype, peer, stream, op)
        except NcclError as error:
            if _group.depth:
                _group.error = _group.error or error
            raise
        if call is None:
            return
        if _group.depth:
            _group.calls.append(call)
        else:
            Unit([call]).launch()

    def _checked(
        self,
        kind: str,
        source: int | None,
        target: int | None,
        count: int,
        datatype: int,
        peer: int | None,
        stream: int,
        op: int | None,
    ) -> Call | None:
        """The call, if its arguments are right; None if it moves nothing."""
        membership = self._usable()
        problem = None
        if peer is not None and not 0 <= operator.index(peer) < membership.size:
            problem = f"no rank {peer} in {membership.name}"
        elif operator.index(datatype) not in _wire.ITEM_SIZES:
            problem = f"no data type {datatype}"
        elif op is not None and op not in range(NCCL_AVG):
            problem = f"the double has no operator {op}"
        if problem is not None:
            raise _violation(f"{kind}: {problem}", membership.link, _wire.INVALID_ARGUMENT)
        nbytes = operator.index(count) * _wire.ITEM_SIZES[operator.index(datatype)]
        if nbytes == 0:
            return None
        reads = writes = None
        if source is not None and (kind != "broadcast" or peer == membership.rank):
            reads = (operator.index(source), nbytes)
        if target is not None:
            size = nbytes * (membership.size if kind == "allGather" else 1)
            writes = (operator.index(target), size)
        if kind == "broadcast" and reads == writes:
            writes = None  # in place the root only sends
        try:
            for place in (reads, writes):
                if place is not None:
                    _engine.host_view(*place)
        except Exception as wrong:
            text = f"{kind} on {membership.name}: {wrong}"
            raise _violation(text, membership.link, _wire.INVALID_ARGUMENT) from wrong
        return Call(
            membership,
            kind,
            operator.index(count),
            operator.index(datatype),
            None if peer is None else operator.index(peer),
            op,
            0 if stream == 1 else operator.index(stream),  # two names of the default stream
            reads,
            writes,
            _caller(),
        )


if _CUPY_13:
    del NcclConfig, NcclCommunicator.commSplit


#: Of communicators that nobody has any more; CuPy destroys them in their destructor.
_deserted: collections.deque[Membership] = collections.deque()


def _destroy_deserted() -> None:
    """Do what destructors have left to do."""
    while _deserted:
        _destroyed(_deserted.popleft())


def _destroyed(membership: Membership) -> NcclError | None:
    """Destroy a communicator; the error if it may not be destroyed now."""
    end_dropped()
    error = None
    # NCCL's own destroy waits for some operations and not for others.
    if membership.outstanding and not membership.fatal:
        outstanding = ", ".join(_kinds(membership))
        text = f"destroy of {membership.name} with outstanding operations: {outstanding}"
        error = _violation(text, membership.link, number=membership.number)
    _free(membership, "destroy")
    return error


def _free(membership: Membership, how: str) -> None:
    with membership.link.mutex:
        membership.freed = True
    membership.link.tell(how, membership.number, membership.rank)
    counts.freed += 1


def _bytes_of_id(unique: Any) -> bytes:
    """An id as bytes, with the same complaints as the CuPy that is doubled."""
    kind = tuple if _CUPY_13 else bytes
    if type(unique) is not kind:
        raise TypeError(
            "Argument 'commId' has incorrect type "
            f"(expected {kind.__name__}, got {type(unique).__name__})"
        )
    if _CUPY_13:
        assert len(unique) == _ID_BYTES
        return bytes(value % 256 for value in unique)
    if len(unique) != _ID_BYTES:
        raise ValueError(f"commId length {len(unique)} != {_ID_BYTES}.")
    return bytes(unique)


def _gpu(device: int) -> tuple[str, int] | None:
    """What tells a GPU from others: each process has its own, unless the environment says else."""
    if os.environ.get("DOUBLE_NCCL_SHARED_DEVICE") == "1":
        return None
    return os.environ.get("DOUBLE_HOST") or f"pid {os.getpid()}", device


def _asked(link: Link, kind: str, *values: Any) -> Any:
    try:
        return link.ask(kind, *values)
    except Refused as refusal:
        status, text = refusal.args
        raise NcclError(status, _detail=text) from None


_violations_alone: list[str] = []


def _violation(
    text: str, link: Link | None, status: int = _wire.INVALID_USAGE, number: int | None = None
) -> NcclError:
    """Report a violation; the error to raise."""
    if link is not None:
        link.violation(text, number)
    else:
        _violations_alone.append(text)
        _wire.record(text)
        print(f"NCCL double: violation: {text}", file=sys.stderr, flush=True)
    return NcclError(status, _detail=text)


def _kinds(membership: Membership) -> list[str]:
    with membership.link.mutex:
        calls = [call for unit in membership.outstanding for call in unit.calls]
    return sorted({f"{call.kind} at {call.at}" for call in calls if call.membership is membership})


def _caller() -> str:
    """File and line outside this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
