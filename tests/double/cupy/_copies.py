"""Copies between host and device, and fills.

As in CUDA, pinned memory is read and written when the copy runs. Pageable memory that goes to a
device is staged at the call, and a copy to pageable memory returns when it is done.
"""

from __future__ import annotations

import ctypes

import numpy as np

from cupy import _engine, _memory
from cupy._errors import CUDARuntimeError, explained

_KINDS = {0: ("host", "host"), 1: ("device", "host"), 2: ("host", "device"), 3: ("device",) * 2}


def _place(pointer: int) -> str:
    """Where a pointer points to: "device", "pinned" or "pageable"."""
    block = _memory.device_memory.find(pointer)
    if block is not None and not block.released:
        return "device"
    if block is not None or pointer >= 1 << 48 or _memory.device_memory.knew(pointer):
        raise explained(CUDARuntimeError, 1, f"freed or unknown memory at {pointer:#x}")
    if _memory.pinned_memory.find(pointer) is not None:
        return "pinned"
    if _memory.pinned_memory.knew(pointer):
        raise explained(CUDARuntimeError, 1, f"freed pinned memory at {pointer:#x}")
    return "pageable"


def _view(place: str, pointer: int, nbytes: int, device: int) -> np.ndarray:
    if place == "device":
        return _engine.host_view(pointer, nbytes, device)
    if place == "pinned":
        return _memory.pinned_memory.view(pointer, nbytes, released_too=True)
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(pointer), np.uint8)


def copy(target: int, source: int, nbytes: int, kind: int, stream_ptr: int) -> None:
    """Put a copy into a stream."""
    stream = _engine.stream_of(stream_ptr)
    _engine.check(stream.device)
    if nbytes < 0 or kind not in (*_KINDS, 4):
        raise CUDARuntimeError(1)
    if nbytes == 0:
        return
    if 0 in (target, source):
        raise explained(CUDARuntimeError, 1, "a null pointer")
    _engine.collect()
    places = _place(target), _place(source)
    sides = tuple("device" if place == "device" else "host" for place in places)
    if sides != _KINDS.get(kind, sides):
        raise explained(CUDARuntimeError, 21, f"kind {kind}, from {places[1]} to {places[0]}")
    for place, pointer in zip(places, (target, source), strict=True):
        _view(place, pointer, nbytes, stream.device)  # raises at the call what is wrong by then
    staged = None
    if places[1] == "pageable":
        staged = _view("pageable", source, nbytes, stream.device).copy()

    def run() -> None:
        data = _view(places[1], source, nbytes, stream.device) if staged is None else staged
        _view(places[0], target, nbytes, stream.device)[:] = data

    _engine.enqueue(stream_ptr, _engine.Call(f"copy of {nbytes} bytes", run))
    if "device" not in places or places[0] == "pageable":
        _engine.synchronize(stream_ptr)


def fill(pointer: int, value: int, nbytes: int, stream_ptr: int) -> None:
    """Put a fill of bytes into a stream."""
    stream = _engine.stream_of(stream_ptr)
    if nbytes == 0:
        return
    _engine.host_view(pointer, nbytes, stream.device)
    _engine.enqueue(
        stream_ptr,
        _engine.Call(
            f"fill of {nbytes} bytes",
            lambda: _engine.host_view(pointer, nbytes, stream.device).fill(value & 0xFF),
        ),
    )
