"""Element types as plans carry them: a name that survives JSON, and a size in bytes.

Planning and moving need only the size; the name lets ranks compare what they hold.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from xmesh.errors import PlanError, explain


def as_dtype(value: Any) -> np.dtype[Any]:
    """The NumPy dtype meant by a dtype, a type or a name.

    Names of ml_dtypes (``"bfloat16"``, ``"float8_e4m3fn"``) are found when that package is there.

    Raises:
        PlanError: no such dtype, or one whose elements have no fixed size in bytes.
    """
    try:
        dtype: np.dtype[Any] = np.dtype(value)
    except TypeError as error:
        dtype = _from_ml_dtypes(value, error)
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind in "OT":
        raise PlanError(
            explain(
                "elements must have a fixed size, since they move as bytes",
                values=f"dtype {dtype!r}, itemsize {dtype.itemsize}",
                remedy="use a numeric, boolean, complex or structured dtype without objects",
            )
        )
    return dtype


def _from_ml_dtypes(name: Any, error: TypeError) -> np.dtype[Any]:
    try:
        scalar: Any = getattr(importlib.import_module("ml_dtypes"), str(name))
        found: np.dtype[Any] = np.dtype(scalar)
        return found
    except (ImportError, AttributeError, TypeError):
        raise PlanError(
            explain(
                "dtype must be one that NumPy knows",
                values=f"{name!r} ({error})",
                remedy="pass a numpy dtype or its name; bfloat16 and float8 need ml_dtypes",
            )
        ) from None


def dtype_name(dtype: np.dtype[Any]) -> str:
    """A name for which ``named_dtype(dtype_name(d)) == d``, the same on every rank."""
    if dtype.fields is not None or dtype.subdtype is not None:
        return json.dumps(npy_format.dtype_to_descr(dtype))
    # NumPy writes dtypes of other packages as raw bytes ("<V2"); their own name tells them apart.
    return dtype.str if dtype.type.__module__ == "numpy" else dtype.name


def named_dtype(name: str) -> np.dtype[Any]:
    """Inverse of ``dtype_name``.

    Raises:
        PlanError: as ``as_dtype``.
    """
    if name.startswith(("[", "{", '"')):
        return npy_format.descr_to_dtype(_tuples(json.loads(name)))
    return as_dtype(name)


def _tuples(descr: Any) -> Any:
    """JSON has no tuples, and a descr needs them: fields and shapes."""
    if isinstance(descr, list):
        if all(isinstance(item, list) for item in descr):
            return [tuple(_tuples(part) for part in item) for item in descr]
        return tuple(_tuples(item) for item in descr)
    return descr
