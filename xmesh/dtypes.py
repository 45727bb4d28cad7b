"""Element types as plans carry them: a name that survives JSON, and a size in bytes.

Planning and moving need only the size; the name lets ranks compare what they hold.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import numpy as np

from xmesh.errors import PlanError, explain


def as_dtype(value: Any) -> np.dtype[Any]:
    """The NumPy dtype meant by a dtype, a type or a name.

    Names of ml_dtypes (``"bfloat16"``, ``"float8_e4m3fn"``) are found when that package is there.

    Raises:
        PlanError: no such dtype, or one whose elements have no fixed size in bytes.
    """
    dtype = _lookup(value)
    if dtype.subdtype is not None:
        raise PlanError(
            explain(
                "elements must not be arrays themselves",
                values=f"dtype {dtype!r}",
                remedy="add the element's shape to the dimensions of the array",
            )
        )
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind in "OT":
        raise PlanError(
            explain(
                "elements must have a fixed size, since they move as bytes",
                values=f"dtype {dtype!r}, itemsize {dtype.itemsize}",
                remedy="use a numeric, boolean, complex or structured dtype without objects",
            )
        )
    return dtype


def _lookup(value: Any) -> np.dtype[Any]:
    """The dtype, whatever its size."""
    if value is None:
        raise PlanError(
            explain(
                "dtype must be given",
                values="None",
                remedy="pass a numpy dtype or its name, such as 'float32'",
            )
        )
    try:
        dtype: np.dtype[Any] = np.dtype(value)
        return dtype
    except (TypeError, ValueError, SyntaxError) as error:
        return _from_ml_dtypes(value, error)


def _from_ml_dtypes(name: Any, error: Exception) -> np.dtype[Any]:
    try:
        scalar: Any = getattr(importlib.import_module("ml_dtypes"), str(name))
        if not isinstance(scalar, type):
            raise TypeError(f"{name!r} of ml_dtypes is no type")
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
    described = _describe(dtype)
    return described if isinstance(described, str) else json.dumps(described)


def _describe(dtype: np.dtype[Any]) -> Any:
    """Plain data; NumPy's own descr would write fields of other packages' dtypes as raw bytes."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _describe(base), "shape": list(shape)}
    if dtype.fields is not None and dtype.names is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        return {
            "names": list(dtype.names),
            "formats": [_describe(field[0]) for field in fields],
            "offsets": [int(field[1]) for field in fields],
            "titles": [field[2] if len(field) > 2 else None for field in fields],
            "itemsize": int(dtype.itemsize),
        }
    return dtype.str if dtype.type.__module__ == "numpy" else dtype.name


def named_dtype(name: str) -> np.dtype[Any]:
    """Inverse of ``dtype_name``.

    Raises:
        PlanError: as ``as_dtype``.
    """
    if not name.startswith("{"):
        return as_dtype(name)
    try:
        return as_dtype(_rebuild(json.loads(name)))
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            explain(
                "a structured dtype is written as its names, formats, offsets and itemsize",
                values=f"{name[:80]!r} ({error})",
                remedy="take it from a plan's JSON text",
            )
        ) from error


def _rebuild(described: Any) -> np.dtype[Any]:
    if isinstance(described, str):
        return _lookup(described)
    if "base" in described:
        return np.dtype((_rebuild(described["base"]), tuple(described["shape"])))
    formats = [_rebuild(part) for part in described["formats"]]
    parts: Any = {**described, "formats": formats}
    found: np.dtype[Any] = np.dtype(parts)
    return found
