"""Tally: the maximum over a group of ranks, in two small messages along a tree; nothing blocks.

An ``Agreement`` compares whatever ranks do, once; this is for each call, where microseconds count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xmesh.agreement import in_tree
from xmesh.transport.base import Endpoint, Handle

_Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Tally:
    """Elementwise maximum of a few numbers; call ``step`` until it is ``over``.

    Args:
        endpoint: the group.
        tag: used by nothing else at the time.
        numbers: of this rank, as many as on all others.

    Attributes:
        result: the maximum of all ranks, once it is over.
    """

    def __init__(self, endpoint: Endpoint, tag: int, *numbers: int) -> None:
        self._endpoint, self._tag = endpoint, tag
        self._own: _Numbers = np.array(numbers, np.int64)
        self.result: tuple[int, ...] | None = None
        self._parent, self._children = in_tree(endpoint.ranks, endpoint.rank)
        self._incoming: dict[int, tuple[_Numbers, Handle]] = {}
        self._sending: list[Handle] = []
        for child in self._children:
            self._expect(child)
        if self._parent is not None:
            self._expect(self._parent)
        self._pass_on()

    @property
    def over(self) -> bool:
        """The result is here, and passed on."""
        return self.result is not None and not self._sending

    def step(self) -> bool:
        """Move on without waiting; True when anything happened."""
        sent = {i for i, _ in self._endpoint.completed(self._sending)} if self._sending else ()
        self._sending = [handle for i, handle in enumerate(self._sending) if i not in sent]
        if not self._incoming:
            return bool(sent)
        peers = list(self._incoming)
        handles = [handle for _, handle in self._incoming.values()]
        arrived = [peers[i] for i, _ in self._endpoint.completed(handles)]
        for peer in arrived:
            numbers, _ = self._incoming.pop(peer)
            if peer == self._parent:
                self._conclude(numbers)
            else:
                np.maximum(self._own, numbers, out=self._own)
                self._pass_on()
        return bool(sent or arrived)

    def waiting_for(self) -> list[int]:
        """Ranks whose message is still missing: those below in the tree first."""
        below = [peer for peer in self._incoming if peer != self._parent]
        return below or list(self._incoming)

    def abandon(self) -> None:
        """Give up after a time-out."""
        receives, sends = [handle for _, handle in self._incoming.values()], self._sending
        self._incoming, self._sending = {}, []
        self._endpoint.abandon(receives, sends)

    def _pass_on(self) -> None:
        if any(child in self._incoming for child in self._children):
            return
        if self._parent is None:
            self._conclude(self._own)
        else:
            self._send(self._own.copy(), self._parent)

    def _conclude(self, numbers: _Numbers) -> None:
        self.result = tuple(map(int, numbers))
        for child in self._children:
            self._send(numbers.copy(), child)

    def _expect(self, peer: int) -> None:
        numbers: _Numbers = np.empty(len(self._own), np.int64)
        handle = self._endpoint.receive(numbers.view(np.uint8), peer, self._tag)
        self._incoming[peer] = (numbers, handle)

    def _send(self, numbers: _Numbers, peer: int) -> None:
        self._sending.append(self._endpoint.send(numbers.view(np.uint8), peer, self._tag))
