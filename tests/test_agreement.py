"""Agreement: one verdict for a group of ranks, in words that all of them get."""

from __future__ import annotations

import random

import pytest

from xmesh.agreement import DTYPE_LIMIT, Agreement, Record, short
from xmesh.errors import AgreementError, ArrayError, PlanError, XmeshError
from xmesh.transport.loopback import LoopbackGroup

TAG = 3


def agree(
    records: list[Record], absent: set[int] | None = None, seed: int = 0
) -> dict[int, Agreement]:
    """Step all but the absent ranks in a random order until nothing moves any more."""
    group = LoopbackGroup([record.rank for record in records])
    present = [record for record in records if record.rank not in (absent or set())]
    agreements: dict[int, Agreement] = {}
    rng = random.Random(seed)
    rng.shuffle(present)
    idle = 0
    while idle < 50:
        if len(agreements) < len(present) and rng.random() < 0.3:
            record = present[len(agreements)]
            agreements[record.rank] = Agreement(group.endpoint(record.rank), TAG, record)
        moved = False
        for agreement in rng.sample(list(agreements.values()), k=len(agreements)):
            if rng.random() < 0.5:
                moved |= agreement.step()
        idle = 0 if moved or len(agreements) < len(present) else idle + 1
    return dict(sorted(agreements.items()))


def verdict_of(records: list[Record], seed: int = 0) -> Record:
    """The verdict, which must be the same everywhere."""
    agreements = agree(records, seed=seed)
    assert all(agreement.over for agreement in agreements.values())
    verdicts = [agreement.verdict for agreement in agreements.values()]
    assert verdicts[0] is not None
    assert all(verdict == verdicts[0] for verdict in verdicts)
    return verdicts[0]


def error_of(records: list[Record], seed: int = 0) -> XmeshError:
    error = verdict_of(records, seed).error()
    assert error is not None
    return error


def numbers(size: int) -> list[int]:
    """Ranks with gaps between them."""
    return [3 * i + 1 for i in range(size)]


def plan_records(size: int) -> list[Record]:
    return [Record(rank, "plan", {"plan": "d1"}) for rank in numbers(size)]


@pytest.mark.parametrize("size", range(1, 21))
def test_any_group_size(size):
    for seed in range(5):
        records = plan_records(size)
        assert verdict_of(records, seed).error() is None
        for bad in {0, size // 2, size - 1}:
            wrong = list(records)
            wrong[bad] = Record.of_error(records[bad].rank, ArrayError(f"from {bad}"))
            error = error_of(wrong, seed)
            assert type(error) is ArrayError
            assert str(error) == f"from {bad}"


@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_the_lowest_rank_with_an_error_speaks(size):
    ranks = numbers(size)
    for seed in range(5):
        records = plan_records(size)
        for bad in range(1, size):
            kind = PlanError if bad == 1 else ArrayError
            records[bad] = Record.of_error(ranks[bad], kind(f"from {bad}"))
        error = error_of(records, seed)
        assert (type(error), str(error)) == (PlanError, "from 1")


@pytest.mark.parametrize("size", [2, 3, 5, 16])
def test_a_difference_names_two_ranks_and_what_differs(size):
    for odd in (0, size // 2, size - 1):
        records = plan_records(size)
        rank = records[odd].rank
        records[odd] = Record(rank, "plan", {"plan": "d2"})
        error = error_of(records)
        assert type(error) is AgreementError
        text = str(error)
        assert "all ranks must call with the same plan" in text
        assert f"rank {rank} has d2" in text
        assert text.count(" has d1") == 1
        assert "remedy:" in text


def test_only_what_differs_is_listed():
    records = [Record(0, "x", {"a": "1", "b": "2"}), Record(1, "x", {"a": "1", "b": "3", "c": "4"})]
    text = str(error_of(records))
    assert "b: rank 0 has 2, rank 1 has 3" in text
    assert "c: rank 0 has nothing, rank 1 has 4" in text
    assert "a:" not in text


def test_an_error_is_no_difference():
    """A rank whose arguments are wrong has nothing to compare."""
    records = plan_records(3)
    records[1] = Record.of_error(records[1].rank, ArrayError("mine"))
    assert str(error_of(records)) == "mine"


def test_what_is_merged():
    records = [
        Record(0, next_tag=5, dtype=""),
        Record(1, next_tag=9, dtype="<f4"),
        Record(2, next_tag=7, fresh=True),
    ]
    verdict = verdict_of(records)
    assert (verdict.next_tag, verdict.fresh, verdict.dtype) == (9, True, "<f4")
    assert verdict.error() is None


def test_merging_does_not_depend_on_the_order():
    records = [
        Record(0, "p", {"a": "1"}, next_tag=2),
        Record(1, "p", {"a": "1"}, dtype="<f4"),
        Record(2, "p", {"a": "1"}, fresh=True, dtype="<f4"),
    ]
    first = records[0].merge(records[1]).merge(records[2])
    assert first == records[2].merge(records[0]).merge(records[1])
    assert first.rank == 0


def test_dtypes_that_differ():
    for size in (3, 8):
        records = [Record(rank) for rank in range(size)]
        records[1], records[size - 1] = Record(1, dtype="<f4"), Record(size - 1, dtype="<f8")
        text = str(error_of(records))
        assert "all source ranks must pass arrays of the same dtype" in text
        assert "rank 1 has <f4" in text
        assert f"rank {size - 1} has <f8" in text


@pytest.mark.parametrize("letter", ["x", "é", "重", "🚀", "\0", "\x1f", '"', "\\", "\ud800"])
def test_a_long_text_in_any_script_fits_a_message(letter):
    records = plan_records(5)
    records[2] = Record.of_error(records[2].rank, ArrayError(f"rule\n{letter * 5000}"))
    text = str(error_of(records))
    assert text.startswith("rule\n" + letter * 1000)


def test_the_longest_dtypes_fit_a_message_even_where_they_differ():
    names = ['"' * DTYPE_LIMIT, "\\" * DTYPE_LIMIT]
    assert verdict_of([Record(0, dtype=names[0]), Record(1)]).dtype == names[0]
    text = str(error_of([Record(0, dtype=names[0]), Record(1, dtype=names[1])]))
    assert "rank 0 has" in text


def test_an_error_of_a_type_that_is_not_known():
    assert type(Record(0, error_rank=0, error_type="Strange").error()) is XmeshError


def test_short_texts_tell_long_values_apart():
    long = {"mesh": list(range(1000))}
    assert len(short(long)) < 80
    assert short(long) == short({"mesh": list(range(1000))})
    assert short(long) != short({"mesh": [*range(999), 0]})
    assert short([1, "重"]) == '[1, "\\u91cd"]'


@pytest.mark.parametrize("size", range(2, 21))
def test_a_rank_that_never_calls_is_named_by_one_that_waits_for_it(size):
    for absent in (0, size // 2, size - 1):
        records = plan_records(size)
        missing = records[absent].rank
        agreements = agree(records, absent={missing})
        assert not any(agreement.over for agreement in agreements.values())
        named = {rank for a in agreements.values() for rank in a.waiting_for()}
        assert missing in named
        for agreement in agreements.values():
            assert agreement.waiting_for()
            agreement.abandon()
            assert not agreement.waiting_for()


def test_a_second_attempt_is_not_misled_by_the_first():
    """Messages of an attempt that was given up arrive in the next one, with other arguments."""
    for absent in range(4):
        for seed in range(10):
            group = LoopbackGroup(range(4))
            rng = random.Random(seed)
            first = [
                Agreement(group.endpoint(rank), TAG, Record(rank, "plan", {"plan": "old"}))
                for rank in range(4)
                if rank != absent
            ]
            for _ in range(rng.randrange(30)):
                rng.choice(first).step()
            for agreement in first:  # only the receives: what was sent is under way for good
                agreement._endpoint.abandon([h for _, h in agreement._incoming.values()], [])
            second = [
                Agreement(group.endpoint(rank), TAG, Record(rank, "plan", {"plan": "new"}))
                for rank in range(4)
            ]
            for _ in range(400):
                rng.choice(second).step()
            for agreement in second:
                assert agreement.verdict is not None, (absent, seed)
                assert agreement.verdict.error() is None
                assert agreement.verdict.shared == {"plan": "new"}
