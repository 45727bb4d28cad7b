"""The kernel that packs and unpacks: several strided copies in one launch.

Each thread copies a few words, and asks for all of them before it writes the first, so that enough
loads are under way to fill the memory's pipes. Addresses, shapes and strides travel by value, with
the launch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xmesh.device.regions import MAX_DIMS, Copy

#: Copies in one launch: their table must fit the 4 KiB of a kernel's arguments.
COPIES_PER_LAUNCH = 16
THREADS = 256
#: Words of one thread that are under way at one time.
UNROLL = 4
#: Blocks along a copy; each goes on with a stride where there is more to do.
_MOST_BLOCKS = 16384

SOURCE = f"""
struct Copy {{
  const char* source;
  char* destination;
  unsigned int words;
  int dims;
  unsigned int shape[{MAX_DIMS}];
  long long source_strides[{MAX_DIMS}];
  long long destination_strides[{MAX_DIMS}];
}};

struct Table {{
  Copy copies[{COPIES_PER_LAUNCH}];
}};

// Block (x, y) works on copy y of the table.
template <typename Word>
__device__ __forceinline__ void copy_words(const Copy& copy) {{
  const unsigned int words = copy.words;
  const int dims = copy.dims;
  const unsigned int step = gridDim.x * blockDim.x;
  for (unsigned long long at = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
       at < words; at += (unsigned long long)step * {UNROLL}) {{
    Word word[{UNROLL}];
    char* to[{UNROLL}];
#pragma unroll
    for (int u = 0; u < {UNROLL}; ++u) {{
      const unsigned long long index = at + (unsigned long long)u * step;
      to[u] = 0;
      if (index < words) {{
        unsigned int left = (unsigned int)index;
        const char* from = copy.source;
        char* target = copy.destination;
#pragma unroll
        for (int d = {MAX_DIMS} - 1; d > 0; --d) {{
          if (d < dims) {{
            const unsigned int outer = left / copy.shape[d];
            const unsigned int inner = left - outer * copy.shape[d];
            from += inner * copy.source_strides[d];
            target += inner * copy.destination_strides[d];
            left = outer;
          }}
        }}
        from += left * copy.source_strides[0];
        to[u] = target + left * copy.destination_strides[0];
        word[u] = *reinterpret_cast<const Word*>(from);
      }}
    }}
#pragma unroll
    for (int u = 0; u < {UNROLL}; ++u) {{
      if (to[u]) *reinterpret_cast<Word*>(to[u]) = word[u];
    }}
  }}
}}

extern "C" {{
__global__ void copy_1(const Table table) {{
  copy_words<unsigned char>(table.copies[blockIdx.y]);
}}
__global__ void copy_2(const Table table) {{
  copy_words<unsigned short>(table.copies[blockIdx.y]);
}}
__global__ void copy_4(const Table table) {{
  copy_words<unsigned int>(table.copies[blockIdx.y]);
}}
__global__ void copy_8(const Table table) {{
  copy_words<uint2>(table.copies[blockIdx.y]);
}}
__global__ void copy_16(const Table table) {{
  copy_words<uint4>(table.copies[blockIdx.y]);
}}
}}
"""

#: A row of the table; its fields follow each other without gaps.
_ROW = struct.Struct(f"=QQIi{MAX_DIMS}I{MAX_DIMS}q{MAX_DIMS}q")
_TABLE = np.dtype((np.void, COPIES_PER_LAUNCH * _ROW.size))


class Launch(NamedTuple):
    """One launch of the kernel.

    Attributes:
        grid: blocks along the words, and copies.
        table: the kernel's one argument, an array of one element.
    """

    grid: tuple[int, int]
    table: np.ndarray[Any, Any]


def launches_of(copies: Sequence[Copy]) -> Iterator[Launch]:
    """Launches that make some copies of one word size."""
    for first in range(0, len(copies), COPIES_PER_LAUNCH):
        batch = copies[first : first + COPIES_PER_LAUNCH]
        rows = bytearray(_TABLE.itemsize)
        for i, copy in enumerate(batch):
            fill = (0,) * (MAX_DIMS - len(copy.shape))
            _ROW.pack_into(
                rows,
                i * _ROW.size,
                copy.source,
                copy.destination,
                copy.words,
                len(copy.shape),
                *(*copy.shape, *fill),
                *(*copy.source_strides, *fill),
                *(*copy.destination_strides, *fill),
            )
        table = np.frombuffer(rows, _TABLE)
        most = max(copy.words for copy in batch)
        blocks = -(-most // (THREADS * UNROLL))
        yield Launch((min(blocks, _MOST_BLOCKS), len(batch)), table)
