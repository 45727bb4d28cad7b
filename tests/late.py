"""An endpoint that reports completions late and in part, as a network does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from xmesh.transport.loopback import LoopbackEndpoint, LoopbackGroup


class Late(LoopbackEndpoint):
    """See the module."""

    def __init__(self, group: LoopbackGroup, rank: int, rng: random.Random) -> None:
        super().__init__(group, rank)
        self._rng = rng

    def completed(self, handles: Sequence[Any]) -> list[tuple[int, int]]:
        return [entry for entry in super().completed(handles) if self._rng.random() < 0.6]
