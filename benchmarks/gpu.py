"""Copies of a GPU as xmesh makes them, beside plain ones of the same bytes in the same run.

Packing and unpacking against a device-to-device copy; staging through pinned memory against plain
copies between GPU and host; a call between two ranks that share the GPU, staged over MPI, against
the slower of the GPU's link and MPI (benchmarks/gpu_end_to_end.py).

    python benchmarks/gpu.py                  make bench-gpu
    python benchmarks/gpu.py --json           numbers alone
    python benchmarks/gpu.py --quick          small sizes: does it run?

Times are those of events of CUDA, medians over the repeats. A kernel that spins holds the stream
until everything to be timed is in it, so that what the host takes to give work is not counted. Up
to some tens of MiB what is copied lies in the GPU's cache, for both sides of a ratio.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from xmesh.device.gpu import Gpu
from xmesh.device.regions import Pair, c_strides
from xmesh.errors import XmeshError
from xmesh.mpiexec import Launcher

#: Of a plain copy's rate, for boxes of this size and more.
TARGET, TARGET_FROM_NBYTES = 0.8, 2**20
SIZES = tuple(2**power for power in range(16, 29, 2))
QUICK_SIZES = (2**12, 2**16)
END_TO_END = Path(__file__).resolve().with_name("gpu_end_to_end.py")
_SPIN = r"""
#ifndef __CUDACC_RTC__  // the double of CuPy compiles for the host
static inline long long clock64() { static long long now; return now += 1LL << 32; }
#endif
extern "C" __global__ void spin(long long cycles) {
  const long long began = clock64();
  while (clock64() - began < cycles) {}
}
"""
#: Some milliseconds: the host gives some tens of launches meanwhile.
_SPIN_CYCLES = 10_000_000


class Box(NamedTuple):
    """A region of an array, and how it lies there.

    Attributes:
        name: in words.
        shape: elements along each dimension.
        strides: in bytes.
        itemsize: bytes of an element.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(np.prod(self.shape)) * self.itemsize

    @property
    def extent(self) -> int:
        """Bytes of memory from its first element to its last."""
        steps = zip(self.shape, self.strides, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + self.itemsize


def boxes_of(nbytes: int) -> Iterator[Box]:
    """Boxes of so many bytes, or nearly."""
    yield Box("contiguous", (nbytes,), (1,), 1)
    yield Box("rows of 512 B", (nbytes // 512, 512), (1024, 1), 1)
    yield Box("columns of 64 B", (nbytes // 64, 64), (1024, 1), 1)
    side = 2 ** ((nbytes // 4).bit_length() // 2)
    other = nbytes // 4 // side
    yield Box("transposed float32", (side, other), (4, 4 * side), 4)
    yield Box("transposed float16", (side, 2 * other), (2, 2 * side), 2)
    inner = round((nbytes / 4) ** (1 / 3))
    wide = inner + 2
    yield Box("inside of a cube", (inner,) * 3, (4 * wide * wide, 4 * wide, 4), 4)


class Clock:
    """Times work on a stream by events.

    Args:
        gpu: whose.
        repeats: of each measurement.
        inner: times that the work is done between two events.
    """

    def __init__(self, gpu: Gpu, repeats: int, inner: int) -> None:
        self._gpu, self._repeats, self._inner = gpu, repeats, inner
        self._spin = gpu.cupy.RawKernel(_SPIN, "spin")

    def medians_s(self, stream: Any, works: dict[str, Callable[[], None]]) -> dict[str, float]:
        """Seconds of each work; they take turns, so that all meet the same clock rates."""
        times: dict[str, list[float]] = {name: [] for name in works}
        for repeat in range(self._repeats + 1):
            for name, work in works.items():
                took_s = self._once_s(stream, work)
                if repeat:  # the first time makes ready
                    times[name].append(took_s)
        return {name: statistics.median(found) for name, found in times.items()}

    def _once_s(self, stream: Any, work: Callable[[], None]) -> float:
        cuda = self._gpu.cupy.cuda
        with self._gpu.here():
            first, last = cuda.Event(), cuda.Event()
            with stream:
                self._spin((1,), (1,), (np.int64(_SPIN_CYCLES),))
            first.record(stream)
            for _ in range(self._inner):
                work()
            last.record(stream)
            last.synchronize()
            return float(cuda.get_elapsed_time(first, last)) / 1e3 / self._inner


class Bench:
    """All measurements of one process.

    Args:
        gpu: where.
        clock: times.
    """

    def __init__(self, gpu: Gpu, clock: Clock) -> None:
        self.gpu, self.clock = gpu, clock

    def packing(self, box: Box) -> dict[str, Any]:
        """Pack and unpack on the GPU, beside a copy there."""
        gpu, nbytes = self.gpu, box.nbytes
        there, packed, other = (gpu.device_bytes(n) for n in (box.extent, nbytes, nbytes))
        return self._compare(
            box,
            pack=lambda: self._copy(box, there.pointer, packed.pointer, False),
            unpack=lambda: self._copy(box, there.pointer, packed.pointer, True),
            plain_pack=lambda: self._plain(other.pointer, packed.pointer, nbytes),
            plain_unpack=lambda: self._plain(packed.pointer, other.pointer, nbytes),
        )

    def staging(self, box: Box) -> dict[str, Any]:
        """Pack to pinned memory of the host and unpack from there, beside plain copies."""
        gpu, nbytes = self.gpu, box.nbytes
        there, other = gpu.device_bytes(box.extent), gpu.device_bytes(nbytes)
        pinned = gpu.pinned_bytes(nbytes)
        host = int(pinned.ctypes.data)
        return self._compare(
            box,
            pack=lambda: self._copy(box, there.pointer, host, False, host=True),
            unpack=lambda: self._copy(box, there.pointer, host, True, host=True),
            plain_pack=lambda: self._plain(other.pointer, host, nbytes),
            plain_unpack=lambda: self._plain(host, other.pointer, nbytes),
        )

    def _compare(self, box: Box, **works: Callable[[], None]) -> dict[str, Any]:
        found = self.clock.medians_s(self.gpu.outgoing, works)
        return {
            "box": box.name,
            "nbytes": box.nbytes,
            "pack_s": found["pack"],
            "unpack_s": found["unpack"],
            "plain_pack_s": found["plain_pack"],
            "plain_unpack_s": found["plain_unpack"],
            "pack_ratio": found["plain_pack"] / found["pack"],
            "unpack_ratio": found["plain_unpack"] / found["unpack"],
        }

    def _copy(self, box: Box, there: int, packed: int, back: bool, host: bool = False) -> None:
        packed_strides = c_strides(box.shape, box.itemsize)
        pair = Pair(there, packed, box.shape, box.strides, packed_strides, box.itemsize)
        if back:
            pair = Pair(packed, there, box.shape, packed_strides, box.strides, box.itemsize)
        self.gpu.copy([pair], self.gpu.outgoing, host and back, host and not back)

    def _plain(self, source: int, target: int, nbytes: int) -> None:
        runtime, stream = self.gpu.cupy.cuda.runtime, self.gpu.outgoing
        with self.gpu.here():
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream.ptr)


def end_to_end(quick: bool) -> dict[str, Any]:
    """What two ranks measure, or why they did not."""
    try:
        words = Launcher.find().command(2, [str(END_TO_END), *(["--quick"] if quick else [])])
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "XMESH_CUDA_AWARE": "0"},
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode == 0 and lines:
            found: dict[str, Any] = json.loads(lines[-1])
            return found
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"missing": f"exit status {done.returncode}: {last}"}
    except (XmeshError, OSError, subprocess.SubprocessError) as error:
        return {"missing": str(error)}


def is_real(cupy: Any) -> bool:
    """A CuPy with a GPU, and not the double that tests use."""
    return importlib.util.find_spec(f"{cupy.__name__}._core") is not None


def measure(gpu: Gpu, quick: bool) -> dict[str, Any]:
    """Everything, as plain data."""
    runtime = gpu.cupy.cuda.runtime
    bench = Bench(gpu, Clock(gpu, repeats=1 if quick else 11, inner=2 if quick else 10))
    free, _ = runtime.memGetInfo()
    packing, staging = [], []
    for nbytes in QUICK_SIZES if quick else SIZES:
        for box in boxes_of(nbytes):
            if box.extent + 2 * box.nbytes < 0.8 * free:
                packing.append(bench.packing(box))
                staging.append(bench.staging(box))
                gpu.cupy.get_default_memory_pool().free_all_blocks()
    name = runtime.getDeviceProperties(gpu.device)["name"]
    return {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "cupy": str(gpu.cupy.__version__),
        "runtime": int(runtime.runtimeGetVersion()),
        "driver": int(runtime.driverGetVersion()),
        "real": is_real(gpu.cupy),
        "packing": packing,
        "staging": staging,
        "end_to_end": end_to_end(quick),
    }


def table_of(title: str, plain: str, rows: list[dict[str, Any]]) -> Table:
    """Rates, and their ratios to plain copies."""
    table = Table(title=title, title_justify="left")
    for heading in ("box", "MiB", "pack, GB/s", plain, "ratio", "unpack, GB/s", plain, "ratio"):
        table.add_column(heading, justify="left" if heading == "box" else "right")
    for row in rows:
        cells = [row["box"], f"{row['nbytes'] / 2**20:.3g}"]
        for way in ("pack", "unpack"):
            rates = (row["nbytes"] / row[f"{kind}{way}_s"] / 1e9 for kind in ("", "plain_"))
            cells += [f"{rate:.1f}" for rate in rates]
            cells.append(f"{row[f'{way}_ratio']:.2f}")
        table.add_row(*cells)
    return table


def end_to_end_table(found: dict[str, Any]) -> Table:
    """The least time that link and MPI allow, over the time of a call."""
    table = Table(title="A call between 2 ranks on one GPU, staged over MPI", title_justify="left")
    for heading in ("source", "MiB", "call, GB/s", "link, GB/s", "MPI, GB/s", "bound/call"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for row in found["rows"]:
        nbytes = row["nbytes"]
        rates = [nbytes / row[key] / 1e9 for key in ("call_s", "link_s", "mpi_s")]
        table.add_row(
            row["source"],
            f"{nbytes / 2**20:.3g}",
            *(f"{rate:.2f}" for rate in rates),
            f"{max(row['link_s'], row['mpi_s']) / row['call_s']:.2f}",
        )
    return table


def verdict(found: dict[str, Any]) -> str:
    """Whether the target is met; nothing of the kind where no GPU was measured."""
    if not found["real"]:
        return (
            "No verdict: this CuPy is the double that tests use. What is shown is how fast it "
            "pretends, and means nothing."
        )
    rows = [row for row in found["packing"] if row["nbytes"] >= TARGET_FROM_NBYTES * 0.9]
    ratios = [
        (row[f"{way}_ratio"], f"{way} of {row['box']}, {row['nbytes'] / 2**20:.3g} MiB")
        for row in rows
        for way in ("pack", "unpack")
    ]
    if not ratios:
        return f"No verdict: nothing of {TARGET_FROM_NBYTES / 2**20:g} MiB or more was measured."
    below = [f"{what}: {ratio:.2f}" for ratio, what in ratios if ratio < TARGET]
    target = f"at least {TARGET} of a plain copy from {TARGET_FROM_NBYTES / 2**20:g} MiB on"
    if below:
        return f"Target ({target}) missed by {len(below)} of {len(ratios)}: {'; '.join(below)}"
    return f"Target ({target}) met by all {len(ratios)}; the least is {min(ratios)[0]:.2f}"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--json", action="store_true", help="print numbers as JSON, and no tables")
    options = parser.parse_args()
    try:
        gpu = Gpu()
    except XmeshError as error:
        print(f"{error}\n(make bench-gpu CUPY=cupy-cuda12x installs CuPy)", file=sys.stderr)
        return 2
    gpu.compile()
    found = measure(gpu, options.quick)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(f"{found['gpu']}, CuPy {found['cupy']}, CUDA runtime {found['runtime']}")
    console.print(table_of("Packing on the GPU", "copy", found["packing"]))
    console.print(table_of("Staging in pinned memory", "copy", found["staging"]))
    if "missing" in found["end_to_end"]:
        console.print(f"No call between ranks was measured: {found['end_to_end']['missing']}")
    else:
        console.print(end_to_end_table(found["end_to_end"]))
    console.print(verdict(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
