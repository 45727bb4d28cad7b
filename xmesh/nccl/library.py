"""NCCL through CuPy, whichever version of both is there.

CuPy 13 gives unique ids as tuples, CuPy 14 as bytes; 14 can split communicators, with an NCCL that
can.
"""

from __future__ import annotations

import base64
import importlib
from typing import Any

from xmesh.device.gpu import load_cupy
from xmesh.errors import TransportError, explain

#: ncclSend and ncclRecv came with 2.7.
MIN_VERSION = 2700
_SPLIT_VERSION = 21801


def load_nccl() -> Any:
    """The module ``cupy.cuda.nccl``.

    Raises:
        TransportError: there is no CuPy, no NCCL, or one that is too old.
    """
    load_cupy()
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
        version = int(nccl.get_version()) if nccl.available else 0
    except Exception as error:
        raise _missing(f"{type(error).__name__}: {error}") from error
    if not version:
        raise _missing("cupy.cuda.nccl.available is False")
    if version < MIN_VERSION:
        raise TransportError(
            explain(
                f"NCCL must be {version_text(MIN_VERSION)} or newer",
                values=f"NCCL {version_text(version)}",
                remedy="pip install -U nvidia-nccl-cu12, or transport='mpi'",
            )
        )
    return nccl


def _missing(why: str) -> TransportError:
    return TransportError(
        explain(
            "the NCCL transport needs NCCL and a CuPy that finds it",
            values=why,
            remedy="pip install nvidia-nccl-cu12 (or that of your CUDA), or transport='mpi'",
        )
    )


def version_text(number: int) -> str:
    """NCCL's version number in words: 22304 is 2.23.4, and 2708 was 2.7.8."""
    if number < 10000:
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def can_split(nccl: Any) -> bool:
    """Communicators can be split from a parent, which is faster than making each by itself."""
    versions = nccl.get_version(), nccl.get_build_version()
    return hasattr(nccl.NcclCommunicator, "commSplit") and min(versions) >= _SPLIT_VERSION


def id_text(unique_id: Any) -> str:
    """A unique id as text, whichever type CuPy gives it."""
    if isinstance(unique_id, bytes):
        return "b" + base64.b64encode(unique_id).decode()
    signed = min(unique_id) < 0
    packed = b"".join(int(value).to_bytes(1, "little", signed=signed) for value in unique_id)
    return ("s" if signed else "u") + base64.b64encode(packed).decode()


def id_of(text: str) -> Any:
    """Inverse of ``id_text``, in the type that this rank's CuPy takes: others may have another."""
    packed = base64.b64decode(text[1:])
    if int(load_cupy().__version__.partition(".")[0]) >= 14:
        return packed
    return tuple(value - 256 if text[0] == "s" and value > 127 else value for value in packed)
