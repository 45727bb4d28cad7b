"""Arrays that behave as CuPy's where it matters: no NumPy function takes them, and no NumPy array.

A stand-in on machines without a GPU: operators and methods work, functions are those of the module
``cupy`` alone, and what NumPy would convert in silence raises.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

_OPERATORS = {
    *(np.add, np.subtract, np.multiply, np.true_divide, np.power, np.negative, np.matmul),
    *(np.equal, np.not_equal, np.less, np.greater, np.maximum),  # maximum: the method max
}


class DeviceArray(np.ndarray[Any, Any]):
    """An array as if on a device."""

    __module__ = "cupy.strict"

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"numpy.{func.__name__} was given an array of the device")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if ufunc not in _OPERATORS:
            raise TypeError(f"numpy.{ufunc.__name__} was given an array of the device")
        for value in inputs:
            if type(value) is np.ndarray:
                raise TypeError("an array of NumPy met one of the device")
        plain = {
            key: tuple(map(_host, value)) if isinstance(value, tuple) else _host(value)
            for key, value in kwargs.items()
        }
        result = getattr(ufunc, method)(*map(_host, inputs), **plain)
        return kwargs["out"][0] if "out" in kwargs else device(result)


def _host(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_host, value))
    return value.view(np.ndarray) if isinstance(value, DeviceArray) else value


def device(value: Any) -> Any:
    """An array of the device with what a NumPy array or number has."""
    return np.asarray(value).view(DeviceArray)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``import cupy`` give a module with some functions for these arrays."""
    module = types.ModuleType("cupy")

    def wrap(name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            return device(getattr(np, name)(*map(_host, args), **kwargs))

        return function

    for name in ("arange", "asarray", "concatenate", "exp", "log", "ones", "sqrt", "stack"):
        setattr(module, name, wrap(name))
    for name in ("tanh", "tril", "where"):
        setattr(module, name, wrap(name))
    module.asnumpy = lambda array: _host(array).copy()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
