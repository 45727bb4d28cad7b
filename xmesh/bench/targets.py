"""Targets for measurements on a cluster, and which of them rows meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from xmesh.bench.rows import Row

MIB = 2**20
#: Time over bound that ``auto`` may take: for arrays from about 64 MiB, and for smaller ones.
LARGE_NBYTES = 48 * MIB
LARGE_RATIO = 1.08
SMALL_RATIO = 1.15
#: Time of a broadcast to the most receivers over that to one.
MULTICAST_RATIO = 1.10
FORMULA_ERROR = 0.15
PREDICTION_ERROR = 0.10
#: How much slower than the best strategy ``auto`` may be.
CHOICE_LOSS = 0.05
#: What people use, and what ``auto`` must be ahead of.
RIVALS = ("send_recv/naive", "mpi_alltoallw", "mpi_bcast")

ByCase = Mapping[int | str, Mapping[str, Row]]


@dataclass(frozen=True)
class Target:
    """One target, over all rows that it is about.

    Attributes:
        rule: what should hold.
        checked: how often that was looked at.
        missed: a text for each time that it did not hold.
    """

    rule: str
    checked: int
    missed: tuple[str, ...]

    @property
    def met(self) -> bool:
        """Whether it always held, and there was something to look at."""
        return self.checked > 0 and not self.missed


def by_case(rows: Iterable[Row]) -> dict[int | str, dict[str, Row]]:
    """Rows by case and method, in the order in which they were measured."""
    table: dict[int | str, dict[str, Row]] = {}
    for row in rows:
        table.setdefault(row.case, {})[row.method] = row
    return table


def best_planned(rows: Mapping[str, Row]) -> Row | None:
    """The fastest of a case's rows that have a plan, ``auto`` among them."""
    planned = [row for row in rows.values() if row.predicted_s is not None]
    return min(planned, key=lambda row: row.time_s, default=None)


def targets(n_to_m: Sequence[Row], one_to_m: Sequence[Row]) -> list[Target]:
    """What the package wants of a cluster, and where it fell short.

    Args:
        n_to_m: rows of ``xmesh bench paper``.
        one_to_m: rows of ``xmesh bench multicast``.
    """
    cases, multicasts = by_case(n_to_m), by_case(one_to_m)
    wrong = [f"case {row.case}, {row.method}: {row.problem}" for row in (*n_to_m, *one_to_m)]
    verified = [row.verified for row in (*n_to_m, *one_to_m)]
    return [
        Target(
            "every element of every call is right",
            len(verified),
            tuple(text for text, right in zip(wrong, verified, strict=True) if not right),
        ),
        _target(
            f"n to m: auto takes at most {SMALL_RATIO:.2f} x the bound, from about 64 MiB "
            f"{LARGE_RATIO:.2f} x",
            _bound_ratios(cases),
            lambda row, ratio: (
                ratio <= (LARGE_RATIO if row.nbytes >= LARGE_NBYTES else SMALL_RATIO)
            ),
        ),
        _target(
            f"1 to m: a broadcast to the most receivers takes at most {MULTICAST_RATIO:.2f} x the "
            "time to one",
            _multicast_ratio(multicasts),
            lambda _, ratio: ratio <= MULTICAST_RATIO,
        ),
        _target(
            f"1 to m: each strategy is within {FORMULA_ERROR:.0%} of its formula (measured / "
            "formula)",
            [
                (row, f"{row.case}, {row.method}", row.time_s / row.formula_s)
                for row in one_to_m
                if row.formula_s is not None and row.method not in ("auto", "broadcast")
            ],
            lambda _, ratio: abs(ratio - 1) <= FORMULA_ERROR,
        ),
        *(
            _target(
                f"n to m: auto is faster than {rival} (its time / that of auto)",
                _speed_ups(cases, rival),
                lambda _, ratio: ratio > 1,
            )
            for rival in RIVALS
        ),
        _target(
            f"the prediction is within {PREDICTION_ERROR:.0%} of the time (predicted / measured)",
            [
                (row, f"case {row.case}, {row.method}", row.predicted_s / row.time_s)
                for row in (*n_to_m, *one_to_m)
                if row.predicted_s is not None
            ],
            lambda _, ratio: abs(ratio - 1) <= PREDICTION_ERROR,
        ),
        _target(
            f"auto is at most {CHOICE_LOSS:.0%} slower than any other strategy (its time / that of "
            "the best other one)",
            [*_losses(cases), *_losses(multicasts)],
            lambda _, ratio: ratio <= 1 + CHOICE_LOSS,
        ),
    ]


_Figure = tuple[Row, str, float]


def _target(rule: str, figures: Iterable[_Figure], met: Callable[[Row, float], bool]) -> Target:
    found = list(figures)
    missed = tuple(f"{text}: {ratio:.2f}" for row, text, ratio in found if not met(row, ratio))
    return Target(rule, len(found), missed)


def _bound_ratios(cases: ByCase) -> Iterator[_Figure]:
    for case, rows in cases.items():
        if "auto" in rows:
            yield rows["auto"], f"case {case}", rows["auto"].time_s / rows["auto"].bound_s


def _multicast_ratio(multicasts: ByCase) -> Iterator[_Figure]:
    broadcasts = [rows["broadcast"] for rows in multicasts.values() if "broadcast" in rows]
    if len(broadcasts) > 1:
        first, last = broadcasts[0], broadcasts[-1]
        yield last, f"{last.case} against {first.case}", last.time_s / first.time_s


def _speed_ups(cases: ByCase, rival: str) -> Iterator[_Figure]:
    for case, rows in cases.items():
        if "auto" in rows and rival in rows:
            auto, other = rows["auto"], rows[rival]
            ratio = other.time_s / auto.time_s
            reasons = "" if ratio > 1 else _why(auto, other)
            yield auto, f"case {case}{reasons}", ratio


def _why(auto: Row, other: Row) -> str:
    """What is known of a case in which ``auto`` is not ahead."""
    reasons = []
    if auto.receivers <= 1:
        reasons.append("nothing to multicast: each box is for one rank, so both send the same")
    if min(auto.times_s) <= max(other.times_s) and min(other.times_s) <= max(auto.times_s):
        reasons.append("the times of the repeats overlap")
    return f" ({'; '.join(reasons)})" if reasons else ""


def _losses(cases: ByCase) -> Iterator[_Figure]:
    for case, rows in cases.items():
        # Rows of the strategy that it took differ from its own by order and chance alone.
        others = {
            name: row
            for name, row in rows.items()
            if "auto" in rows and row.strategy != rows["auto"].strategy
        }
        best = best_planned(others)
        if best is not None:
            ratio = rows["auto"].time_s / best.time_s
            yield rows["auto"], f"case {case}, {best.method}", ratio
