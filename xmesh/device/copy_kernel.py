"""The kernels that pack and unpack: several strided copies in one launch.

A copy is a loop over units: words, or tiles of words where the source is turned. Each thread asks
for a few words before it writes the first, so that enough loads are under way to fill the memory's
pipes. A tile is read along the source's memory and written along the destination's, by way of the
memory that the threads of a block share; so neighbouring threads touch neighbouring words both
times. Addresses, shapes and strides travel by value, with the launch.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from xmesh.device.regions import MAX_DIMS, Copy, Kind

#: Copies in one launch: their table must fit the 4 KiB of a kernel's arguments.
COPIES_PER_LAUNCH = 16
THREADS = 256
#: Blocks along a copy; each goes on with a stride where there is more to do.
_MOST_BLOCKS = 16384
#: Blocks that keep a GPU busy: of small copies, each thread does less so that there are as many.
_ENOUGH_BLOCKS = 256
#: Blocks for copies to or from memory of the host: they saturate its link, and leave most of the
#: GPU to the kernels of the caller.
_HOST_BLOCKS = 32
#: Words that GPUs load and store as one, by their bytes.
_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}
#: Numbers of dimensions that there are kernels for: the compiler keeps those in registers.
_DIMS = (2, 3, 4, MAX_DIMS)


def words_in_flight(word_nbytes: int) -> int:
    """Words that one thread has under way at one time: narrow ones need more of them."""
    return 4 if word_nbytes >= 4 else 8


def _tile_bits(word_nbytes: int) -> int:
    """Binary logarithm of the words of a tile."""
    return 10 if word_nbytes >= 4 else 12


def _name(turned: bool, word_nbytes: int, dims: int) -> str:
    return f"{'turn' if turned else 'copy'}_{word_nbytes}_{dims}"


def _kernel(turned: bool, word_nbytes: int, dims: int) -> str:
    types = f"{_TYPES[word_nbytes]}, {dims}, "
    call = f"copy_words<{types}{words_in_flight(word_nbytes)}>"
    bounds = ""
    if turned:
        call = f"turn_words<{types}{_tile_bits(word_nbytes)}>"
        if word_nbytes < 4:  # room for 4 blocks at a time: else the compiler takes registers for 2
            bounds = f"__launch_bounds__({THREADS}, 4) "
    return f"""
__global__ void {bounds}{_name(turned, word_nbytes, dims)}(const Table table) {{
  {call}(table.copies[blockIdx.y]);
}}"""


_ALL = tuple(itertools.product((False, True), _TYPES, _DIMS))
#: Names of the kernels in SOURCE.
KERNELS = tuple(_name(*one) for one in _ALL)
SOURCE = f"""
typedef unsigned int Index;

// One dimension of the loop over units. left / extent == left * magic >> shift.
struct Dim {{
  Index extent;
  Index magic;
  int shift;
  int source_stride;
  int destination_stride;
}};

// One side of a tile, in words; a tile has 1 << bits of them, and fewer at the end of the extent.
struct Side {{
  Index extent;
  int bits;
  int source_stride;
  int destination_stride;
}};

// The dims are at the end of the array. Those of a turned copy end with its tiles along the rows
// and along the columns: rows follow the source's memory, columns the destination's.
struct Copy {{
  const char* source;
  char* destination;
  Index units;
  int unused;
  Dim dims[{MAX_DIMS}];
  Side row, column;
}};

struct Table {{
  Copy copies[{COPIES_PER_LAUNCH}];
}};

struct Place {{
  int source, destination;
  Index row, column;
}};

// Where a unit lies: offsets in bytes, and its indices along the last two dimensions.
template <int Dims>
__device__ __forceinline__ Place place_of(const Copy& copy, Index unit) {{
  const Dim* dims = copy.dims + {MAX_DIMS} - Dims;
  Place place = {{0, 0, 0, 0}};
  Index left = unit;
#pragma unroll
  for (int d = Dims - 1; d >= 0; --d) {{
    // What is left for the first dimension is its index.
    const Index outer = d ? (Index)((unsigned long long)left * dims[d].magic >> dims[d].shift) : 0;
    const Index inner = left - outer * dims[d].extent;
    place.source += (int)(inner * dims[d].source_stride);
    place.destination += (int)(inner * dims[d].destination_stride);
    if (d == Dims - 1) place.column = inner;
    if (d == Dims - 2) place.row = inner;
    left = outer;
  }}
  return place;
}}

template <typename Word, int Dims, int Count>
__device__ __forceinline__ void copy_words(const Copy& copy) {{
  const Index words = copy.units, step = gridDim.x * blockDim.x;
  for (Index first = blockIdx.x * blockDim.x + threadIdx.x; first < words; first += Count * step) {{
    Word word[Count];
    int to[Count];
#pragma unroll
    for (int k = 0; k < Count; ++k) {{
      const Index index = first + k * step;
      // Also of what is past the end, and not used: a branch would keep it from registers.
      const Place place = place_of<Dims>(copy, index);
      to[k] = place.destination;
      if (index < words) word[k] = *reinterpret_cast<const Word*>(copy.source + place.source);
    }}
#pragma unroll
    for (int k = 0; k < Count; ++k) {{
      if (first + k * step < words) *reinterpret_cast<Word*>(copy.destination + to[k]) = word[k];
    }}
  }}
}}

template <typename Word, int Dims, int Bits>
__device__ __forceinline__ void turn_words(const Copy& copy) {{
  const int Count = (1 << Bits) / {THREADS};
  // Columns lie apart by a bank of four bytes more than their words, so that reading along the
  // columns of a square tile meets all banks. There are as many as threads, at most.
  const int Gap = sizeof(Word) < 4 ? 4 / sizeof(Word) : 1;
  __shared__ Word tile[(1 << Bits) + {THREADS} * Gap];
  const Side row = copy.row, column = copy.column;
  const Index tile_rows = 1 << row.bits, tile_columns = 1 << column.bits;
  const Index pitch = tile_rows + Gap;
  // Where this thread reads, and how many columns lie between its words; where it writes, and rows.
  const Index r_in = threadIdx.x & (tile_rows - 1), c_in = threadIdx.x >> row.bits;
  const Index c_out = threadIdx.x & (tile_columns - 1), r_out = threadIdx.x >> column.bits;
  const Index c_step = {THREADS} >> row.bits, r_step = {THREADS} >> column.bits;
  for (Index unit = blockIdx.x; unit < copy.units; unit += gridDim.x) {{
    const Place place = place_of<Dims>(copy, unit);
    const Index rows = min(row.extent - (place.row << row.bits), tile_rows);
    const Index columns = min(column.extent - (place.column << column.bits), tile_columns);
    // Offsets: past the end, where they are not used, they may wrap.
    Index from = place.source + r_in * row.source_stride + c_in * column.source_stride;
    Index to = place.destination + r_out * row.destination_stride +
               c_out * column.destination_stride;
    Word word[Count];
#pragma unroll
    for (int k = 0; k < Count; ++k) {{
      if (r_in < rows && c_in + k * c_step < columns) {{
        word[k] = *reinterpret_cast<const Word*>(copy.source + (int)from);
      }}
      from += c_step * column.source_stride;
    }}
#pragma unroll
    for (int k = 0; k < Count; ++k) {{
      if (r_in < rows && c_in + k * c_step < columns) {{
        tile[(c_in + k * c_step) * pitch + r_in] = word[k];
      }}
    }}
    __syncthreads();
#pragma unroll
    for (int k = 0; k < Count; ++k) {{
      if (c_out < columns && r_out + k * r_step < rows) {{
        *reinterpret_cast<Word*>(copy.destination + (int)to) =
            tile[c_out * pitch + (r_out + k * r_step)];
      }}
      to += r_step * row.destination_stride;
    }}
    __syncthreads();
  }}
}}

extern "C" {{{"".join(_kernel(*one) for one in _ALL)}
}}
"""

_HEAD, _DIM, _SIDE = struct.Struct("=QQIi"), struct.Struct("=IIiii"), struct.Struct("=Iiii")
#: A row of the table; its fields follow each other without gaps.
_ROW_NBYTES = _HEAD.size + MAX_DIMS * _DIM.size + 2 * _SIDE.size
_TABLE = np.dtype((np.void, COPIES_PER_LAUNCH * _ROW_NBYTES))


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        kernel: its name in SOURCE.
        grid: blocks along the units, and copies.
        table: the kernel's one argument, an array of one element.
    """

    kernel: str
    grid: tuple[int, int]
    table: np.ndarray[Any, Any]


def launches_of(kind: Kind, copies: Sequence[Copy], host: bool = False) -> Iterator[Launch]:
    """Launches that make some copies of one kind.

    Args:
        kind: of all of them.
        copies: what to copy.
        host: one side is memory of the host.
    """
    for first in range(0, len(copies), COPIES_PER_LAUNCH):
        batch = copies[first : first + COPIES_PER_LAUNCH]
        rows, most = bytearray(_TABLE.itemsize), 0
        for i, copy in enumerate(batch):
            source, destination, *form = copy
            units, loop = _loop(kind, *form)
            at = i * _ROW_NBYTES
            _HEAD.pack_into(rows, at, source, destination, units, 0)
            rows[at + _HEAD.size : at + _HEAD.size + len(loop)] = loop
            most = max(most, units)
        blocks = most  # of tiles, each takes one
        if not kind.turned:
            full = -(-most // (THREADS * words_in_flight(kind.word_nbytes)))
            blocks = max(full, min(-(-most // THREADS), _ENOUGH_BLOCKS // len(batch)))
        blocks = min(blocks, _HOST_BLOCKS // len(batch) if host else _MOST_BLOCKS)
        kernel = _kernel_for(kind, max(len(copy.shape) for copy in batch))
        yield Launch(kernel, (blocks, len(batch)), np.frombuffer(rows, _TABLE))


@lru_cache
def _kernel_for(kind: Kind, dims: int) -> str:
    return _name(kind.turned, kind.word_nbytes, next(there for there in _DIMS if there >= dims))


@lru_cache(maxsize=4096)
def _loop(
    kind: Kind,
    shape: tuple[int, ...],
    source_strides: tuple[int, ...],
    destination_strides: tuple[int, ...],
) -> tuple[int, bytes]:
    """Number of units of a copy, and the part of its row that does not depend on where it lies."""
    dims = list(zip(shape, source_strides, destination_strides, strict=True))
    sides = b""
    if kind.turned:
        bits = _sides(_tile_bits(kind.word_nbytes), *shape[-2:])
        for d, side_bits in zip((-2, -1), bits, strict=True):
            extent, source, destination = dims[d]
            sides += _SIDE.pack(extent, side_bits, source, destination)
            tiles = -(-extent >> side_bits)
            # Of a single tile the strides do not count, and could be too large.
            step = 1 << side_bits if tiles > 1 else 0
            dims[d] = (tiles, source * step, destination * step)
    units = math.prod(extent for extent, _, _ in dims)
    packed = b"".join(
        _DIM.pack(extent, *_division(extent), source, destination)
        for extent, source, destination in [(1, 0, 0)] * (MAX_DIMS - len(dims)) + dims
    )
    return units, packed + sides


def _division(divisor: int) -> tuple[int, int]:
    """(magic, shift): ``n // divisor == n * magic >> shift`` for all n of 31 bits.

    Granlund and Montgomery, "Division by invariant integers using multiplication" (1994).
    """
    bits = (divisor - 1).bit_length()
    return -(-(1 << (31 + bits)) // divisor), 31 + bits


def _sides(bits: int, rows: int, columns: int) -> tuple[int, int]:
    """Binary logarithms of a tile's sides: square, or longer where the other dimension is short.

    No side is longer than the threads of a block, so that each stays in its row or column.
    """
    row_bits, column_bits = (
        min(max(1, (extent - 1).bit_length()), THREADS.bit_length() - 1)
        for extent in (rows, columns)
    )
    half = bits // 2
    row_bits = min(row_bits, max(half, bits - column_bits))
    return row_bits, min(column_bits, bits - row_bits)
