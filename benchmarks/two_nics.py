"""How much faster hosts with two NICs are than hosts with one, on an emulated cluster.

sudo python benchmarks/two_nics.py [MBYTES] [RATE]       (64 MiB, 200mbit)
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from xmesh.cluster import EmulatedCluster
from xmesh.errors import XmeshError

CASES = ("1", "4", "7")
HOSTS, RANKS_PER_HOST, REPEATS = 4, 4, 5
#: Data in each frame of a TCP stream over Ethernet: what is attainable of a NIC's rate.
GOODPUT = 1448 / 1514


def measure(nics_per_host: int, mbytes: str, rate_bps: float) -> list[dict[str, Any]]:
    """Rows of ``xmesh bench paper`` for CASES."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedCluster(HOSTS, rate_bps, nics_per_host) as cluster,
    ):
        rows = Path(folder) / "rows.json"
        words = [sys.executable, "-m", "xmesh", "bench", "paper", "--topology", "discovered"]
        words += ["--nic-gbits", str(rate_bps * GOODPUT / 1e9), "--mbytes", mbytes]
        words += ["--repeats", str(REPEATS), "--case", *CASES, "--json", str(rows)]
        outcome = cluster.run(words, RANKS_PER_HOST, timeout_s=1200)
        if outcome.status:
            raise XmeshError(outcome.output)
        read: list[dict[str, Any]] = json.loads(rows.read_text())
        return read


def main() -> int:
    """Print a table."""
    mbytes, rate = (sys.argv[1:] + ["64", "200mbit"][len(sys.argv) - 1 :])[:2]
    rate_bps = float(rate.removesuffix("mbit")) * 1e6
    one, two = (measure(nics, mbytes, rate_bps) for nics in (1, 2))
    print(f"{HOSTS} hosts of {RANKS_PER_HOST} ranks, NICs of {rate}, median of {REPEATS}")
    print(
        f"{'case':>4} {'MiB':>6} {'one NIC, s':>11} {'two, s':>8} {'ratio':>6} {'two / bound':>12}"
    )
    for first, second in zip(one, two, strict=True):
        times_s = [statistics.median(row["times_s"]) for row in (first, second)]
        print(
            f"{first['case']:>4} {first['nbytes'] / 2**20:>6.1f} {times_s[0]:>11.3f} "
            f"{times_s[1]:>8.3f} {times_s[0] / times_s[1]:>6.2f} "
            f"{times_s[1] / second['bound_s']:>12.3f}"
        )
    return 0 if all(row["verified"] for row in (*one, *two)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
