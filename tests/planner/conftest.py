"""Golden files of the planner's tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with a file of ``golden/``; XMESH_WRITE_GOLDEN=1 writes it instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("XMESH_WRITE_GOLDEN") == "1":
            path.write_text(text)
        assert text == path.read_text(), f"differs from {path.name}; is the change meant?"

    return compare
