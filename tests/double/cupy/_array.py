"""Arrays on a device."""

from __future__ import annotations

import numpy as np

from cupy import _copies, _devices, _dlpack, _engine, _memory
from cupy._errors import CUDARuntimeError
from cupy._layout import Flags, Layout
from cupy.cuda import memory
from cupy.cuda.device import Device
from cupy.cuda.stream import get_current_stream

_DTYPES = "?bhilqBHILQefdFD"
_SCALARS = (bool, int, float, complex, np.number, np.bool_)


def supported(dtype) -> np.dtype:
    """A dtype of arrays that CuPy can make."""
    dtype = np.dtype(dtype)
    if dtype.char not in _DTYPES or not dtype.isnative:
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


def run(label: str, function, *arrays: ndarray) -> None:
    """Put a function into the current stream that is called with NumPy views of arrays.

    The arrays are not kept alive: as with a kernel of CuPy, only the order of the stream that their
    memory was taken in does that.
    """
    stream = _engine.stream_of(get_current_stream().ptr)
    if stream.device != _devices.current():
        raise CUDARuntimeError(400)
    layouts = [array._layout for array in arrays]
    for layout in layouts:
        layout.host_view(stream.device)  # what is wrong by now is raised by the call

    def call() -> None:
        with np.errstate(all="ignore"):
            function(*(layout.host_view(stream.device) for layout in layouts))

    _engine.enqueue(get_current_stream().ptr, _engine.Call(label, call))


class ndarray:
    data: memory.MemoryPointer
    base: ndarray | None
    __array_priority__ = 100
    __array_ufunc__ = None  # no function of NumPy takes it
    __hash__ = None

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = tuple(map(int, shape)) if isinstance(shape, (tuple, list)) else (int(shape),)
        dtype = np.dtype(dtype) if memptr is not None else supported(dtype)
        if any(size < 0 for size in shape):
            raise ValueError("Negative dimensions are not allowed")
        if strides is None:
            strides = np.empty((0,) * len(shape), dtype).strides
            sizes = shape if order in ("C", None) else shape[::-1]
            strides = [dtype.itemsize * int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))]
            strides = strides if order in ("C", None) else strides[::-1]
            if order not in ("C", "F", None):
                raise ValueError(f"order must be C or F, not {order!r}")
        elif memptr is None:
            raise NotImplementedError("the double takes strides with memptr alone")
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        self.data = memory.alloc(nbytes) if memptr is None else memptr
        self.base = None
        self._layout = Layout(self.data.ptr, shape, tuple(strides), dtype)

    def _view(self, layout: Layout) -> ndarray:
        """An array in the same memory."""
        data = memory.MemoryPointer(self.data.mem, layout.pointer - self.data.mem.ptr)
        view = ndarray(layout.shape, layout.dtype, data, layout.strides)
        view.base = self if self.base is None else self.base
        return view

    # What it is.

    shape = property(lambda self: self._layout.shape)
    strides = property(lambda self: self._layout.strides)
    dtype = property(lambda self: self._layout.dtype)
    ndim = property(lambda self: len(self._layout.shape))
    size = property(lambda self: self._layout.size)
    itemsize = property(lambda self: self._layout.dtype.itemsize)
    nbytes = property(lambda self: self._layout.size * self._layout.dtype.itemsize)
    device = property(lambda self: Device(self.data.device_id))

    @property
    def flags(self):
        return Flags(*self._layout.contiguous(), self.base is None)

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": get_current_stream().ptr or 1,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
        }

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return _dlpack.export(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self):
        return (_dlpack.CUDA, self.data.device_id)

    def __array__(self, dtype=None):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to make one."
        )

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __repr__(self):
        return repr(self.get())

    # Views.

    def __getitem__(self, slices):
        if isinstance(slices, ndarray):
            return apply(lambda array, index: array[index], self, slices)
        return self._view(self._layout.index(slices))

    def view(self, dtype=None):
        return self._view(self._layout.apply(lambda array: array.view(dtype or self.dtype)))

    def transpose(self, *axes):
        return self._view(self._layout.apply(lambda array: array.transpose(*axes)))

    def swapaxes(self, axis1, axis2):
        return self._view(self._layout.apply(lambda array: array.swapaxes(axis1, axis2)))

    @property
    def T(self):
        return self if self.ndim < 2 else self.transpose()

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 else shape
        layout = self._layout.reshape(shape)
        if layout is not None:
            return self._view(layout)
        copy = self.copy()
        return copy._view(copy._layout.reshape(shape))

    def ravel(self):
        return self.reshape(-1)

    # Copies.

    def get(self, stream=None, order="C", out=None, blocking=True):
        if out is None:
            out = np.empty(self.shape, self.dtype, order)
        elif not isinstance(out, np.ndarray) or out.dtype != self.dtype:
            raise TypeError("out must be a numpy.ndarray of the same dtype")
        elif out.shape != self.shape or not out.flags.forc:
            raise ValueError("out must be contiguous and have the same shape")
        if self.size == 0:
            return out
        stream = get_current_stream() if stream is None else stream
        device = _engine.stream_of(stream.ptr).device
        layout = self._layout
        layout.host_view(device)

        def call() -> None:
            out[...] = layout.host_view(device)

        _engine.enqueue(stream.ptr, _engine.Call(f"get {self.nbytes} bytes", call))
        if blocking or _memory.pinned_memory.find(out.ctypes.data) is None:
            _engine.synchronize(stream.ptr)
        return out

    def set(self, arr, stream=None):
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if self.flags.c_contiguous:
            arr = np.ascontiguousarray(arr)
        elif self.flags.f_contiguous:
            arr = np.asfortranarray(arr)
        else:
            raise RuntimeError("Cannot set to non-contiguous array")
        stream = get_current_stream() if stream is None else stream
        _copies.copy(self.data.ptr, arr.ctypes.data, self.nbytes, 1, stream.ptr)

    def copy(self, order="C"):
        copy = ndarray(self.shape, self.dtype, order=order)
        if self.size:
            run("copy", np.copyto, copy, self)
        return copy

    def astype(self, dtype, *, copy=True):
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        result = ndarray(self.shape, dtype)
        if self.size:
            run("astype", lambda out, array: np.copyto(out, array, "unsafe"), result, self)
        return result

    def fill(self, value):
        self[...] = value

    def __setitem__(self, slices, value):
        target = self[slices]
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value.item()
        if isinstance(value, np.ndarray):
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")  # CuPy's refusal
        if isinstance(value, ndarray):
            if np.broadcast_shapes(target.shape, value.shape) != target.shape:
                raise ValueError(f"{value.shape} does not fit {target.shape}")
            if target.size:
                run("set", lambda out, new: np.copyto(out, new, "unsafe"), target, value)
            return
        elif not isinstance(value, _SCALARS):
            raise TypeError(f"Unsupported type {type(value)}")
        value = np.asarray(value, self.dtype)
        if target.size:
            run("set", lambda out: np.copyto(out, value), target)

    # Arithmetic.

    def _binary(self, other, ufunc, reflected=False, in_place=False):
        if isinstance(other, np.ndarray):
            raise TypeError(f"Unsupported type {type(other)}")
        if not isinstance(other, (ndarray, *_SCALARS)):
            return NotImplemented
        operands = (other, self) if reflected else (self, other)
        return apply(ufunc, *operands, out=self if in_place else None)

    def __add__(self, other):
        return self._binary(other, np.add)

    def __radd__(self, other):
        return self._binary(other, np.add, reflected=True)

    def __iadd__(self, other):
        return self._binary(other, np.add, in_place=True)

    def __sub__(self, other):
        return self._binary(other, np.subtract)

    def __rsub__(self, other):
        return self._binary(other, np.subtract, reflected=True)

    def __isub__(self, other):
        return self._binary(other, np.subtract, in_place=True)

    def __mul__(self, other):
        return self._binary(other, np.multiply)

    def __rmul__(self, other):
        return self._binary(other, np.multiply, reflected=True)

    def __imul__(self, other):
        return self._binary(other, np.multiply, in_place=True)

    def __truediv__(self, other):
        return self._binary(other, np.true_divide)

    def __rtruediv__(self, other):
        return self._binary(other, np.true_divide, reflected=True)

    def __itruediv__(self, other):
        return self._binary(other, np.true_divide, in_place=True)

    def __eq__(self, other):
        return self._binary(other, np.equal)

    def __ne__(self, other):
        return self._binary(other, np.not_equal)

    def __lt__(self, other):
        return self._binary(other, np.less)

    def __gt__(self, other):
        return self._binary(other, np.greater)

    def __pow__(self, other):
        return self._binary(other, np.power)

    def __neg__(self):
        return apply(np.negative, self)

    def __matmul__(self, other):
        return self._binary(other, np.matmul)

    def sum(self, axis=None, *, keepdims=False):
        return apply(np.sum, self, axis=axis, keepdims=keepdims)

    def all(self, axis=None, *, keepdims=False):
        return apply(np.all, self, axis=axis, keepdims=keepdims)

    def max(self, axis=None, *, keepdims=False):
        return apply(np.max, self, axis=axis, keepdims=keepdims)

    def mean(self, axis=None, *, keepdims=False):
        return apply(np.mean, self, axis=axis, keepdims=keepdims)

    # Numbers of the host.

    def item(self):
        return self.get().item()

    def __float__(self):
        return float(self.get().item())

    def __int__(self):
        return int(self.get().item())

    def __complex__(self):
        return complex(self.get().item())

    def __bool__(self):
        return bool(self.get())


def apply(function, *operands, out=None, **options) -> ndarray:
    """Put a function of NumPy into the current stream; its result is a new array, or ``out``."""
    arrays = [operand for operand in operands if isinstance(operand, ndarray)]

    def call(*views):
        given = iter(views)
        return function(
            *(next(given) if isinstance(operand, ndarray) else operand for operand in operands),
            **options,
        )

    # Shape and dtype of the result come from ones of the same shapes and dtypes.
    with np.errstate(all="ignore"):
        sample = np.asarray(call(*(np.ones(array.shape, array.dtype) for array in arrays)))
    if out is None:
        out = ndarray(sample.shape, sample.dtype)
    elif np.broadcast_shapes(sample.shape, out.shape) != out.shape:
        raise ValueError(f"{sample.shape} does not fit {out.shape}")
    elif not np.can_cast(sample.dtype, out.dtype, "same_kind"):
        raise TypeError(f"{sample.dtype} cannot be cast to {out.dtype} in place")
    if out.size:
        run(
            function.__name__,
            lambda target, *views: np.copyto(target, call(*views), "unsafe"),
            out,
            *arrays,
        )
    return out
