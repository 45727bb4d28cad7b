"""Outputs are of the caller's kind: the library and memory of its local array, or of ``like``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from lender import Lender, OnlyDLPack

import xmesh
from xmesh import Box, DeviceMesh, Layout, Resharder
from xmesh.device.array import DeviceArray
from xmesh.errors import ArrayError, TransportError
from xmesh.interop import as_memory
from xmesh.like import NUMPY, kind_of

SRC, DST = (Layout(DeviceMesh([rank]), "R R", (4, 6)) for rank in (0, 1))
BOTH = Layout(DeviceMesh([0]), "R R", (4, 6))


class Tensor(OnlyDLPack):
    """An array of a library that NumPy does not know."""

    def view(self, dtype: Any) -> Tensor:
        return Tensor(self.array.view(dtype))


class Half(Tensor):
    """The same, with elements that have no place in NumPy's DLPack."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not for export")


def library(**functions: Any) -> types.ModuleType:
    module = types.ModuleType("tensors")
    module.from_dlpack = lambda array: Tensor(array)  # type: ignore[attr-defined]
    for name, function in functions.items():
        setattr(module, name, function)
    return module


@pytest.fixture(autouse=True)
def tensors(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The library that the arrays above are from."""
    module = library()
    monkeypatch.setitem(sys.modules, "tensors", module)
    monkeypatch.setattr(Tensor, "__module__", "tensors.core")
    return module


def values_of(dtype: Any = "<f4") -> np.ndarray:
    return oracle.whole((4, 6), dtype)


def moved(local: Any, like: Any = None, src: Layout = BOTH, dst: Layout = BOTH) -> Any:
    """What the only destination rank gets."""
    dtype = as_memory(local, "local").dtype
    with Resharder(xmesh.plan(src, dst, dtype, name="w_up"), like=like) as reshard:
        (result,) = reshard({0: local}).values()
    return result


def said(local: Any, like: Any) -> str:
    with pytest.raises(ArrayError) as caught:
        moved(local, like)
    assert "remedy:" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("wrap", [np.asarray, bytearray, memoryview])
def test_outputs_are_of_numpy_where_the_local_array_is_of_no_library(wrap):
    values = oracle.whole((4,), "u1")
    layout = Layout(DeviceMesh([0]), "R", (4,))
    result = moved(wrap(values), None, layout, layout)
    assert type(result) is np.ndarray
    assert result.tolist() == values.tolist()


def test_outputs_follow_the_local_array_or_what_is_asked_for():
    values = values_of()
    for local, like, kind in (
        (values, None, np.ndarray),
        (Tensor(values), None, Tensor),
        (Tensor(values), np, np.ndarray),
        (Tensor(values), values, np.ndarray),
        (values, sys.modules["tensors"], Tensor),
        (values, Tensor(values[0]), Tensor),
        (type("Mine", (Tensor,), {})(values), None, Tensor),
        (OnlyDLPack(values), None, np.ndarray),  # its library takes no DLPack
    ):
        result = moved(local, like)
        assert type(result) is kind
        assert on_host(result).tolist() == values.tolist()
    # A rank without a local array has nothing to follow.
    assert type(moved(Tensor(values), None, SRC, DST)) is np.ndarray
    assert type(moved(Tensor(values), sys.modules["tensors"], SRC, DST)) is Tensor
    result = xmesh.reshard({0: values}, SRC, DST, like=sys.modules["tensors"])[1]
    assert type(result) is Tensor


def on_host(value: Any) -> np.ndarray:
    memory = as_memory(value, "an output")
    assert isinstance(memory, np.ndarray)
    return memory


def test_out_is_given_back_as_it_is():
    values = values_of()
    out = Tensor(np.zeros((4, 6), "<f4"))
    with Resharder(xmesh.plan(SRC, DST, "<f4"), like=np) as reshard:
        assert reshard({0: values}, {1: out})[1] is out
    assert out.array.tolist() == values.tolist()


def test_the_result_of_a_request_is_one_array(tensors):
    taken: list[Any] = []

    def take(array: Any) -> Any:
        taken.append(array)
        return Tensor(array)

    tensors.from_dlpack = take
    with Resharder(xmesh.plan(BOTH, BOTH, "<f4")) as reshard:
        request = reshard.start({0: Tensor(values_of())})
        assert request.wait()[0] is request.wait()[0]
    assert len(taken) == 1
    assert taken[0].ctypes.data % 64 == 0  # some libraries copy other memory


def test_one_array_for_each_box():
    pieces = Layout.from_boxes({0: [Box((0,), (2,)), Box((4,), (8,))]}, (8,))
    halves = [Tensor(np.zeros(2, "<f4")), Tensor(np.ones(4, "<f4"))]
    with Resharder(xmesh.plan(pieces, pieces, "<f4")) as reshard:
        first, second = reshard({0: halves})[0]
    assert type(first) is type(second) is Tensor
    assert second.array.tolist() == [1] * 4


def test_elements_that_dlpack_of_numpy_does_not_have(tensors):
    values = values_of(ml_dtypes.bfloat16)
    tensors.bfloat16 = ml_dtypes.bfloat16
    assert "BufferError" in said(values, tensors)  # of the view, which NumPy does not export
    tensors.from_dlpack = lambda array: array  # a library of NumPy's arrays
    assert moved(values, tensors).tobytes() == values.tobytes()
    assert "tensors has no float8_e4m3fn" in said(values_of(ml_dtypes.float8_e4m3fn), tensors)


def test_what_a_library_does_not_take_is_refused_before_anything_moves(tensors):
    def breaks(array: Any) -> Any:
        raise RuntimeError("no room on the moon")

    for take, words in (
        (breaks, "tensors: RuntimeError: no room on the moon"),
        (lambda array: Tensor(array.astype("<f2")), "tensors made float16 (1,) of float32 (1,)"),
        (lambda array: Tensor(array[:0]), "tensors made float32 (0,) of float32 (1,)"),
    ):
        tensors.from_dlpack = take
        text = said(values_of(), tensors)
        assert words in text
        assert "pass out=, or like=numpy" in text
        assert "rank 0, tensor 'w_up'" in text
    # Told by the local array, the library is known to have its dtype, and fails at the end.
    text = said(Tensor(values_of()), None)
    assert "tensors made float32 (0, 6) of float32 (4, 6)" in text
    assert "rank 0, tensor 'w_up'" in text
    tensors.from_dlpack = Tensor
    assert "DLPack only supports native byte order" in said(values_of(">f4"), tensors)


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ("tensors", "and not its name\n  values:  'tensors'\n  remedy:  import it"),
        (np.float32, "like must be an array\n  values:  type, not one of its instances"),
        (sys, "like must be an array, or a module with from_dlpack\n  values:  module sys"),
        ([1.0], "like must be an array\n  values:  list"),
    ],
)
def test_what_is_no_kind(like, words):
    assert words in said(values_of(), like)


# --- On a GPU -----------------------------------------------------------------------------------


class OnGPU:
    """An array of the double of CuPy below: its memory is that of the host, and nobody looks."""

    __module__ = "cupy"

    def __init__(self, array: np.ndarray, device: int) -> None:
        self.array, self.ordinal = array, device

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        there = {**self.array.__array_interface__, "stream": 1}
        return {**there, "data": (self.array.ctypes.data if self.array.size else 0, False)}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.ordinal

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not for export")

    def view(self, dtype: Any) -> OnGPU:
        return OnGPU(self.array.view(dtype), self.ordinal)

    def reshape(self, shape: Any) -> OnGPU:
        return OnGPU(self.array.reshape(shape), self.ordinal)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What CuPy does to make arrays, with two devices."""
    module: Any = types.ModuleType("cupy")
    current = [1]

    class Device:
        def __init__(self, ordinal: int) -> None:
            self.ordinal = ordinal

        def __enter__(self) -> None:
            current.append(self.ordinal)

        def __exit__(self, *error: Any) -> None:
            current.pop()

    def empty(shape: Any, dtype: Any) -> OnGPU:
        if np.dtype(dtype).type.__module__ != "numpy" or not np.dtype(dtype).isnative:
            raise ValueError(f"Unsupported dtype {dtype}")
        return OnGPU(np.empty(shape, dtype), current[-1])

    module.empty = empty
    module.from_dlpack = None
    runtime = types.SimpleNamespace(
        getDevice=lambda: current[-1], getDeviceCount=lambda: 8, CUDARuntimeError=RuntimeError
    )
    module.cuda = types.SimpleNamespace(Device=Device, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", module)
    made: types.ModuleType = module
    return made


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "V3", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("shape", [(4, 6), (), (0, 3)])
def test_outputs_of_cupy(cupy, dtype, shape):
    like = OnGPU(np.zeros(2), 0)
    for kind, device in ((kind_of(cupy), 1), (kind_of(like), 0)):
        assert kind.device == device
        (memory,) = kind.empty([shape], np.dtype(dtype))
        assert isinstance(memory, DeviceArray)
        assert (memory.device, memory.writable, memory.shape) == (device, True, shape)
        assert memory.dtype == np.dtype(dtype)
        result = kind.result(memory, np.dtype(dtype))
        assert type(result) is OnGPU
        assert result.array.dtype == dtype
        assert result.array.shape == shape


def test_outputs_of_another_library_on_a_gpu_are_made_by_cupy(cupy, tensors):
    class GPUTensor(Tensor):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **options: Any) -> Any:
            return Lender(self.array, device=(2, 0)).__dlpack__(**options)

    taken: list[Any] = []

    def take(array: OnGPU) -> Any:
        taken.append(array)
        return GPUTensor(array.array)

    tensors.from_dlpack = take
    kind = kind_of(GPUTensor(np.zeros(3, "<f4")))
    assert kind.device == 0
    (memory,) = kind.empty([(2, 3)], np.dtype("<f4"))
    assert isinstance(memory, DeviceArray)
    result = kind.result(memory, memory.dtype)
    assert type(result) is GPUTensor
    assert taken == [memory.owner]
    # Where its library takes no DLPack, CuPy's arrays must do.
    del tensors.from_dlpack
    assert type(kind_of(GPUTensor(np.zeros(3))).empty([(2,)], np.dtype("u1"))[0]) is DeviceArray


def test_cupy_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TransportError, match=r"need CuPy\n.*ModuleNotFoundError"):
        kind_of(OnGPU(np.zeros(3), 0))


def test_kinds_that_are_numpys():
    for like in (None, np, np.zeros(3), bytearray(3), np.ma.masked_array([1]).data, np.float32(1)):
        assert kind_of(like) is NUMPY
    assert NUMPY.device is None


# --- Libraries that are there -------------------------------------------------------------------


@pytest.fixture(params=["jax", "torch"])
def real(request: pytest.FixtureRequest) -> Any:
    """The module of a library whose arrays are to be had here."""
    name = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return importlib.import_module({"jax": "jax.numpy"}.get(name, name))


def made_by(real: Any, dtype: str) -> Any:
    """Whole numbers from 0 to 23, which all these types have."""
    array = real.arange(24).reshape(4, 6) % 8
    wanted = getattr(real, dtype)
    return array.to(wanted) if hasattr(array, "to") else array.astype(wanted)


@pytest.mark.parametrize(
    "dtype", ["float32", "int32", "bool", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_arrays_of_real_libraries_in_and_out(real, dtype):
    local = made_by(real, dtype)
    element = np.dtype(getattr(ml_dtypes, dtype, dtype))
    wanted = (np.arange(24).reshape(4, 6) % 8).astype(element)
    assert on_host(local).tobytes() == wanted.tobytes()
    for like in (None, real, local):
        result = moved(local, like)
        assert type(result) is type(local)
        assert result.dtype == local.dtype
        assert on_host(result).tobytes() == wanted.tobytes()
    assert moved(local, np).tobytes() == wanted.tobytes()
    turned = local.T
    dst = Layout(DeviceMesh([0]), "R R", (6, 4))
    assert on_host(moved(turned, None, dst, dst)).tobytes() == wanted.T.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_writing_to_arrays_of_real_libraries(real, dtype):
    local, out = made_by(real, dtype), real.zeros((4, 6), dtype=getattr(real, dtype))
    with Resharder(xmesh.plan(SRC, DST, as_memory(local, "local").dtype)) as reshard:
        if hasattr(real, "Tensor"):
            assert reshard({0: local}, {1: out})[1] is out
            assert on_host(out).tobytes() == on_host(local).tobytes()
        else:  # immutable
            with pytest.raises(ArrayError, match="out must be writable"):
                reshard({0: local}, {1: out})
            assert not on_host(out).any()


def test_dtypes_that_a_real_library_would_convert(real):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hasattr(real, "Tensor"):
            assert moved(values_of("<f8"), real).dtype == real.float64
        else:
            assert "made float32 (1,) of float64 (1,)" in said(values_of("<f8"), real)


def test_tensors_whose_memory_does_not_hold_their_elements():
    torch = pytest.importorskip("torch")
    for tensor, words in (
        (torch.zeros((4, 6), requires_grad=True), "use tensor.detach()"),
        (torch.zeros((4, 6), dtype=torch.complex64).conj(), "resolve_conj()"),
        (torch.zeros((4, 6), dtype=torch.complex64).conj().imag, "resolve_neg()"),
        (torch.zeros((4, 6)).to_sparse(), "torch.strided"),
    ):
        with pytest.raises(ArrayError) as caught:
            as_memory(tensor, "local")
        assert words in str(caught.value)
