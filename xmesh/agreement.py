"""Agreement: a group of ranks compares what each is about to do, and all get one verdict.

Down a binomial tree goes the number of the round, up come the records, and down the verdict, all as
plain messages: nothing blocks, and a rank that never calls is named by the rank that waits for it.
The number keeps rounds apart: messages of a round that timed out may still be under way when the
same ranks try again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

import xmesh.errors
from xmesh.errors import AgreementError, XmeshError, explain
from xmesh.transport.base import Endpoint, Handle

_RECORD_NBYTES = 16384
#: Characters of an error that travel; what is left always fits a record, however it is escaped.
_TEXT_LIMIT = 1500
#: Characters of a dtype's name that fit as well.
DTYPE_LIMIT = 3000


@dataclass(frozen=True)
class Record:
    """What one rank, or a subtree of ranks, brings along.

    Attributes:
        rank: whose record it is; the lowest rank that ``shared`` stands for.
        subject: what all must have alike, for the error text.
        shared: its parts by name, as short texts that differ when the parts do.
        next_tag: lowest tag that is free on all ranks so far.
        fresh: some rank needs a new communicator.
        off_gpu: the lowest rank that has not said that its arrays lie in GPU memory; -1 for none.
        dtype: element type, from the ranks that know it; "" elsewhere.
        dtype_rank: the rank that knows it, where that is another than ``rank``; else -1.
        error_rank: rank of the first error, or -1.
        error_type: class name in ``xmesh.errors``.
        error_text: its text.
    """

    rank: int
    subject: str = ""
    shared: dict[str, str] = field(default_factory=dict)
    next_tag: int = 0
    fresh: bool = False
    off_gpu: int = -1
    dtype: str = ""
    dtype_rank: int = -1
    error_rank: int = -1
    error_type: str = ""
    error_text: str = ""

    @classmethod
    def of_error(cls, rank: int, error: XmeshError) -> Record:
        """The record of a rank whose own arguments are wrong."""
        return cls(
            rank,
            error_rank=rank,
            error_type=type(error).__name__,
            error_text=str(error)[:_TEXT_LIMIT],
        )

    def merge(self, other: Record) -> Record:
        """One record for both: the lowest rank's error, or a difference between them, wins."""
        first, second = sorted((self, other), key=lambda record: record.rank)
        know = [record for record in (first, second) if record.dtype]
        knows = min(know, key=lambda record: record._dtype_origin, default=first)
        merged = replace(
            first,
            next_tag=max(first.next_tag, second.next_tag),
            fresh=first.fresh or second.fresh,
            off_gpu=min({first.off_gpu, second.off_gpu} - {-1}, default=-1),
            dtype=knows.dtype,
            dtype_rank=knows._dtype_origin,
        )
        errors = [record for record in (first, second) if record.error_rank >= 0]
        if errors:
            source = min(errors, key=lambda record: record.error_rank)
            return replace(
                merged,
                error_rank=source.error_rank,
                error_type=source.error_type,
                error_text=source.error_text,
            )
        difference = ""
        if first.shared != second.shared:
            parts = sorted({*first.shared, *second.shared})
            difference = explain(
                f"all ranks must call with the same {first.subject}",
                values="\n".join(
                    f"{part}: rank {first.rank} has {first.shared.get(part, 'nothing')}, "
                    f"rank {second.rank} has {second.shared.get(part, 'nothing')}"
                    for part in parts
                    if first.shared.get(part) != second.shared.get(part)
                ),
                remedy="compute the arguments from the same inputs on every rank",
            )
        elif first.dtype and second.dtype and first.dtype != second.dtype:
            difference = explain(
                "all source ranks must pass arrays of the same dtype",
                values=f"rank {first._dtype_origin} has {first.dtype}, "
                f"rank {second._dtype_origin} has {second.dtype}",
                remedy="convert with astype before the call",
            )
        if not difference:
            return merged
        return replace(
            merged,
            error_rank=first.rank,
            error_type=AgreementError.__name__,
            error_text=difference[:_TEXT_LIMIT],
        )

    @property
    def _dtype_origin(self) -> int:
        return self.rank if self.dtype_rank < 0 else self.dtype_rank

    def error(self) -> XmeshError | None:
        """The error that all ranks raise, or None."""
        if self.error_rank < 0:
            return None
        kind = getattr(xmesh.errors, self.error_type, XmeshError)
        error: XmeshError = kind(self.error_text)
        return error


_Buffer = np.ndarray[Any, np.dtype[np.uint8]]


def short(value: Any) -> str:
    """A JSON value as a text that fits a record and differs when the value does."""
    text = json.dumps(value, sort_keys=True)
    if len(text) <= 60:
        return text
    return f"{text[:32]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"


@dataclass(frozen=True)
class _Note:
    """A message: "open" a round, a "record" on its way up, or the "verdict"."""

    kind: str
    round: int
    record: Record | None = None

    def to_bytes(self) -> _Buffer:
        data: dict[str, Any] = {"kind": self.kind, "round": self.round}
        data |= {"record": asdict(self.record)} if self.record else {}
        # Escapes of six bytes are left for control characters only.
        text = json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")
        message = np.zeros(_RECORD_NBYTES, np.uint8)
        message[: len(text)] = np.frombuffer(text, np.uint8)
        return message

    @classmethod
    def from_bytes(cls, message: _Buffer) -> _Note:
        data = json.loads(message.tobytes().rstrip(b"\0").decode("utf-8", "surrogatepass"))
        record = Record(**data["record"]) if "record" in data else None
        return cls(data["kind"], data["round"], record)


def in_tree(ranks: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    """Parent and children of a rank in a binomial tree; a parent clears the lowest bit."""
    place = ranks.index(rank)
    children, step = [], 1
    while place + step < len(ranks) and not place & step:
        children.append(ranks[place + step])
        step *= 2
    return None if place == 0 else ranks[place & (place - 1)], children


class Agreement:
    """One agreement on one rank; call ``step`` until it is ``over``.

    Args:
        endpoint: the group.
        tag: used by nothing else at the time.
        record: this rank's part.
    """

    def __init__(self, endpoint: Endpoint, tag: int, record: Record) -> None:
        self._endpoint = endpoint
        self._tag = tag
        self._own = record
        self.verdict: Record | None = None
        self._parent, self._children = in_tree(endpoint.ranks, endpoint.rank)
        self._round = 0
        self._records: dict[int, Record] = {}
        self._incoming: dict[int, tuple[_Buffer, Handle]] = {}
        self._sending: list[Handle] = []
        if self._parent is None:
            self._open(secrets.randbits(62) + 1)
        else:
            self._expect(self._parent)

    @property
    def over(self) -> bool:
        """The verdict is here, and passed on."""
        return self.verdict is not None and not self._sending

    def step(self) -> bool:
        """Move on without waiting; True when anything happened."""
        sent = {i for i, _ in self._endpoint.completed(self._sending)}
        self._sending = [handle for i, handle in enumerate(self._sending) if i not in sent]
        peers = list(self._incoming)
        handles = [handle for _, handle in self._incoming.values()]
        arrived = [peers[i] for i, _ in self._endpoint.completed(handles)]
        for peer in arrived:
            buffer, _ = self._incoming.pop(peer)
            self._receive(peer, _Note.from_bytes(buffer))
        return bool(sent or arrived)

    def waiting_for(self) -> list[int]:
        """Ranks whose message is still missing: those below in the tree first."""
        below = [peer for peer in self._incoming if peer != self._parent]
        return below or list(self._incoming)

    @property
    def waits_above(self) -> bool:
        """Only the verdict is missing: who has not called, others know."""
        return list(self._incoming) == [self._parent]

    def abandon(self) -> None:
        """Give up after a time-out."""
        receives, sends = [handle for _, handle in self._incoming.values()], self._sending
        self._incoming, self._sending = {}, []
        self._endpoint.abandon(receives, sends)

    def _open(self, number: int) -> None:
        """Begin a round, perhaps in place of an older one: collect everyone's record."""
        self._round = number
        self._records = {}
        for child in self._children:
            self._send(_Note("open", number), child)
            if child not in self._incoming:
                self._expect(child)
        self._pass_on()

    def _receive(self, peer: int, note: _Note) -> None:
        if peer == self._parent:
            if note.kind == "open":
                self._expect(peer)
                self._open(note.round)
            elif note.round == self._round and note.record is not None:
                self._conclude(note.record)
            else:
                self._expect(peer)
        elif note.kind == "record" and note.round == self._round and note.record is not None:
            self._records[peer] = note.record
            self._pass_on()
        else:
            self._expect(peer)

    def _pass_on(self) -> None:
        if len(self._records) < len(self._children):
            return
        merged = self._own
        for record in self._records.values():
            merged = merged.merge(record)
        if self._parent is None:
            self._conclude(merged)
        else:
            self._send(_Note("record", self._round, merged), self._parent)

    def _conclude(self, verdict: Record) -> None:
        self.verdict = verdict
        for child in self._children:
            self._send(_Note("verdict", self._round, verdict), child)

    def _expect(self, peer: int) -> None:
        buffer = np.empty(_RECORD_NBYTES, np.uint8)
        self._incoming[peer] = (buffer, self._endpoint.receive(buffer, peer, self._tag))

    def _send(self, note: _Note, peer: int) -> None:
        self._sending.append(self._endpoint.send(note.to_bytes(), peer, self._tag))
