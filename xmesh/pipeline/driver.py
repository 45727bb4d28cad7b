"""Driver: runs a pipeline on real ranks, with reshardings underneath the user's callbacks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xmesh.agreement import Agreement, Record, short
from xmesh.binding import TIMEOUT_S, agree_all, choose_transport, connect, context_of, require_ranks
from xmesh.errors import (
    ClosedError,
    OptionError,
    ScheduleError,
    TransferTimeout,
    XmeshError,
    explain,
)
from xmesh.like import kind_of
from xmesh.pipeline.background import Background, wants_thread
from xmesh.pipeline.callbacks import Callbacks
from xmesh.pipeline.gradients import Gradients, TiedSum
from xmesh.pipeline.lower import program_digest
from xmesh.pipeline.measured import Measured, Recorder, gather
from xmesh.pipeline.pipe import Pipeline
from xmesh.pipeline.simulate import TRANSFERS
from xmesh.pipeline.step import Step
from xmesh.progress import seconds
from xmesh.resharder import Resharder
from xmesh.transport.base import Endpoint
from xmesh.wait_policy import choose_pause, wanted_policy

if TYPE_CHECKING:
    from xmesh.planner import CostModel, Plan
    from xmesh.world import World

_CALLED_BY = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class Driver:
    """Runs steps of a pipeline; all ranks of the World make it, and call ``step`` together.

    Use it as a context manager, or call ``close``.

    Args:
        pipe: what to run; the same on every rank.
        world: ranks and where they are.
        callbacks: what the stages of this rank compute, see ``xmesh.pipeline.Callbacks``.
        gradient_scale: the sums of weight gradients over micro-batches are multiplied by it, once:
            1 / num_microbatches for a loss that is a mean.
        transport: see Resharder.
        timeout_s: seconds after which a wait gives up.
        progress: who moves transfers on while callbacks compute: "thread", "poll" (nobody, unless
            callbacks call ``poll``), "auto" for a thread where MPI allows it.
        transfers: "async": a rank goes on while what it sent travels; "blocking": it waits until
            that has left, which is only good for comparisons.
        cost: latencies and bandwidths to plan for.
        record: keep times of the last step, for ``measured``.
        like: kind of the arrays that callbacks get, see Resharder: ``cupy`` for arrays on this
            rank's GPU. Callbacks then run ahead of it: what they give to their current stream comes
            after the arrays that they get, and transfers come after what they return.

    Raises:
        AgreementError: ranks have different pipelines or options; on all of them.
        OptionError, PlanError, ScheduleError: what any rank's arguments are wrong in; on all.
        TransferTimeout: a rank did not make its driver in time.
    """

    def __init__(
        self,
        pipe: Pipeline,
        world: World,
        callbacks: Callbacks | Any,
        *,
        gradient_scale: float = 1.0,
        transport: str = "auto",
        timeout_s: float = TIMEOUT_S,
        progress: str = "auto",
        transfers: str = "async",
        cost: CostModel | None = None,
        record: bool = False,
        like: Any = None,
    ) -> None:
        from mpi4py import MPI

        self.pipe, self.world, self.callbacks = pipe, world, callbacks
        self.gradient_scale, self.blocking = gradient_scale, transfers == "blocking"
        world.require_open("a pipeline")
        self._context = context_of(world)
        self.rank = self._context.comm.rank
        self.group = pipe.group_of_rank(self.rank)
        self._closed = ""
        self._agreement_endpoint: Endpoint | None = None
        self._tied: list[TiedSum] = []
        self.resharders: dict[tuple[str, bool], Resharder] = {}
        #: Shapes of the arrays that this rank's callbacks return.
        self.shapes: dict[tuple[str, bool], tuple[int, ...]] = {}
        stages = () if self.group is None else pipe.schedule.stages_of_group(self.group)
        self._gradients = Gradients(stages)
        self.timeout_s = TIMEOUT_S
        problem: XmeshError | None = None
        thread, wait, device = False, "auto", None
        plans = {}
        try:
            self.timeout_s = seconds(timeout_s)
            thread = wants_thread(progress, MPI.Query_thread() == MPI.THREAD_MULTIPLE)
            wait = wanted_policy("auto", os.environ)
            choose_transport(self._context.comm, transport)
            require_ranks(self._context, pipe.ranks)
            _require_callbacks(callbacks, pipe, self.group)
            _require_number("gradient_scale", gradient_scale)
            _require_transfers(transfers)
            plans = pipe.plans(world.topology, cost)
            if like is not None:
                device = kind_of(like).device
        except XmeshError as error:
            problem = error  # told to all ranks, which would otherwise wait for this one
        #: Stage of this rank -> micro-batches that were live at one time in the last step, at most.
        self.peak_activations: dict[int, int] = {}
        self.recorder = Recorder() if record and self.group is not None else None
        self._background = Background(self._context.progress, thread=False)
        if self.group is None:
            if problem is not None:
                raise problem
            return
        endpoint = self._connect(plans, problem)
        self.pause = choose_pause(wait, endpoint.own_cores)
        try:
            self._make(plans, transport, like)
            self._background = Background(self._context.progress, thread, device)
        except BaseException:
            self.close()
            raise

    def _make(self, plans: Mapping[tuple[str, bool], Plan], transport: str, like: Any) -> None:
        """Resharders, and communicators for tied weights."""
        for key, made in plans.items():
            if self.rank in made.src.ranks:
                self.shapes[key] = made.src.local_shape(self.rank)
            if self.rank in made.ranks:
                self.resharders[key] = Resharder(
                    made, self.world, transport=transport, timeout_s=self.timeout_s, like=like
                )
        self._tied = [
            TiedSum(self.pipe, tied, self.world, self.timeout_s) for tied in self.pipe.tied
        ]

    @property
    def transport(self) -> str:
        """What moves this rank's arrays: "mpi" or "nccl"; "none" where it has no edges."""
        found = {resharder.transport for resharder in self.resharders.values()}
        return " and ".join(sorted(found)) or "none"

    @property
    def gradients(self) -> dict[int, dict[str, Any]]:
        """Stage of this rank -> name of the weight -> its gradient in the last step.

        The arrays are the same in all steps, and the next step writes to them.
        """
        return self._gradients.of_stage

    def step(self, microbatches: Sequence[Any] | None = None) -> list[Any]:
        """Run all micro-batches once through all stages, forward and (in training) back.

        Args:
            microbatches: for each micro-batch what callbacks get as ``data``; None for nothing.

        Returns:
            The loss of each micro-batch on ranks whose stage has one; [] on the others.

        Raises:
            CallbackError: a callback raised, or returned something wrong; on all ranks, with stage,
                micro-batch and action. The next step may work.
            TransferTimeout: a rank is gone, or late; the driver is closed then.
            ClosedError: the driver was closed, or gave up before.
        """
        if self._closed:
            raise ClosedError(
                explain(
                    "a driver that was closed, or that gave up, cannot be used again",
                    values=self._closed,
                    remedy="make a new Driver on all ranks",
                )
            )
        if self.group is None:
            return []
        run = Step(self, self._gradients, self._background, microbatches)
        try:
            run.compute()
            self._agree(run)
            if not self.pipe.schedule.forward_only:
                run.scale(self._tied)
                self._agree(run)
                run.reduce(self._tied)
                self._agree(run)
        except BaseException as error:
            if not (isinstance(error, XmeshError) and run.agreed):
                # Not all ranks know of it, and transfers may be under way.
                first_line = next(iter(str(error).splitlines()), "")
                self._give_up(run, f"it gave up: {type(error).__name__}: {first_line}")
            raise
        finally:
            self.peak_activations = run.peak_activations
        return run.losses

    def poll(self) -> None:
        """Move transfers on; for long callbacks where there is no progress thread."""
        self._context.progress.step()

    def measured(self) -> Measured | None:
        """The last step as it really was; all ranks of the World call it.

        Returns:
            On rank 0 of the World the times of all ranks on one clock: ``timeline()`` gives them in
            the form of a simulation, ``chrome_trace()`` for Perfetto. None on the other ranks.

        Raises:
            OptionError: on all ranks: the driver was made without ``record``.
            TransferTimeout: a rank did not call in time.
        """
        agree_all(self.world, "Driver.measured", self.timeout_s)
        return gather(self.pipe, self.world.comm, self.recorder)

    def close(self) -> None:
        """Free communicators and buffers, end the thread. Idempotent."""
        if not self._closed:
            self._closed = "close() was called"
            self._background.close()
            for resharder in self.resharders.values():
                resharder.close()
            if self._agreement_endpoint is not None:
                self._agreement_endpoint.release()

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- Agreement --------------------------------------------------------------------------------

    def _connect(
        self, plans: Mapping[tuple[str, bool], Plan], problem: XmeshError | None
    ) -> Endpoint:
        """Compare pipelines and options with the other ranks."""
        pipe = self.pipe
        shared = {
            "schedule and edges": program_digest(pipe.program, pipe.edges).hex()[:16],
            "stages": short([str(mesh) for mesh in pipe.stages]),
            "tied": short(str(pipe.tied)),
            "plans (strategy, scheduler, cost)": short([made.fields() for made in plans.values()]),
            "gradient_scale": repr(self.gradient_scale),
        }
        record = Record(self.rank, "pipeline", shared)
        if problem is not None:
            record = Record.of_error(self.rank, problem)
        ranks = tuple(rank for rank in pipe.ranks if rank < self._context.comm.size)
        endpoint, verdict = connect(
            self._context, ranks, record, self.timeout_s, "pipeline", num_tags=1
        )
        endpoint.reserve_tags(verdict.next_tag, 1)
        self._agreement_endpoint, self._agreement_tag = endpoint, verdict.next_tag
        return endpoint

    def _agree(self, run: Step) -> None:
        """Raise on all ranks what any rank has met; what began it before what came of it."""
        assert self._agreement_endpoint is not None
        record = Record(self.rank)
        error = run.error or run.lost
        if error is not None:
            record = Record.of_error(self.rank, error)
            if run.error is None or isinstance(run.error.__cause__, TimeoutError):
                # A callback that waited in vain for another rank's is no beginning either.
                record = replace(record, error_rank=self.rank + self.world.comm.size)
        agreement = Agreement(self._agreement_endpoint, self._agreement_tag, record)
        progress = self._context.progress

        def give_up() -> XmeshError:
            names = ", ".join(map(str, agreement.waiting_for()))
            return TransferTimeout(
                explain(
                    f"all ranks must finish a step within {self.timeout_s:g} s of each other",
                    values=f"nothing heard from rank {names}",
                    context=f"rank {self.rank}, end of a step of the pipeline",
                    remedy="look for an error on that rank, or raise timeout_s",
                )
            )

        progress.add(agreement)
        try:
            progress.wait(agreement, self.timeout_s, give_up, self.pause)
        except BaseException:
            agreement.abandon()
            raise
        finally:
            progress.remove(agreement)
        verdict = agreement.verdict
        found = None if verdict is None else verdict.error()
        if found is not None:
            run.agreed = True
            raise (error if error is not None and str(error) == str(found) else found)

    def _give_up(self, run: Step, why: str) -> None:
        run.abandon()
        self.close()
        self._closed = why


def _require_callbacks(callbacks: Any, pipe: Pipeline, group: int | None) -> None:
    """Refuse callbacks that lack a method which the schedule calls on this rank."""
    if group is None:
        return
    ops = {action.op for action in pipe.schedule.groups[group]}
    missing = [_CALLED_BY[op] for op in "FBIW" if op in ops and not _has(callbacks, op)]
    if missing:
        raise ScheduleError(
            explain(
                "callbacks must have a method for each op of the schedule",
                values=f"{type(callbacks).__name__} has no {', '.join(missing)}",
                context=f"stage group {group}, schedule {pipe.schedule.name}",
                remedy="write it, or take a schedule with backward in place of backward_input and "
                "backward_weight, or the other way round",
            )
        )


def _has(callbacks: Any, op: str) -> bool:
    return callable(getattr(callbacks, _CALLED_BY[op], None))


def _require_number(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(
            explain(
                f"{what} must be a number",
                values=f"{value!r}",
                remedy="for example 1 / num_microbatches, or leave it out for 1",
            )
        )


def _require_transfers(transfers: Any) -> None:
    if transfers not in TRANSFERS:
        raise OptionError(
            explain(
                f"transfers must be one of {', '.join(TRANSFERS)}",
                values=f"{transfers!r}",
                remedy="leave it at 'async'",
            )
        )
