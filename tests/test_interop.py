"""Arrays of other libraries: read in place by each protocol, or refused and nothing kept."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lender import CODES, Lender, OnlyDLPack

import xmesh
from xmesh import DeviceMesh, Layout, Resharder
from xmesh.device.array import DeviceArray
from xmesh.dlpack import borrow
from xmesh.errors import ArrayError
from xmesh.interop import as_memory
from xmesh.pipeline.gradients import as_array

BY_BYTES = [name for name in CODES if hasattr(ml_dtypes, name)]
POINTER = 0x7F0000000000


def refused(value: Any, *words: str, writable: bool = False) -> None:
    with pytest.raises(ArrayError) as caught:
        as_memory(value, "local", writable)
    for word in ("local", "remedy:", *words):
        assert word in str(caught.value)


def on_host(value: Any, writable: bool = False) -> np.ndarray:
    memory = as_memory(value, "local", writable)
    assert type(memory) is np.ndarray
    return memory


def on_gpu(value: Any, writable: bool = False) -> DeviceArray:
    memory = as_memory(value, "local", writable)
    assert isinstance(memory, DeviceArray)
    return memory


def buffer_of(values: Any) -> memoryview:
    return memoryview(values)


def has(**attributes: Any) -> Any:
    """An object with some attributes."""
    return type("Has", (), attributes)()


# --- Host memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(b"\1\2\3"),
        lambda: memoryview(bytearray(b"\1\2\3")),
        lambda: array.array("B", [1, 2, 3]),
        lambda: (ctypes.c_ubyte * 3)(1, 2, 3),
        lambda: has(__array_interface__=np.array([1, 2, 3], "u1").__array_interface__),
    ],
    ids=["bytearray", "memoryview", "array.array", "ctypes", "__array_interface__"],
)
def test_host_memory_is_used_in_place(make):
    value = make()
    found = on_host(value, writable=True)
    assert found.shape == (3,)
    assert found.dtype == np.uint8
    found[1] = 9
    assert on_host(value).tolist() == [1, 9, 3]
    assert found.flags.writeable


def test_what_a_buffer_says_of_its_elements():
    assert on_host(array.array("d", [0.5])).dtype == np.float64
    assert on_host(buffer_of(np.zeros((2, 3), ">f4"))).dtype == np.dtype(">f4")
    assert on_host((ctypes.c_int32 * 2 * 3)()).shape == (3, 2)
    assert not on_host(b"abc").flags.writeable
    with mmap.mmap(-1, 8) as mapped:
        assert on_host(mapped, writable=True).nbytes == 8
    refused((ctypes.POINTER(ctypes.c_int) * 2)(), "local must be an array", "PEP 3118")


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_bytes_of_an_array_interface_take_their_type_from_the_array(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    values = oracle.whole((4,), dtype)
    for dtype_of_it in (dtype, f"library.{name}"):
        value = has(__array_interface__=values.__array_interface__, dtype=dtype_of_it)
        assert on_host(value).dtype == dtype
        assert on_host(value).tobytes() == values.tobytes()
    assert on_host(has(__array_interface__=values.__array_interface__)).dtype == values.dtype.str


def test_what_is_no_array():
    for value in (None, 3.0, "text", [1, 2], (1, 2), {}, object(), np):
        refused(value, "local must be an array", type(value).__name__)
    refused(np.ma.masked_array([1]), "a masked array, whose mask would be lost")
    refused(np.float32(1), "a scalar that nothing can be written to", writable=True)


# --- The CUDA array interface -------------------------------------------------------------------


def interface(**changes: Any) -> dict[str, Any]:
    made = {"shape": (2, 3), "typestr": "<f4", "data": (POINTER, False), "version": 3, **changes}
    return {key: value for key, value in made.items() if value is not ...}


def cuda(**changes: Any) -> Any:
    return has(__cuda_array_interface__=interface(**changes))


def test_what_a_cuda_array_interface_says():
    value = cuda(strides=(4, 8), stream=7, data=(POINTER, True))
    found = on_gpu(value)
    assert (found.shape, found.addresses.strides, found.pointer) == ((2, 3), (4, 8), POINTER)
    assert (found.dtype, found.stream, found.writable) == (np.dtype("<f4"), 7, False)
    assert found.owner is value
    found = on_gpu(cuda(strides=None, version=3, stream=None))  # nothing needs to be waited for
    assert (found.addresses.strides, found.stream, found.writable) == ((12, 4), None, True)
    assert on_gpu(cuda(typestr=">f4")).dtype == np.dtype(">f4")
    assert on_gpu(cuda(shape=())).shape == ()
    assert on_gpu(cuda(shape=(0, 3), data=(0, False))).pointer == 0
    assert on_gpu(found) is found


def test_an_interface_older_than_streams_has_dlpack_order_them():
    """PyTorch's and JAX's name no stream, and were read before they were written."""
    for old in (cuda(version=2), cuda(version=3, stream=...)):
        assert on_gpu(old).stream == 1  # what was given to the default stream, at least
    asked = []

    def lend(**options: Any) -> Any:
        asked.append(options.get("stream"))
        raise BufferError("of an element type that DLPack lacks")

    value = has(
        __cuda_array_interface__=interface(version=2),
        __dlpack__=lambda self, **options: lend(**options),
        __dlpack_device__=lambda self: (2, 0),
    )
    assert on_gpu(value).stream == 1
    assert asked
    assert set(asked) == {1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": cuda()}, "an array must have no mask"),
        ({"stream": 0}, "must not be 0"),
        ({"data": ...}, "without data"),
        ({"shape": ..., "typestr": ...}, "without shape, typestr"),
        ({"data": (0, False)}, "of shape (2, 3) at address 0"),
        ({"data": None}, "without data"),
        ({"typestr": "<f1"}, "'<f1'"),
        ({"shape": 3}, "TypeError"),
    ],
)
def test_a_cuda_array_interface_that_is_wrong(changes, words):
    refused(cuda(**changes), words, "Has")


def test_nobody_asks_a_device_array_for_a_copy_on_the_host():
    def copies(self: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError("asked for a copy")

    def breaks(self: Any) -> Any:
        raise RuntimeError("requires grad")

    refused(has(__cuda_array_interface__=property(breaks), __array__=copies), "requires grad")
    refused(has(__cuda_array_interface__=interface(shape=3), __array__=copies), "TypeError")
    on_cuda = {"__dlpack_device__": lambda self: (2, 0), "__dlpack__": lambda self, **_: 1 / 0}
    refused(has(**on_cuda, __array__=copies), "ZeroDivisionError")


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_bytes_of_a_cuda_array_interface_take_their_type_from_the_array(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    here = interface(typestr=dtype.str)
    assert on_gpu(has(__cuda_array_interface__=here, dtype=dtype)).dtype == dtype
    assert on_gpu(has(__cuda_array_interface__=here, dtype=f"library.{name}")).dtype == dtype
    lender = Lender(np.zeros((2, 3), dtype), device=(2, 0))
    lender.__cuda_array_interface__ = here  # type: ignore[attr-defined]
    lender.dtype = f"library.{name}"  # type: ignore[attr-defined]
    assert on_gpu(lender).dtype == dtype
    assert on_gpu(has(__cuda_array_interface__=interface(typestr="|V3"))).dtype == np.dtype("V3")


def test_where_dlpack_serves_instead_of_a_cuda_array_interface():
    class Breaks(Lender):
        @property
        def __cuda_array_interface__(self) -> Any:
            raise TypeError("bfloat16 has no type string")

    found = on_gpu(Breaks(np.zeros(3, ml_dtypes.bfloat16), device=(2, 5)))
    assert (found.dtype, found.device) == (ml_dtypes.bfloat16, 5)


def test_which_gpu_an_array_lies_on():
    here = interface()
    assert on_gpu(has(__cuda_array_interface__=here)).device == -1
    assert on_gpu(has(__cuda_array_interface__=here, device=has(id=3))).device == 3
    assert on_gpu(has(__cuda_array_interface__=here, device=has(index=2))).device == 2
    assert on_gpu(has(__cuda_array_interface__=here, device=1)).device == 1
    assert on_gpu(has(__cuda_array_interface__=here, device=has(index=None))).device == -1
    # An id may count the devices of all processes.
    by_dlpack = has(
        __cuda_array_interface__=here, device=has(id=3), __dlpack_device__=lambda self: (2, 1)
    )
    assert on_gpu(by_dlpack).device == 1
    managed = has(__cuda_array_interface__=here, __dlpack_device__=lambda self: (13, 0))
    assert on_gpu(managed).device == -1


# --- DLPack -------------------------------------------------------------------------------------

NUMPY_TYPES = ("?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16")


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("name", [*NUMPY_TYPES, *BY_BYTES])
def test_dlpack_of_all_types(name, versioned):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = oracle.whole((3, 4), dtype)
    lender = Lender(values, versioned=versioned)
    found = on_host(lender)
    assert (found.dtype, found.shape) == (dtype, (3, 4))
    assert found.ctypes.data == values.ctypes.data
    assert found.tobytes() == values.tobytes()
    assert lender.asked == [{"max_version": (1, 0)} if versioned else {}]


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    "view",
    [
        lambda base: base,
        lambda base: base.T,
        lambda base: base[::-1, ::2],
        lambda base: base[1:, 2:3],
        lambda base: base[:0],
        lambda base: base[1, 2, ...],
        lambda base: np.broadcast_to(base[0], (3, 6)),
    ],
)
def test_dlpack_of_all_strides(view, versioned):
    values = view(oracle.whole((4, 6), "<f4"))
    found = on_host(Lender(values, versioned=versioned, byte_offset=64))
    assert found.shape == values.shape
    assert found.tolist() == values.tolist()
    assert found.strides == values.strides or not values.size


def test_dlpack_without_strides_or_address():
    values = oracle.whole((4, 6), "<f4")
    assert on_host(Lender(values, in_c_order=True)).tolist() == values.tolist()
    assert on_host(Lender(values[:0], null=True)).shape == (0, 6)
    refused(Lender(values, null=True), "of shape (4, 6) at address 0")


def test_what_may_be_written_to():
    """A lender from before DLPack 1.0 cannot say, and arrays of some are immutable."""
    values = np.zeros(3)
    on_host(Lender(values), writable=True)[:] = 5
    assert values.tolist() == [5, 5, 5]
    for lender in (Lender(values, read_only=True), Lender(values, versioned=False)):
        assert not on_host(lender).flags.writeable
        assert not on_gpu(Lender(values, device=(2, 0), read_only=True)).writable
    assert on_gpu(Lender(values, device=(2, 0))).writable


@pytest.mark.parametrize("device", [(2, 0), (2, 3), (13, 0)])
@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_of_a_gpu(device, versioned):
    values = np.zeros((4, 6), ml_dtypes.bfloat16).T
    lender = Lender(values, device=device, versioned=versioned, byte_offset=8)
    found = on_gpu(lender)
    assert (found.pointer, found.shape, found.dtype) == (values.ctypes.data, (6, 4), values.dtype)
    assert found.addresses.strides == values.strides
    assert found.device == (device[1] if device[0] == 2 else -1)  # managed memory is of no GPU
    assert found.stream == lender.asked[0]["stream"] == 1
    assert lender.given_back == 0
    del found
    gc.collect()
    assert lender.given_back == 1


def test_pinned_memory_is_host_memory():
    values = oracle.whole((3,), "u1")
    lender = Lender(values, device=(3, 0))
    assert on_host(lender, writable=True).tolist() == values.tolist()
    assert "stream" not in lender.asked[0]


@pytest.mark.parametrize(
    ("device_type", "name"),
    [(10, "ROCm"), (14, "oneAPI"), (4, "OpenCL"), (99, "unknown (type 99)")],
)
def test_other_devices(device_type, name):
    values = oracle.whole((3,), "u1")

    class Elsewhere(Lender):
        def __dlpack__(self, **options: Any) -> Any:
            if "dl_device" not in options or values[0] == 0:
                raise BufferError("no copy")
            assert options == {"max_version": (1, 0), "dl_device": (1, 0), "copy": True}
            return Lender(values).__dlpack__()

    # To read from, its library may lend a copy.
    lender = Elsewhere(values, device=(device_type, 0))
    words = ("must lie in memory of the host or of a GPU of CUDA", f"on a device of kind {name}")
    assert on_host(lender).tolist() == values.tolist()
    refused(lender, *words, writable=True)
    values[0] = 0
    refused(lender, *words)


@pytest.mark.parametrize("versioned", [True, False])
def test_a_loan_is_given_back_once(versioned):
    lender = Lender(oracle.whole((3,), "u1"), versioned=versioned)
    found = on_host(lender)
    part = found[1:]
    del found
    gc.collect()
    assert lender.given_back == 0
    assert part.tolist() == lender.array[1:].tolist()
    del part
    gc.collect()
    assert lender.given_back == 1
    on_host(Lender(np.zeros(2), versioned=versioned, has_deleter=False))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": (2, 32, 4)}, "code 2, 32 bits, 4 lanes"),
        ({"dtype": (2, 128, 1)}, "code 2, 128 bits"),
        ({"dtype": (3, 64, 1)}, "code 3, 64 bits"),
        ({"dtype": (17, 4, 1)}, "code 17, 4 bits"),
        ({"dtype": (17, 4, 2)}, "code 17, 4 bits, 2 lanes"),
        ({"dtype": (4, 32, 1)}, "code 4, 32 bits"),
        ({"dtype": (6, 1, 1)}, "code 6, 1 bits"),
        ({"dtype": (0, 4, 1)}, "code 0, 4 bits"),
        ({"dtype": (5, 32, 1)}, "code 5, 32 bits"),
    ],
)
def test_what_dlpack_has_and_numpy_has_not(options, words, versioned):
    lender = Lender(np.zeros(3), versioned=versioned, **options)
    with pytest.raises(ArrayError) as caught:
        as_memory(lender, "local")
    assert words in str(caught.value)
    assert "local" in str(caught.value)
    assert lender.given_back == 1  # though the error is still there


def test_another_version_of_dlpack():
    lender = Lender(np.zeros(3), version=(2, 0), dtype=(99, 99, 99))
    refused(lender, "DLPack must have version 1", "version 2.0")
    assert lender.given_back == 1
    assert on_host(Lender(np.zeros(3), version=(1, 7))).shape == (3,)


def test_a_capsule_is_read_once():
    lender = Lender(np.zeros(3))
    capsule = lender.__dlpack__()
    again = has(__dlpack__=lambda self, **_: capsule, __dlpack_device__=lambda self: (1, 0))
    found = borrow(again)
    refused(again, "a capsule that was not read before", "used_dltensor_versioned")
    refused(has(__dlpack__=lambda self, **_: 5, __dlpack_device__=lambda self: (1, 0)), "5")
    del found
    gc.collect()
    assert lender.given_back == 1


def test_types_that_need_a_package_that_is_not_there(monkeypatch):
    lender = Lender(np.zeros(3, ml_dtypes.bfloat16))
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    monkeypatch.setattr("xmesh.dtypes.np.dtype", _no_bfloat16)
    refused(lender, "need the package ml_dtypes", "bfloat16, which is not there")
    assert lender.given_back == 1


def _no_bfloat16(value: Any) -> Any:
    raise TypeError(f"data type {value!r} not understood")


def test_the_words_of_the_other_library_are_passed_on():
    def breaks(self: Any, **_: Any) -> Any:
        raise BufferError("use tensor.detach()")

    words = ("local must be an array", "BufferError: use tensor.detach()")
    refused(has(__dlpack__=breaks, __dlpack_device__=lambda self: (1, 0)), *words)
    # On the host, what can be copied can still be read.
    copies = has(
        __dlpack__=breaks,
        __dlpack_device__=lambda self: (1, 0),
        __array__=lambda self, *_, **__: np.arange(3),
    )
    assert on_host(copies).tolist() == [0, 1, 2]
    refused(copies, *words, writable=True)


@pytest.mark.parametrize("mark", ["is_conj", "is_neg"])
def test_operations_that_the_memory_does_not_show(mark):
    lender = Lender(np.zeros(3, "c8"))
    setattr(lender, mark, lambda: True)
    refused(lender, "the memory of an array must hold its elements", f"resolve_{mark[3:]}()")
    assert lender.asked == []
    setattr(lender, mark, lambda: False)
    assert on_host(lender).shape == (3,)


def test_dlpack_of_numpy():
    values = oracle.whole((4, 6), "<f4")[::-1, ::2]
    found = on_host(OnlyDLPack(values))
    assert found.tolist() == values.tolist()
    assert np.shares_memory(found, values)


def test_what_callbacks_of_a_pipeline_return():
    values = oracle.whole((3,), ml_dtypes.bfloat16)
    assert as_array(Lender(values)).tobytes() == values.tobytes()
    assert as_array([1.0, 2.0]).tolist() == [1, 2]
    assert as_array(2.5) == 2.5
    device = cuda()
    assert as_array(device) is device  # its library adds it up
    with pytest.raises(ArrayError, match="what a callback returns must be an array"):
        as_array(None)


# --- Through a call -----------------------------------------------------------------------------

WRAPPERS = ("numpy", "interface", "buffer", "dlpack", "versioned")


def wrap(values: Any, how: str) -> Any:
    """The same memory, as another library has it, if it can."""
    if how == "buffer" and values.dtype.kind != "V":
        try:
            return memoryview(values)
        except ValueError:  # a type that the buffer protocol does not know
            return values
    if how == "interface" and values.dtype.name not in CODES:
        return has(__array_interface__=values.__array_interface__, keep=values)
    known = values.dtype.name in CODES or values.dtype.kind in CODES
    if how in ("dlpack", "versioned") and known and values.dtype.isnative:
        return Lender(values, versioned=how == "versioned", read_only=not values.flags.writeable)
    return values


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_arrays_of_all_libraries_make_the_round_trip(data):
    ndim = data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.integers(0, 4)) for _ in range(ndim))
    names = [*NUMPY_TYPES, *BY_BYTES, ">f4", ">i8", "V3", "M8[s]"]
    name = data.draw(st.sampled_from(names))
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = oracle.whole(shape, dtype)
    source = oracle.guarded_copy(values, data.draw(st.sampled_from(oracle.MEMORY)))
    target = oracle.guarded(shape, dtype, data.draw(st.sampled_from(oracle.MEMORY)))
    source.view.flags.writeable = data.draw(st.booleans())
    local = wrap(source.view, data.draw(st.sampled_from(WRAPPERS)))
    wrappers = [how for how in WRAPPERS if how != "dlpack"]
    out = wrap(target.view, data.draw(st.sampled_from(wrappers)))
    src, dst = (Layout(DeviceMesh([rank]), " ".join("R" * ndim), shape) for rank in (0, 1))
    with Resharder(xmesh.plan(src, dst, dtype), transport="loopback") as reshard:
        assert reshard({0: local}, {1: out})[1] is out
        made = reshard({0: source.view})[1]
    assert oracle.difference([target.view], [values]) == ""
    assert oracle.difference([made], [values]) == ""
    assert source.intact()
    assert target.intact()


def test_a_byte_order_that_the_plan_does_not_have():
    layout = Layout(DeviceMesh([0]), "R", (3,))
    with Resharder(xmesh.plan(layout, layout, ">f4")) as reshard:
        with pytest.raises(ArrayError, match="<f4, the plan has >f4"):
            reshard({0: np.zeros(3, "<f4")})
        assert reshard({0: np.arange(3, dtype=">f4")})[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("options", [{"read_only": True}, {"versioned": False}])
def test_out_that_may_not_be_written_to(options):
    layout = Layout(DeviceMesh([0]), "R", (3,))
    with Resharder(xmesh.plan(layout, layout, "<f4", name="w_up")) as reshard:
        out = Lender(np.zeros(3, "<f4"), **options)
        with pytest.raises(ArrayError, match="out must be writable") as caught:
            reshard({0: Lender(np.ones(3, "<f4"), **options)}, {0: out})
        assert "DLPack 1.0 or later" in str(caught.value)
        assert "rank 0, tensor 'w_up'" in str(caught.value)
