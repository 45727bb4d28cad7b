"""What is refused, and in which words: rule, values, context (rank, tensor, layouts), remedy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import oracle
import pytest

import xmesh
from xmesh import Box, DeviceMesh, Layout, Resharder
from xmesh.arguments import check_local, check_out, check_overlap, check_same_memory
from xmesh.device.array import DeviceArray
from xmesh.errors import ArrayError, PlanError, TransportError
from xmesh.program import compile_program

SRC = Layout(DeviceMesh([0, 1]), "S0 R", (4, 6))
DST = Layout(DeviceMesh([1, 2]), "R S0", (4, 6))
PLAN = xmesh.plan(SRC, DST, "<f4", name="w_up")
WHERE = "tensor 'w_up', S0R@(2) -> RS0@(2)"

PIECES = Layout.from_boxes(
    {0: [Box((0,), (2,)), Box((4,), (8,))], 1: [Box((2,), (4,))], 3: []}, (8,)
)


def good() -> dict[int, Any]:
    return {rank: np.zeros((2, 6), "<f4") for rank in SRC.ranks}


def text_of(local: dict[int, Any], out: Any = None, plan: xmesh.Plan = PLAN) -> str:
    with Resharder(plan) as reshard:
        with pytest.raises((ArrayError, TransportError)) as caught:
            reshard(local, out)
        if plan is PLAN:
            reshard(good())  # a refused first call leaves nothing behind
    text = str(caught.value)
    assert "remedy:" in text
    assert f"tensor {plan.name!r}" in text
    return text


def test_wrong_shape():
    text = text_of({**good(), 1: np.zeros((3, 6), "<f4")})
    assert "local must have the shape of the rank's box" in text
    assert "shape (3, 6), the layout gives (2, 6) for [2:4, 0:6]" in text
    assert f"rank 1, {WHERE}" in text


def test_right_number_of_elements_in_another_shape():
    assert "shape (12,), the layout gives (2, 6)" in text_of({**good(), 0: np.zeros(12, "<f4")})


@pytest.mark.parametrize("dtype", [">f4", "<f8", "<i4", "V4"])
def test_wrong_dtype(dtype):
    text = text_of({**good(), 0: np.zeros((2, 6), dtype)})
    assert "local must have the dtype of the plan" in text
    assert f"{np.dtype(dtype).str}, the plan has <f4" in text
    assert "rank 0" in text
    assert "astype" in text


def test_object_arrays():
    text = text_of({**good(), 0: np.empty((2, 6), object)})
    assert "local must have the dtype of the plan" in text
    assert "|O, the plan has <f4" in text
    with pytest.raises(PlanError, match="elements must have a fixed size"):
        xmesh.plan(SRC, DST, object)


def test_missing_array():
    text = text_of({0: good()[0]})
    assert "a source rank must pass its local array" in text
    assert "None" in text
    assert "rank 1" in text
    assert "holds [2:4, 0:6]" in text
    assert "pass an array of shape (2, 6) and dtype float32" in text


def test_array_on_a_rank_that_holds_nothing():
    text = text_of({**good(), 2: np.zeros((2, 6), "<f4")})
    assert "a rank outside the source layout passes None" in text
    assert "ndarray" in text
    assert "rank 2" in text
    assert "source ranks 0, 1" in text


def test_out_on_a_rank_that_needs_nothing():
    text = text_of(good(), {0: np.zeros((4, 3), "<f4")})
    assert "a rank outside the destination layout passes out=None" in text
    assert "destination ranks 1, 2" in text


def test_what_is_no_array():
    for value in ([[0.0] * 6] * 2, "text", 3.0, (1, 2)):
        text = text_of({**good(), 1: value})
        assert "local must be an array" in text
        assert type(value).__name__ in text
        assert "rank 1" in text


class OnDevice:
    """An array in device memory, as far as anyone can tell from outside."""

    dtype = np.dtype("<f4")

    def __init__(self, shape: tuple[int, ...] = (2, 6)) -> None:
        self.shape = shape
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (0x7F0000000000, False),
            "version": 3,
        }

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("nobody may ask for a host copy")


def test_device_arrays_need_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = text_of({**good(), 0: OnDevice()})
    assert "arrays in GPU memory need CuPy" in text
    assert "remedy:  pip install 'cupy-cuda12x[ctk]'" in text
    assert "tensor 'w_up'" in text


def test_local_and_out_of_a_rank_lie_in_one_memory():
    text = text_of(good(), {1: OnDevice((4, 3))})
    assert "local and out of a rank must lie in the same memory" in text
    assert "local in host memory, out in device memory" in text


def on_gpu(
    shape: tuple[int, ...],
    device: int = 0,
    at: int = 0x7F0000000000,
    dtype: Any = "<f4",
    writable: bool = True,
    strides: tuple[int, ...] | None = None,
) -> DeviceArray:
    return DeviceArray.at(at, shape, strides, np.dtype(dtype), device=device, writable=writable)


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(ArrayError) as caught:
        call(*arguments)
    assert "tensor" in str(caught.value)
    assert "remedy:" in str(caught.value)
    return str(caught.value)


def test_device_arrays_are_checked_as_host_arrays_are():
    program = compile_program(PLAN, 1)
    (local,) = check_local(PLAN, program, OnDevice())
    assert isinstance(local, DeviceArray)
    for wrong, words in (
        (on_gpu((3, 6)), "shape (3, 6), the layout gives (2, 6)"),
        (on_gpu((2, 6), dtype=">f4"), ">f4, the plan has <f4"),
    ):
        assert words in refusal(check_local, PLAN, program, wrong)
    out = on_gpu((4, 3), at=0x7F0000000030)
    assert check_out(PLAN, program, out) == [out]
    for wrong, words in (
        (on_gpu((4, 3), writable=False), "a read-only array of shape (4, 3)"),
        (on_gpu((4, 3), strides=(0, 4)), "shape (4, 3) with strides (0, 4)"),
    ):
        assert words in refusal(check_out, PLAN, program, wrong)
    check_overlap(PLAN, 1, [local], [out])
    text = refusal(check_overlap, PLAN, 1, [local], [on_gpu((4, 3), at=0x7F000000002C)])
    assert "out must not share memory with local" in text


def test_device_arrays_on_the_gpu_of_another_rank():
    program = compile_program(PLAN, 1)
    local = on_gpu((2, 6), device=3)
    assert check_local(PLAN, program, local, 3) == check_local(PLAN, program, local) == [local]
    check_local(PLAN, program, on_gpu((2, 6), device=-1), 3)  # it does not say
    check_local(PLAN, program, np.zeros((2, 6), "<f4"), 3)
    text = refusal(check_local, PLAN, program, local, 0)
    assert "local must lie on this rank's GPU" in text
    assert "it lies on GPU 3, this rank's is GPU 0" in text
    out = on_gpu((4, 3), device=1)
    arguments = (PLAN, program, out, xmesh.like.NUMPY, 0)
    assert "out must lie on this rank's GPU" in refusal(check_out, *arguments)


def test_arrays_of_a_rank_lie_in_one_memory():
    plan = xmesh.plan(PIECES, PIECES, "<f4")
    program = compile_program(plan, 0)
    here = [np.zeros(2, "<f4"), np.zeros(4, "<f4")]
    there = [on_gpu((2,)), on_gpu((4,), at=0x7F0000001000)]
    for good_ones in (here, there, [there[0], on_gpu((4,), -1, 0x7F0000001000)]):
        assert check_local(plan, program, good_ones) == good_ones
    for second, words in (
        (here[1], "one on GPU 0, one in host memory"),
        (on_gpu((4,), 1), "one on GPU 0, one on GPU 1"),
    ):
        text = refusal(check_local, plan, program, [there[0], second])
        assert "arrays of local must all lie in one memory" in text
        assert words in text
    check_same_memory(plan, 0, there, there)
    check_same_memory(plan, 0, here, here)
    check_same_memory(plan, 0, here, [on_gpu((0,))])  # no elements, no memory
    check_same_memory(plan, 0, [np.zeros(0, "<f4")], there)
    text = refusal(check_same_memory, plan, 0, here, there)
    assert "local and out of a rank must lie in the same memory" in text
    assert "local in host memory, out on GPU 0" in text
    text = refusal(check_same_memory, plan, 0, [on_gpu((2,), -1)], here)
    assert "local in device memory, out in host memory" in text
    mixed = [on_gpu((2,), -1), on_gpu((2,), 0)]
    assert "local on GPU 0, out on GPU 1" in refusal(
        check_same_memory, plan, 0, mixed, [on_gpu((2,), 1)]
    )


def test_wrong_out():
    text = text_of(good(), {2: np.zeros((3, 4), "<f4")})
    assert "out must have the shape of the rank's box" in text
    assert "shape (3, 4), the layout gives (4, 3)" in text
    assert "out must have the dtype" in text_of(good(), {2: np.zeros((4, 3), "<f8")})


def test_read_only_out():
    out = np.zeros((4, 3), "<f4")
    out.flags.writeable = False
    text = text_of(good(), {2: out})
    assert "out must be writable" in text
    assert "a read-only array of shape (4, 3)" in text
    assert "out must be writable" in text_of(
        good(), {2: np.broadcast_to(np.zeros(3, "<f4"), (4, 3))}
    )


def test_out_that_would_be_lost():
    """A NumPy scalar is copied by whoever asks for its array."""
    scalar = Layout(DeviceMesh([0]), "", ())
    plan = xmesh.plan(scalar, scalar, "<f4")
    text = text_of({0: np.float32(1)}, {0: np.float32(0)}, plan)
    assert "out must be an array" in text
    with Resharder(plan) as reshard:
        assert reshard({0: np.float32(7)})[0] == 7


def test_out_that_overlaps_local():
    base = np.zeros((4, 6), "<f4")
    text = text_of({**good(), 1: base[:2]}, {1: base[:, 3:]})
    assert "out must not share memory with local" in text
    assert "local of shape (2, 6), out of shape (4, 3)" in text
    assert "rank 1" in text


def test_out_beside_local_in_one_buffer():
    """Interleaved, so each lies within the other's bounds, and no element is in both."""
    base = np.zeros((8, 6), "<f4")
    base[:2] = 5
    plan = xmesh.plan(SRC, SRC, "<f4")
    with Resharder(plan) as reshard:
        both = np.zeros((2, 12), "<f4")
        both[:, ::2] = 5
        result = reshard({0: both[:, ::2], 1: good()[1]}, {0: both[:, 1::2]})
    assert result[0].tolist() == [[5] * 6] * 2


def test_outs_that_overlap_each_other():
    plan = xmesh.plan(PIECES, PIECES, "<f4")
    local = {0: [np.zeros(2, "<f4"), np.zeros(4, "<f4")], 1: np.zeros(2, "<f4")}
    out = np.zeros(5, "<f4")
    text = text_of(local, {0: [out[:2], out[1:]]}, plan)
    assert "arrays of out must not share memory with each other" in text
    assert "array 1 of shape (4,)" in text


def test_wrong_number_of_boxes():
    plan = xmesh.plan(PIECES, one_rank := Layout(DeviceMesh([2]), "R", (8,)), "<f4")
    right = {0: [np.zeros(2, "<f4"), np.zeros(4, "<f4")], 1: np.zeros(2, "<f4")}
    text = text_of({**right, 0: [np.zeros(2, "<f4")]}, None, plan)
    assert "local must be a sequence of one array for each box of the rank" in text
    assert "1 arrays" in text
    assert "its 2 boxes: [0:2] [4:8]" in text
    text = text_of({**right, 0: np.zeros(6, "<f4")}, None, plan)
    assert "ndarray" in text
    back = xmesh.plan(one_rank, PIECES, "<f4")
    text = text_of({2: np.zeros(8, "<f4")}, {0: [np.zeros(2, "<f4")] * 3}, back)
    assert "out must be a sequence of one array for each box" in text
    assert "3 arrays" in text


def test_boxes_in_another_order():
    plan = xmesh.plan(PIECES, PIECES, "<f4")
    local = {0: [np.zeros(4, "<f4"), np.zeros(2, "<f4")], 1: np.zeros(2, "<f4")}
    assert "shape (4,), the layout gives (2,) for [0:2]" in text_of(local, None, plan)


def test_the_lowest_rank_speaks_when_several_are_wrong():
    text = text_of({0: np.zeros(1, "<f4"), 1: None})
    assert "rank 0" in text
    assert "shape (1,)" in text


def test_arguments_that_are_no_dicts_under_loopback():
    with Resharder(PLAN) as reshard:
        for arguments in ((np.zeros((2, 6), "<f4"),), (good(), np.zeros((4, 3), "<f4"))):
            with pytest.raises(ArrayError, match="dicts from rank to array") as caught:
                reshard(*arguments)
            assert "ndarray" in str(caught.value)
        reshard(good())


def line(ranks: tuple[int, int] = (0, 1)) -> xmesh.Plan:
    """A plan that moves eight bytes from one rank to another."""
    src, dst = (Layout(DeviceMesh([rank]), "R", (8,)) for rank in ranks)
    return xmesh.plan(src, dst, "u1")


def with_method(name: str, value: Any) -> Any:
    """An object that has one attribute."""
    return type("Has", (), {name: value})()


@pytest.mark.parametrize(
    "wrap", [memoryview, bytearray, np.asarray], ids=lambda wrap: wrap.__name__
)
def test_anything_with_a_buffer_is_an_array(wrap):
    array = oracle.whole((8,), "u1")
    with Resharder(line()) as reshard:
        out = wrap(np.zeros(8, "u1"))
        result = reshard({0: wrap(array)}, {1: out})
    assert result[1] is out
    assert np.asarray(out).tolist() == array.tolist()


def test_what_can_only_be_copied_is_read_but_not_written_to():
    array = oracle.whole((8,), "u1")
    copies = with_method("__array__", lambda self, *_, **__: array.copy())
    with Resharder(line()) as reshard:
        assert reshard({0: copies})[1].tolist() == array.tolist()
        with pytest.raises(ArrayError, match="out must be an array"):
            reshard({0: array}, {1: copies})


def test_subclasses_of_arrays_are_seen_as_plain_arrays():
    layout = Layout(DeviceMesh([0]), "R R", (2, 4))
    other = Layout(DeviceMesh([1]), "R R", (2, 4))
    with Resharder(xmesh.plan(layout, other, "u1")) as reshard:
        out: Any = np.zeros((2, 4), "u1").view(type("Mine", (np.ndarray,), {}))
        array = oracle.whole((2, 4), "u1")
        assert reshard({0: array.view(type("Mine", (np.ndarray,), {}))}, {1: out})[1] is out
        assert out.tolist() == array.tolist()
        with pytest.raises(ArrayError, match="a masked array, whose mask would be lost"):
            reshard({0: np.ma.masked_array(array)})


def test_what_fails_while_it_is_read_is_refused_and_later_calls_go_on():
    def breaks(self: Any) -> Any:
        raise RuntimeError("requires grad")

    array = oracle.whole((8,), "u1")
    with Resharder(line()) as reshard:
        for _ in range(2):
            reshard({0: array})
            with pytest.raises(ArrayError, match="RuntimeError: requires grad"):
                reshard({0: with_method("__array_interface__", property(breaks))})
        assert reshard({0: array})[1].tolist() == array.tolist()


def test_memory_of_a_call_in_flight_is_left_alone():
    array, out = oracle.whole((8,), "u1"), np.zeros(8, "u1")
    with Resharder(line()) as reshard, pytest.MonkeyPatch.context() as patch:
        reshard({0: array})
        patch.setattr("xmesh.execution.Execution.step", lambda self: False)  # nothing ends yet
        first = reshard.start({0: array}, {1: out})
        writes_the_same = reshard.start({0: array}, {1: out})
        patch.undo()
        assert first.wait()[1].tolist() == array.tolist()
        with pytest.raises(ArrayError, match="must not share memory"):
            writes_the_same.wait()
        assert reshard({0: array}, {1: out})[1] is out  # free again


def test_the_cause_is_raised_before_what_comes_of_it():
    src, dst = (Layout(DeviceMesh(ranks), "S0", (8,)) for ranks in ([2, 3], [0, 1]))
    halves = {rank: np.zeros(4, "u1") for rank in (2, 3)}
    with Resharder(xmesh.plan(src, dst, "u1")) as reshard:
        reshard(halves)
        with pytest.raises(ArrayError, match="must have the dtype of the plan"):
            reshard(halves | {2: np.zeros(4, "f4")})


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "5", None])
def test_a_time_out_is_a_number(timeout_s):
    with pytest.raises(
        xmesh.errors.OptionError, match="a time-out must be a number of seconds >= 0"
    ):
        Resharder(line(), timeout_s=timeout_s)


@pytest.mark.parametrize("staging_nbytes", [-1, "big", 1.5])
def test_staging_memory_is_a_number_of_bytes(staging_nbytes):
    with pytest.raises(xmesh.errors.OptionError, match="staging_nbytes must be an integer >= 0"):
        Resharder(line(), staging_nbytes=staging_nbytes)


def test_rank_with_empty_boxes_may_pass_none_or_an_empty_array():
    src = Layout(DeviceMesh([0, 1, 2, 3]), "S0", (3,))
    dst = Layout(DeviceMesh([4]), "R", (3,))
    local: dict[int, Any] = {rank: np.full(1, rank, "<i8") for rank in range(3)}
    with Resharder(xmesh.plan(src, dst, "<i8")) as reshard:
        assert reshard(local)[4].tolist() == [0, 1, 2]
        assert reshard({**local, 3: np.zeros(0, "<i8")})[4].tolist() == [0, 1, 2]
        with pytest.raises(ArrayError, match="dtype of the plan"):
            reshard({**local, 3: np.zeros(0, "<f4")})


def test_what_is_no_plan_and_no_transport():
    with pytest.raises(PlanError, match="a Resharder needs a Plan"):
        Resharder(SRC)  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="transport must be one of auto, mpi, nccl, loopback"):
        Resharder(PLAN, transport="tcp")
    with pytest.raises(TransportError, match="loopback runs without a communicator"):
        Resharder(PLAN, transport="mpi")


def test_a_dict_with_a_rank_outside_the_plan_is_refused():
    mesh = xmesh.DeviceMesh([0, 1])
    plan = xmesh.plan(xmesh.Layout(mesh, "S0", (4,)), xmesh.Layout(mesh, "R", (4,)), name="field")
    halves = {rank: np.zeros(2, "float32") for rank in (0, 1)}
    with xmesh.Resharder(plan) as resharder:
        with pytest.raises(xmesh.errors.ArrayError, match=r"'7' is not among them") as caught:
            resharder(halves | {"7": halves[0]})
        assert "tensor 'field'" in str(caught.value)
        assert resharder(halves)[1].shape == (4,)


def test_elements_of_out_must_not_share_memory():
    with Resharder(line()) as reshard:
        out = np.lib.stride_tricks.as_strided(np.zeros(1, "u1"), (8,), (0,))
        with pytest.raises(ArrayError, match="each element of out must have memory of its own"):
            reshard({0: oracle.whole((8,), "u1")}, {1: out})


def test_a_call_without_memory_for_its_output_does_not_keep_the_others_waiting(monkeypatch):
    """The rank relays what it cannot keep, from staging memory, and says why it failed."""
    layout = Layout(DeviceMesh([0]), "R R", (8, 6))
    other = Layout(DeviceMesh([1, 2, 3]), "R R", (8, 6))
    plan = xmesh.plan(layout, other, "u1", chunk_nbytes=4, strategy="broadcast")
    array = oracle.whole((8, 6), "u1")
    with Resharder(plan, staging_nbytes=0) as reshard:
        reshard({0: array})
        outs = {rank: np.zeros((6, 8), "u1").T for rank in (2, 3)}
        empty = np.empty

        def no_room(shape, dtype=float, **options):
            if shape == (8, 6):
                raise MemoryError("no room")
            return empty(shape, dtype, **options)

        monkeypatch.setattr("xmesh.arguments.np.empty", no_room)
        with pytest.raises(ArrayError, match="there must be memory for the output") as caught:
            reshard({0: array}, outs)
        assert "48 bytes of output; no room" in str(caught.value)
        for out in outs.values():
            assert out.tolist() == array.tolist()
