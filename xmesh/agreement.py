"""Agreement: a group of ranks compares what each is about to do, and all get one verdict.

Records travel up a binomial tree and the verdict comes back down, as plain messages: nothing
blocks, any number of agreements may be under way, and a rank that never calls is named by the rank
that waits for it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

import xmesh.errors
from xmesh.errors import AgreementError, XmeshError, explain
from xmesh.transport.base import Endpoint, Handle

_RECORD_NBYTES = 8192
#: Characters of an error that travel; what is left always fits a record, however it is escaped.
_TEXT_LIMIT = 1200


@dataclass(frozen=True)
class Record:
    """What one rank, or a subtree of ranks, brings along.

    Attributes:
        rank: whose record it is; the lowest rank that the digest stands for.
        digest: hex digest of what all must share.
        subject: what the digest is of, for the error text.
        next_tag: lowest tag that is free on all ranks so far.
        fresh: some rank needs a new communicator.
        dtype: element type, from the ranks that know it; "" elsewhere.
        error_rank: rank of the first error, or -1.
        error_type: class name in ``xmesh.errors``.
        error_text: its text.
    """

    rank: int
    digest: str = ""
    subject: str = ""
    next_tag: int = 0
    fresh: bool = False
    dtype: str = ""
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
        merged = replace(
            first,
            next_tag=max(first.next_tag, second.next_tag),
            fresh=first.fresh or second.fresh,
            dtype=first.dtype or second.dtype,
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
        if first.digest != second.digest:
            difference = explain(
                f"all ranks must call with the same {first.subject or second.subject}",
                values=f"rank {first.rank} has {first.digest[:12]}, "
                f"rank {second.rank} has {second.digest[:12]}",
                remedy="give every rank the same layouts, dtype, topology and options "
                "(print(plan) and plan.digest show what differs)",
            )
        elif first.dtype and second.dtype and first.dtype != second.dtype:
            difference = explain(
                "all source ranks must pass arrays of the same dtype",
                values=f"rank {first.rank} has {first.dtype}, rank {second.rank} has "
                f"{second.dtype}",
                remedy="convert with astype before the call",
            )
        if not difference:
            return merged
        return replace(
            merged,
            error_rank=first.rank,
            error_type=AgreementError.__name__,
            error_text=difference,
        )

    def error(self) -> XmeshError | None:
        """The error that all ranks raise, or None."""
        if self.error_rank < 0:
            return None
        kind = getattr(xmesh.errors, self.error_type, XmeshError)
        error: XmeshError = kind(self.error_text)
        return error

    def to_bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Fixed-size message."""
        text = json.dumps(asdict(self)).encode()
        message = np.zeros(_RECORD_NBYTES, np.uint8)
        message[: len(text)] = np.frombuffer(text, np.uint8)
        return message

    @classmethod
    def from_bytes(cls, message: np.ndarray[Any, np.dtype[np.uint8]]) -> Record:
        """Inverse of ``to_bytes``."""
        return cls(**json.loads(message.tobytes().rstrip(b"\0")))


class Agreement:
    """One agreement on one rank; call ``step`` until it returns True.

    Args:
        endpoint: the group.
        tag: used by nothing else at the time.
        record: this rank's part.
    """

    def __init__(self, endpoint: Endpoint, tag: int, record: Record) -> None:
        self._endpoint = endpoint
        self._tag = tag
        self._merged = record
        self.verdict: Record | None = None
        ranks = endpoint.ranks
        place = ranks.index(endpoint.rank)
        self._parent = None if place == 0 else ranks[place & (place - 1)]
        self._children = []
        step = 1
        while place + step < len(ranks) and not place & step:
            self._children.append(ranks[place + step])
            step *= 2
        self._incoming: list[tuple[int, np.ndarray[Any, np.dtype[np.uint8]], Handle]] = []
        for child in self._children:
            self._expect(child)
        self._sending: list[tuple[Any, Handle]] = []
        self._sent_up = False

    def step(self) -> bool:
        """Move on; True when the verdict is there and passed on."""
        while self.verdict is None:
            if not self._incoming:
                if self._parent is None:
                    self._conclude(self._merged)
                    break
                if not self._sent_up:
                    self._send(self._merged, self._parent)
                    self._sent_up = True
                    self._expect(self._parent)
            done = {i for i, _ in self._endpoint.completed([h for _, _, h in self._incoming])}
            if not done:
                self._sending_done()
                return False
            arrived = [entry for i, entry in enumerate(self._incoming) if i in done]
            self._incoming = [e for i, e in enumerate(self._incoming) if i not in done]
            for peer, buffer, _ in arrived:
                record = Record.from_bytes(buffer)
                if peer == self._parent:
                    self._conclude(record)
                else:
                    self._merged = self._merged.merge(record)
        return self._sending_done()

    def waiting_for(self) -> list[int]:
        """Ranks whose message is still missing."""
        return [peer for peer, _, _ in self._incoming]

    def abandon(self) -> None:
        """Give up after a time-out."""
        handles = [handle for _, _, handle in self._incoming] + [h for _, h in self._sending]
        self._incoming, self._sending = [], []
        self._endpoint.abandon(handles)

    def _conclude(self, verdict: Record) -> None:
        self.verdict = verdict
        for child in self._children:
            self._send(verdict, child)

    def _expect(self, peer: int) -> None:
        buffer = np.empty(_RECORD_NBYTES, np.uint8)
        self._incoming.append((peer, buffer, self._endpoint.receive(buffer, peer, self._tag)))

    def _send(self, record: Record, peer: int) -> None:
        message = record.to_bytes()
        self._sending.append((message, self._endpoint.send(message, peer, self._tag)))

    def _sending_done(self) -> bool:
        done = {i for i, _ in self._endpoint.completed([handle for _, handle in self._sending])}
        self._sending = [entry for i, entry in enumerate(self._sending) if i not in done]
        return not self._sending
