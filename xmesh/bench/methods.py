"""Methods: the ways to move an array that the experiments compare."""

from __future__ import annotations

from dataclasses import dataclass

from xmesh.errors import OptionError, explain
from xmesh.planner import STRATEGIES
from xmesh.planner.schedulers import BY_NAME

#: Plain MPI, see xmesh.bench.baselines.
BASELINES = ("mpi_isend", "mpi_alltoallw", "mpi_bcast")


@dataclass(frozen=True)
class Method:
    """How an array is moved.

    Attributes:
        strategy: a strategy of the planner, "auto", or one of ``BASELINES``.
        scheduler: a scheduler of the planner, or "auto"; "" for a baseline, which has no plan.
    """

    strategy: str = "auto"
    scheduler: str = "auto"

    @property
    def is_baseline(self) -> bool:
        """Whether it is plain MPI."""
        return self.strategy in BASELINES

    def __str__(self) -> str:
        return self.strategy if self.scheduler in ("", "auto") else "/".join(self._words)

    @property
    def _words(self) -> tuple[str, str]:
        return self.strategy, self.scheduler

    @classmethod
    def parse(cls, text: str) -> Method:
        """Read "auto", a strategy, "strategy/scheduler", or a baseline.

        Raises:
            OptionError: it is none of these.
        """
        strategy, _, scheduler = text.partition("/")
        if strategy in BASELINES and not scheduler:
            return cls(strategy, "")
        method = cls(strategy, scheduler or "auto")
        if strategy in ("auto", *STRATEGIES) and method.scheduler in BY_NAME:
            return method
        raise OptionError(
            explain(
                "a method is a strategy, a strategy and a scheduler, or plain MPI",
                values=repr(text),
                remedy=f"strategies: auto, {', '.join(STRATEGIES)}; after a slash: "
                f"{', '.join(BY_NAME)}; plain MPI: {', '.join(BASELINES)}",
            )
        )


#: What the package does when nobody tells it how.
AUTO = Method()
#: For n -> m: the paper's methods, each of them with the best order, and plain MPI.
N_TO_M = tuple(
    Method.parse(text)
    for text in (
        "auto",
        "broadcast",
        "broadcast/load_balance",
        "broadcast/naive",
        "local_allgather",
        "global_allgather",
        "send_recv",
        "send_recv/naive",
        *BASELINES,
    )
)
#: For 1 -> m, where there is one task and so nothing to order.
ONE_TO_M = tuple(
    Method.parse(text)
    for text in (
        *("auto", "broadcast", "global_allgather", "local_allgather", "send_recv"),
        *("mpi_bcast", "mpi_isend"),
    )
)
