"""Programs on some ranks of the double of NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from judges import judges, wait_until

HERE = Path(__file__).parent
DOUBLE = HERE.parents[1] / "double"
LIMIT_S = 30

Run = Callable[..., "list[Ended]"]


@dataclass
class Ended:
    """A rank's process."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a program on some ranks; whatever it did, no judge and no socket may be left."""
    socket = tmp_path / "judge"
    started: list[subprocess.Popen[str]] = []

    def run(n: int, program: str, codes: list[int] | None = None, **settings: str) -> list[Ended]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(DOUBLE),
            "DOUBLE_NCCL_SOCKET": str(socket),
            "RANKS": str(n),
            "FOLDER": str(tmp_path),
            **settings,
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE / "_rank.py")],
                env={**environment, "DOUBLE_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(n)
        ]
        started.extend(ranks)
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(textwrap.dedent(program))
            rank.stdin.close()
            rank.stdin = None
        end_s = time.monotonic() + LIMIT_S
        ended = []
        for rank in ranks:
            out, err = rank.communicate(timeout=end_s - time.monotonic())
            ended.append(Ended(rank.returncode, out, err))
        report = "".join(f"{each.out}{each.err}" for each in ended)
        assert [each.code for each in ended] == (codes or [0] * n), report
        return ended

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()
    wait_until(lambda: not socket.exists() and judges(socket) == [])
    assert not socket.with_name("judge.lock").exists()
