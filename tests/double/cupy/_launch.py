"""Kernel launches: arguments, limits, and the work in the stream."""

from __future__ import annotations

import ctypes
import random

import numpy as np

from cupy import _devices, _engine, _memory, _settings
from cupy._compiler import Kernel
from cupy._errors import CUDADriverError, CUDARuntimeError, explained

_GRID_LIMITS = ((1 << 31) - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)
_THREADS_PER_BLOCK = 1024
_PARAMETER_NBYTES = 4096
_SHARED_NBYTES = 48 << 10
_SCALARS = "?bhilqBHILQefdFD"
#: Words of this range are device pointers, or were; no number gets there by chance.
_POINTERS = range(_settings.OFFSET, _settings.OFFSET + (1 << 48)) if _settings.OFFSET else range(0)
_generator = random.Random(_settings.SEED)


def launch(kernel: Kernel, grid, block, args, shared_mem: int, stream_ptr: int) -> None:
    """Put a kernel into a stream."""
    _engine.collect()
    stream = _engine.stream_of(stream_ptr)
    if stream.device != _devices.current():
        raise explained(CUDADriverError, 400, "the stream is of another device than the current")
    sizes = _sizes(grid, _GRID_LIMITS) + _sizes(block, _BLOCK_LIMITS)
    if np.prod(sizes[3:]) > _THREADS_PER_BLOCK or not 0 <= shared_mem <= _SHARED_NBYTES:
        raise explained(CUDADriverError, 1, f"block {block}, {shared_mem} bytes of shared memory")
    parameters, blocks = _parameters(kernel, args, stream.device)
    backwards = _generator.random() < 0.5

    def run() -> None:
        for each, table in blocks:
            if each.freed:
                raise explained(
                    CUDARuntimeError, 700, f"{table} memory at {each.pointer:#x} was freed"
                )
        pointers = (ctypes.c_void_p * max(1, len(parameters)))(
            *(parameter.ctypes.data for parameter in parameters)
        )
        outcome = kernel.run(pointers, (ctypes.c_uint * 6)(*sizes), int(backwards))
        if outcome == 1:
            raise CUDARuntimeError(716)
        if outcome:
            why = f"a barrier in {kernel.name} that not all threads of a block come to"
            raise explained(CUDARuntimeError, 719, why)
        for each, _ in blocks:
            _engine.check_guards(each)

    _engine.counters["launch"] += 1
    _engine.enqueue(stream_ptr, _engine.Call(f"kernel {kernel.name}", run))


def _sizes(given, limits: tuple[int, ...]) -> tuple[int, ...]:
    """The three sizes of a grid or block."""
    sizes = tuple(max(1, int(size)) for size in (*given, 1, 1)[:3])
    if not isinstance(given, tuple) or not 1 <= len(given) <= 3:
        raise TypeError(f"a grid or a block is a tuple of one to three sizes, not {given!r}")
    if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
        raise explained(CUDADriverError, 1, f"sizes {given} are over the limits {limits}")
    return sizes


def _parameters(kernel: Kernel, args, device: int):
    """Copies of the arguments as the host needs them, and the memory that they point to."""
    if len(args) != len(kernel.parameters):
        raise explained(
            CUDADriverError,
            1,
            f"{kernel.name} takes {len(kernel.parameters)} arguments and was given {len(args)}",
        )
    parameters, blocks, end = [], [], 0
    for index, (argument, fact) in enumerate(zip(args, kernel.parameters, strict=True)):
        size, alignment, is_pointer = fact
        what = f"argument {index} of {kernel.name}"
        data = _bytes(argument)
        # A Python int is a long long; of a smaller parameter a little-endian GPU reads a part.
        if len(data) != size and not (type(argument) is int and size < len(data)):
            raise explained(
                CUDADriverError, 1, f"{what} has {len(data)} bytes, the parameter {size}"
            )
        end = -(-end // alignment) * alignment + size
        words = np.zeros(-(-size // 16) * 2 + 2, np.uint64)
        words = words[words.ctypes.data // 8 % 2 :]  # aligned by 16 bytes
        words.view(np.uint8)[:size] = np.frombuffer(data, np.uint8)[:size]
        for place in range(size // 8):
            words[place] = _real_address(int(words[place]), device, what, is_pointer, blocks)
        parameters.append(words)
    if end > _PARAMETER_NBYTES:
        raise explained(CUDADriverError, 1, f"{end} bytes of parameters")
    return parameters, blocks


def _real_address(word: int, device: int, what: str, is_pointer: bool, blocks) -> int:
    """A word of a parameter, or the host's address where it is a device pointer."""
    block = _memory.device_memory.find(word)
    if block is not None and not block.released:
        if block.device != device:
            raise explained(
                CUDADriverError, 700, f"{what} is memory of device {block.device}, not {device}"
            )
        blocks.append((block, "device"))
        return word - _settings.OFFSET
    if is_pointer and word:
        pinned = _memory.pinned_memory.find(word)  # which kernels reach too
        if pinned is not None:
            blocks.append((pinned, "pinned"))
            return word
    if block is not None or word in _POINTERS or (is_pointer and word):
        raise explained(CUDADriverError, 700, f"{what} points to {word:#x}, which is not allocated")
    return word


def _bytes(argument) -> bytes:
    """What a kernel is passed for an argument."""
    from cupy import ndarray
    from cupy.cuda.memory import MemoryPointer

    if argument is None:
        return bytes(8)
    if isinstance(argument, ndarray):
        return np.uint64(argument.data.ptr).tobytes()
    if isinstance(argument, MemoryPointer):
        return np.uint64(argument.ptr).tobytes()
    if isinstance(argument, np.ndarray):
        if argument.size != 1:
            raise TypeError(
                f"a numpy.ndarray of shape {argument.shape} cannot be passed to a kernel: only one"
                " of size one is passed by value"
            )
        return argument.tobytes()
    if isinstance(argument, np.generic) and argument.dtype.char in _SCALARS:
        return argument.tobytes()
    if type(argument) in (bool, float, complex):
        return np.asarray(argument).tobytes()
    if type(argument) is int:
        return (np.uint64 if argument >= 1 << 63 else np.int64)(argument).tobytes()
    raise TypeError(f"Unsupported type {type(argument)}")
