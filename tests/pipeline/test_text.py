"""Schedules as text: they print, parse, and point at what they cannot read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xmesh.pipeline
from xmesh.errors import OptionError, ScheduleError
from xmesh.pipeline import SCHEDULES, Action, Edge, PipelineSchedule, schedule
from xmesh.pipeline.action import EDGE_OPS, OPS, parse_program, program_lines
from xmesh.pipeline.lower import lower

NUMBERS = st.integers(0, 10**6)
NAMES = st.text("abcXYZ019_-.>é[]", min_size=1)


@st.composite
def actions(draw):
    op = draw(st.sampled_from(OPS))
    return Action(
        op,
        draw(NUMBERS),
        *(() if op == "REDUCE" else (draw(NUMBERS),)),
        *((draw(NAMES),) if op in EDGE_OPS else ()),
    )


@given(actions())
def test_actions_round_trip(action):
    assert Action.parse(str(action)) == action


@given(st.lists(st.lists(actions(), max_size=5), min_size=1, max_size=4))
def test_programs_round_trip(groups):
    assert parse_program(program_lines(groups)) == tuple(map(tuple, groups))


@pytest.mark.parametrize(
    ("text", "place", "rule"),
    [
        ("F0", 0, "stage, op, edge"),
        ("0F0 0X0", 5, "an op is one of F B I W"),
        ("0F", 1, "every op but REDUCE is of one micro-batch"),
        ("0REDUCE3", 1, "every op but REDUCE is of one micro-batch"),
        ("0SEND1", 1, "SEND RECV WAIT name an edge"),
        ("1F(x)1", 1, "SEND RECV WAIT name an edge"),
        ("0F0 0B0 1 F1", 8, "stage, op, edge"),
        ("0f0", 0, "stage, op, edge"),
        ("0F0 0SEND(a b)0", 4, "stage, op, edge"),
    ],
)
def test_a_caret_stands_under_what_is_no_action(text, place, rule):
    with pytest.raises(ScheduleError, match="remedy") as caught:
        PipelineSchedule.parse(text)
    lines = str(caught.value).splitlines()
    assert rule in lines[0]
    assert lines[2].index("^") - lines[1].index(text) == place


def test_lines_have_labels_in_order():
    with pytest.raises(ScheduleError, match="here begins the line of group 1"):
        PipelineSchedule.parse("0: 0F0\n2: 1F0")


def test_a_heading_is_optional_and_checked():
    text = "# mine\n\nschedule mine stages=3 microbatches=2\n0: 0F0 # a comment\n1F0\n"
    made = PipelineSchedule.parse(text)
    assert (made.name, made.num_stages, made.num_microbatches) == ("mine", 3, 2)
    assert made.groups == ((Action("F", 0, 0),), (Action("F", 1, 0),))
    assert PipelineSchedule.parse("0F0\n1F0").num_stages == 2
    with pytest.raises(ScheduleError, match="a heading is"):
        PipelineSchedule.parse("schedule mine microbatches=x\n0F0")
    with pytest.raises(ScheduleError, match="num_stages=1, 2 are used"):
        PipelineSchedule.parse("schedule mine stages=1\n0F0\n1F0")


@pytest.mark.parametrize("text", ["", "schedule mine", "# nothing"])
def test_no_schedule_of_nothing(text):
    with pytest.raises(ScheduleError, match="something to compute"):
        PipelineSchedule.parse(text)


def test_users_write_computations_alone():
    with pytest.raises(ScheduleError, match="F, B, I and W alone") as caught:
        PipelineSchedule.parse("0F0 0SEND(x)0\n1F0")
    assert "[0SEND(x)0]" in str(caught.value)
    with pytest.raises(ScheduleError, match="a stage lives in one group"):
        PipelineSchedule.parse("0F0\n0B0")


@pytest.mark.parametrize("weight_delay", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_round_trips(name, weight_delay):
    for stages in range(1, 7):
        for microbatches in range(1, 13):
            made = schedule(name, stages, microbatches, weight_delay=weight_delay)
            again = PipelineSchedule.parse(str(made))
            assert again == made
            assert (again.name, again.digest) == (made.name, made.digest)


def test_equal_schedules_and_no_others_share_a_digest():
    found = {
        schedule(name, p, m, weight_delay=delay)
        for name in SCHEDULES
        for p in (1, 2, 3)
        for m in (1, 2, 5)
        for delay in (False, True)
    }
    assert len({made.digest for made in found}) == len(found)
    # Of one stage, all that do not split the backward are the same but gpipe and the interleaved.
    assert schedule("1f1b", 1, 5) == schedule("eager-1f1b", 1, 5) != schedule("gpipe", 1, 5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden(name, golden):
    made = schedule(name, 4, 8)
    delayed = schedule(name, 4, 8, weight_delay=True)
    texts = [str(made)] if delayed == made else [str(made), str(delayed)]
    golden(f"{name}.txt", "\n\n".join(texts) + "\n")


def test_golden_program(golden):
    """A skip connection, a mask without a gradient, and weight gradients behind the sends."""
    edges = [
        Edge("hidden", 0, 1),
        Edge("deep", 1, 2),
        Edge("skip", 0, 2),
        Edge("mask", 0, 2, differentiable=False),
    ]
    program = lower(schedule("eager-1f1b", 3, 3, weight_delay=True), edges)
    golden("program.txt", "".join(" ".join(map(str, line)) + "\n" for line in program))


@pytest.mark.parametrize(
    ("arguments", "options", "rule"),
    [
        (("2f2b", 2, 2), {}, "a schedule is one of gpipe, 1f1b"),
        (("1f1b", 0, 2), {}, "num_stages is an int >= 1"),
        (("1f1b", 2, 0), {}, "num_microbatches is an int >= 1"),
        (("1f1b", 2, 1.5), {}, "num_microbatches is an int >= 1"),
        (("1f1b", 2, 2), {"chunks": 2}, "only interleaved-1f1b has chunks"),
        (("interleaved-1f1b", 2, 2), {"chunks": 0}, "chunks is an int >= 1"),
    ],
)
def test_options(arguments, options, rule):
    with pytest.raises(OptionError, match=rule):
        schedule(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("a b", 0, 1), "a name that a schedule can print"),
        (("a", 1, 1), "from one stage to another"),
        (("a", -1, 1), "from one stage to another"),
        (("a", 0, "1"), "from one stage to another"),
        (("a", 0, 1, "S0R", "RR", (2, 3, 4)), "as many dimensions"),
        (("a", 0, 1, None, None, (2, -3)), "extents are >= 0"),
    ],
)
def test_edges(arguments, rule):
    with pytest.raises(ScheduleError, match=rule) as caught:
        Edge(*arguments)
    assert f"edge {arguments[0]!r}" in str(caught.value)


def test_an_edge_knows_its_bytes():
    edge = Edge("hidden", 0, 1, src="S0RR", dst="S0RR", shape=(8, 64, 32), dtype="float16")
    assert edge.nbytes == 8 * 64 * 32 * 2
    assert (str(edge), str(edge.src)) == ("hidden: 0 -> 1", "S0RR")


def test_schedule_is_the_function_whatever_is_imported():
    """The module that holds PipelineSchedule has the name of the function that makes one."""
    from xmesh.pipeline.schedule import PipelineSchedule as Same

    assert Same is PipelineSchedule
    assert callable(xmesh.pipeline.schedule)
