"""A double of CuPy for tests on machines without a GPU.

It has the names of CuPy that xmesh may use, with their behaviour; another name is an error. Its
devices are memory and a thread of this process.
"""

from __future__ import annotations

from cupy import _engine as _engine  # for tests
from cupy import _settings, cuda
from cupy._array import ndarray
from cupy._creation import (
    arange,
    array,
    asarray,
    asnumpy,
    empty,
    empty_like,
    full,
    ones,
    zeros,
)
from cupy._dlpack import from_dlpack
from cupy._functions import concatenate, exp, log, sqrt, stack, tanh, tril, where
from cupy._pools import get_default_memory_pool, get_default_pinned_memory_pool
from cupy._raw import RawKernel, RawModule

__version__ = _settings.CUPY_VERSION

__all__ = [
    "RawKernel",
    "RawModule",
    "arange",
    "array",
    "asarray",
    "asnumpy",
    "concatenate",
    "cuda",
    "empty",
    "empty_like",
    "exp",
    "from_dlpack",
    "full",
    "get_default_memory_pool",
    "get_default_pinned_memory_pool",
    "log",
    "ndarray",
    "ones",
    "sqrt",
    "stack",
    "tanh",
    "tril",
    "where",
    "zeros",
]
