"""Fractional choice of senders: the least that the busiest sender must send.

Bytes that any of several senders can provide may be divided among them at will. The optimum is the
largest, over all groups of senders, of the bytes that only that group can provide over its
bandwidth; a maximum flow finds the group, and the division.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise

Candidates = tuple[int, ...]


def balance(
    demands: Mapping[Candidates, int], bandwidth_Bps: Mapping[int, float]
) -> tuple[float, dict[tuple[Candidates, int], Fraction]]:
    """Divide demands among their candidate senders so that the last to finish is earliest.

    Args:
        demands: candidate senders -> bytes that one of them, or several together, must send.
        bandwidth_Bps: sender -> bytes per second.

    Returns:
        Seconds until the busiest sender is done, and bytes for each (candidates, sender).
    """
    speed = {s: Fraction(bandwidth_Bps[s]) for candidates in demands for s in candidates}
    if not demands:
        return 0.0, {}
    fixed: dict[int, Fraction] = dict.fromkeys(speed, Fraction(0))
    for candidates, nbytes in demands.items():
        if len(candidates) == 1:
            fixed[candidates[0]] += nbytes
    shared = {c: Fraction(n) for c, n in demands.items() if len(c) > 1}
    time: Fraction = max(fixed[s] / speed[s] for s in speed)
    if shared:
        total = sum(shared.values(), Fraction(0)) + sum(fixed.values(), Fraction(0))
        time = max(time, total / sum(speed.values(), Fraction(0)))
    while True:
        room = {s: time * speed[s] - fixed[s] for s in speed}
        flow, stuck = _flow(shared, room)
        if not stuck:
            break
        # The senders that the stuck demands can reach are full: they need more time, at least this.
        group = {s for c in stuck for s in c}
        must = sum((shared[c] for c in stuck), Fraction(0)) + sum(fixed[s] for s in group)
        time = must / sum((speed[s] for s in group), Fraction(0))
    for candidates, nbytes in demands.items():
        if len(candidates) == 1:
            flow[candidates, candidates[0]] = Fraction(nbytes)
    return float(time), flow


def _flow(
    demands: Mapping[Candidates, Fraction], room: Mapping[int, Fraction]
) -> tuple[dict[tuple[Candidates, int], Fraction], set[Candidates]]:
    """Maximum flow from demands to senders; and the demands that a minimum cut leaves behind."""
    flow: dict[tuple[Candidates, int], Fraction] = {}
    left = dict(room)
    users: dict[int, list[Candidates]] = {}
    for candidates in demands:
        for s in candidates:
            users.setdefault(s, []).append(candidates)
    for candidates, need in demands.items():
        while need > 0:
            path, seen = _augment(candidates, flow, left, users)
            if path is None:
                return flow, seen
            step = min([need, left[path[-1][1]], *(flow[c, s] for c, s in _returned(path))])
            for c, s in path:
                flow[c, s] = flow.get((c, s), Fraction(0)) + step
            for c, s in _returned(path):
                flow[c, s] -= step
            left[path[-1][1]] -= step
            need -= step
    return flow, set()


def _returned(path: list[tuple[Candidates, int]]) -> list[tuple[Candidates, int]]:
    """Edges whose flow the path takes back: the next demand leaves the sender just reached."""
    return [(c, s) for (_, s), (c, _) in pairwise(path)]


def _augment(
    origin: Candidates,
    flow: Mapping[tuple[Candidates, int], Fraction],
    left: Mapping[int, Fraction],
    users: Mapping[int, list[Candidates]],
) -> tuple[list[tuple[Candidates, int]] | None, set[Candidates]]:
    """A path of (demand, sender) edges from ``origin`` to a sender with room, breadth first."""
    seen = {origin}
    came: dict[int, tuple[Candidates, int | None]] = {}
    frontier: list[tuple[Candidates, int | None]] = [(origin, None)]
    while frontier:
        nearer, frontier = frontier, []
        for candidates, via in nearer:
            for s in candidates:
                if s in came:
                    continue
                came[s] = (candidates, via)
                if left[s] > 0:
                    path: list[tuple[Candidates, int]] = []
                    at: int | None = s
                    while at is not None:
                        demand, before = came[at]
                        path.append((demand, at))
                        at = before
                    return path[::-1], seen
                for other in users[s]:
                    if other not in seen and flow.get((other, s), 0) > 0:
                        seen.add(other)
                        frontier.append((other, s))
    return None, seen
