"""Looking at what may not be there: a probe that fails gives its reason, and ranks are grouped."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Hashable, Iterable
from typing import Any


def probe(look: Callable[[], Any]) -> Any:
    """What a probe finds, or why it finds nothing."""
    try:
        return look()
    except Exception as error:
        return f"unknown: {reason(error)}"


def reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".replace("\n", "; ")


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except Exception:
            continue
    return found


def groups(values: Iterable[Hashable]) -> list[tuple[Any, list[int]]]:
    """Ranks by value, in the order in which values first come."""
    found: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return list(found.items())
