"""Median time of `import xmesh` over N fresh interpreters, beside that of `import numpy`.

python benchmarks/import_time.py [N]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = "import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"


def import_time_s(module: str) -> float:
    """Time of one import in an interpreter of its own, without the interpreter's start."""
    command = [sys.executable, "-c", CODE.format(module=module)]
    return float(
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )


def main() -> None:
    """Print a line per module."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for module in ("numpy", "xmesh"):
        import_time_s(module)  # the first one reads the files, and may have to compile them
        times_s = sorted(import_time_s(module) for _ in range(repeats))
        median_s = statistics.median(times_s)
        print(
            f"import {module:<6} median {median_s * 1e3:6.1f} ms, "
            f"from {times_s[0] * 1e3:.1f} to {times_s[-1] * 1e3:.1f} ms, {repeats} interpreters"
        )


if __name__ == "__main__":
    main()
