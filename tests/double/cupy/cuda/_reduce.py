"""Sums and the like of what ranks have sent, by NCCL's numbers of data types and operators."""

from __future__ import annotations

import functools

_TYPES = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 6: "f2", 7: "f4", 8: "f8"}
_BFLOAT16 = 9
_OPERATORS = {0: "add", 1: "multiply", 2: "maximum", 3: "minimum"}


def reduced(data: list[bytes], datatype: int, operator: int) -> bytes:
    """The elements of all ranks made one by an operator."""
    import numpy as np  # takes a while, and most runs reduce nothing

    function = getattr(np, _OPERATORS[operator])
    with np.errstate(all="ignore"):
        if datatype != _BFLOAT16:
            arrays = [np.frombuffer(part, _TYPES[datatype]) for part in data]
            return bytes(functools.reduce(function, arrays).tobytes())
        # bfloat16 is the upper half of a float32. Cut, not rounded: exact where the result fits.
        wide = [(np.frombuffer(part, "u2").astype("u4") << 16).view("f4") for part in data]
        return bytes((functools.reduce(function, wide).view("u4") >> 16).astype("u2").tobytes())
