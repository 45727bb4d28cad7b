"""Owner: the process that a cluster belongs to, so that what dead ones left can be told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Owner:
    """A process: its id, and when it started, because ids are used again."""

    pid: int
    start_time: str

    @classmethod
    def of(cls, pid: int | None = None) -> Owner:
        """Of a process that is alive; default: this one."""
        pid = os.getpid() if pid is None else pid
        return cls(pid, _start_time(pid))

    def alive(self) -> bool:
        """Whether it still runs."""
        return self.start_time != "" and _start_time(self.pid) == self.start_time

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {"pid": self.pid, "start_time": self.start_time}

    @classmethod
    def from_json(cls, data: Any) -> Owner | None:
        """What `to_json` wrote; None for None: a cluster that was left to stay."""
        return None if data is None else cls(int(data["pid"]), str(data["start_time"]))


def _start_time(pid: int) -> str:
    """In clock ticks since the boot; "" if there is no such process, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
