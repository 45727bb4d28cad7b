"""Functions that make arrays."""

from __future__ import annotations

import numpy as np

from cupy._array import ndarray, run, supported


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, supported(dtype), order=order)


def zeros(shape, dtype=float, order="C"):
    array = empty(shape, dtype, order)
    if array.size:
        run("zeros", lambda out: out.fill(0), array)
    return array


def ones(shape, dtype=float, order="C"):
    array = empty(shape, dtype, order)
    array.fill(1)
    return array


def full(shape, fill_value, dtype=None, order="C"):
    array = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order)
    array.fill(fill_value)
    return array


def empty_like(prototype, dtype=None):
    flags = prototype.flags
    order = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    return empty(prototype.shape, prototype.dtype if dtype is None else dtype, order)


def arange(start, stop=None, step=1, dtype=None):
    return array(
        np.arange(start, None, step, dtype) if stop is None else np.arange(start, stop, step, dtype)
    )


def asarray(a, dtype=None):
    return array(a, dtype, copy=False)


def array(obj, dtype=None, copy=True):
    if isinstance(obj, ndarray):
        if dtype is not None and np.dtype(dtype) != obj.dtype:
            return obj.astype(dtype)
        return obj.copy() if copy else obj
    if hasattr(obj, "__cuda_array_interface__"):
        raise NotImplementedError("the double converts no arrays of other libraries")
    source = np.asarray(obj, dtype)
    result = empty(source.shape, source.dtype)
    if source.size:
        result.set(np.array(source))  # pageable, so it is staged now
    return result


def asnumpy(a, stream=None):
    return a.get(stream) if isinstance(a, ndarray) else np.asarray(a)
