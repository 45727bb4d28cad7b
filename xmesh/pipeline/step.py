"""One step of a pipeline on one rank: its actions in order, from micro-batches to losses.

After an error the step goes on without computing: messages go out empty in place of data, which
their receivers notice, and do the same. So every transfer ends, nobody hangs, and the communicators
stay sound; at the end all ranks learn of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from xmesh.clocks import now_s
from xmesh.errors import CallbackError, TransferTimeout, TransportError, XmeshError, explain
from xmesh.interop import as_memory
from xmesh.pipeline.action import ALL, Action
from xmesh.pipeline.background import Background
from xmesh.pipeline.callbacks import Backward, BackwardInput, Forward
from xmesh.pipeline.gradients import Gradients, TiedSum, as_array
from xmesh.pipeline.wiring import Message
from xmesh.request import Request
from xmesh.resharder import Resharder

if TYPE_CHECKING:
    from xmesh.pipeline.driver import Driver

_RETURNS: dict[str, type] = {"F": Forward, "B": Backward, "I": BackwardInput}


class Step:
    """State of one step.

    Args:
        driver: whose step it is.
        gradients: where weight gradients go.
        background: moves transfers on while callbacks compute.
        microbatches: what callbacks get.

    Attributes:
        losses: of the micro-batches; empty where no stage of this rank has one.
        error: what went wrong here.
        lost: what came of an error elsewhere: data that did not arrive.
        agreed: all ranks have learned of an error, after all transfers.
        peak_activations: for each stage, micro-batches that were live at one time at the most.
    """

    def __init__(
        self,
        driver: Driver,
        gradients: Gradients,
        background: Background,
        microbatches: Sequence[Any] | None,
    ) -> None:
        pipe = driver.pipe
        self._driver, self._callbacks, self._recorder = driver, driver.callbacks, driver.recorder
        self._schedule, self._wiring = pipe.schedule, pipe.wiring
        self._rank = driver.rank
        self._actions = () if driver.group is None else pipe.program[driver.group]
        self._gradients, self._background = gradients, background
        self._data: Sequence[Any] = [None] * pipe.num_microbatches
        self.error: XmeshError | None = None
        self.lost: XmeshError | None = None
        self.agreed = False
        self._failed = False
        if microbatches is not None:
            self._data = microbatches
            self._require_microbatches(pipe.num_microbatches)
        self.losses: list[Any] = []
        #: Receives, by message; then what came; and what is to be sent.
        self._coming: dict[Message, Request] = {}
        self._came: dict[Message, Any] = {}
        self._made: dict[Message, Any] = {}
        #: Transfers that the host has yet to see the end of.
        self._open: list[Request] = []
        #: What callbacks saved, and the arrays that came in, by stage and micro-batch.
        self._saved: dict[tuple[int, int], Any] = {}
        self._inputs: dict[tuple[int, int], list[Any]] = {}
        self.peak_activations: dict[int, int] = {}

    def compute(self) -> None:
        """Do all actions up to the reductions, and wait until all transfers have ended.

        Raises:
            TransferTimeout: a transfer did not end in time.
        """
        self._gradients.begin()
        if self._recorder is not None:
            self._recorder.begin()
        for action in self._actions:
            _DO[action.op](self, action)
        for request in self._open:
            self._finish(request.wait)
        if self._recorder is not None:
            self._recorder.end()

    def scale(self, tied: Sequence[TiedSum]) -> None:
        """All micro-batches are in: scale gradients, and see whether tied ones are all there."""
        stage = -1
        try:
            for stage in self._gradients.of_stage:
                self._gradients.finish(stage, self._driver.gradient_scale)
            for each in tied:
                each.check(self._gradients)
        except Exception as error:
            self._fail(Action("REDUCE", stage, ALL), error)

    def reduce(self, tied: Sequence[TiedSum]) -> None:
        """Sum tied gradients, and let the callbacks reduce theirs.

        Raises:
            TransferTimeout: another stage of a tied weight stayed away.
        """
        stage = min(self._gradients.of_stage)
        try:
            for each in tied:
                each(self._gradients)
            if hasattr(self._callbacks, "reduce"):
                for stage in self._gradients.of_stage:
                    self._callbacks.reduce(stage, self._gradients.of_stage[stage])
        except TransferTimeout:
            raise
        except Exception as error:
            self._fail(Action("REDUCE", stage, ALL), error)

    def abandon(self) -> None:
        """The step is given up: let go of everything."""
        for kept in (self._coming, self._came, self._made, self._saved, self._inputs):
            kept.clear()
        self._open.clear()

    # --- Transfers --------------------------------------------------------------------------------

    def _message(self, action: Action) -> Message:
        message = self._wiring.message(action)
        assert message is not None  # the program was checked
        return message

    def _resharder(self, message: Message) -> Resharder:
        forward = message.sender == self._wiring.edge(message).src_stage
        return self._driver.resharders[message.edge, forward]

    def _within_group(self, message: Message) -> bool:
        source, destination = self._wiring.link(message)
        return source == destination

    def _start(self, message: Message, local: Any) -> Request:
        request = self._resharder(message).start(local)
        if self._recorder is not None:
            self._recorder.started(message, request)
        return request

    def _receive(self, action: Action) -> None:
        message = self._message(action)
        if not self._within_group(message):  # a resharding within a group starts with its SEND
            self._coming[message] = self._start(message, None)

    def _send(self, action: Action) -> None:
        message = self._message(action)
        # Without data the transfer is started all the same: the others count on it.
        request = self._start(message, self._made.pop(message, None))
        self._forget_ended()
        if self._within_group(message):
            self._coming[message] = request
        elif self._driver.blocking:
            self._finish(request.wait)
        else:
            self._open.append(request)

    def _wait(self, action: Action) -> None:
        message = self._message(action)
        request = self._coming.pop(message)
        # On a GPU the callback's stream waits for the data, and the host goes on.
        came = self._finish(partial(request.wait_on, None))
        self._forget_ended()
        if not request.over:
            self._open.append(request)
        if not self._failed:
            self._came[message] = came

    def _forget_ended(self) -> None:
        """Let go of the arrays of transfers that have ended well."""
        self._open = [each for each in self._open if not each.over or each.failed]

    def _finish(self, wait: Callable[[float], Any]) -> Any:
        """Wait for a transfer; where its data did not come, this step has failed."""
        try:
            return wait(self._driver.timeout_s)
        except (TransferTimeout, TransportError):
            raise
        except XmeshError as error:
            if not self._failed:
                self.lost = error
            self._failed = True
            return None

    # --- Computation ------------------------------------------------------------------------------

    def _compute(self, action: Action) -> None:
        if self._failed:
            return
        needs = {message: self._came.pop(message) for message in self._wiring.needs(action)}
        arrays = {message.edge: array for message, array in needs.items()}
        began_s = now_s()
        try:
            with self._background:
                result = self._call(action, arrays)
            if action.op == "W":
                self._gradients.add(action.stage, result)
                return
            self._keep(action, result, list(needs.values()))
        except Exception as error:
            self._fail(action, error)
        finally:
            if self._recorder is not None:
                self._recorder.computed(action, began_s, now_s())

    def _call(self, action: Action, arrays: dict[str, Any]) -> Any:
        op, stage, microbatch, _ = action
        if op == "F":
            return self._callbacks.forward(stage, microbatch, arrays, self._data[microbatch])
        saved = self._saved.get((stage, microbatch))
        if op == "B":
            return self._callbacks.backward(stage, microbatch, arrays, saved)
        if op == "I":
            return self._callbacks.backward_input(stage, microbatch, arrays, saved)
        return self._callbacks.backward_weight(stage, microbatch, saved)

    def _keep(self, action: Action, result: Any, arrays: list[Any]) -> None:
        """Take over what a callback returned."""
        kind, given = _RETURNS[action.op], type(result)
        if given is not kind:
            raise TypeError(
                f"it must return a {kind.__name__} of xmesh.pipeline, not {given.__name__}"
            )
        key = action.stage, action.microbatch
        made = result.outputs if kind is Forward else result.inputs
        wanted = self._wiring.makes(action)
        for message in wanted:
            self._made[message] = self._checked(message, made)
        unknown = [name for name in made if name not in {message.edge for message in wanted}]
        if unknown:
            raise ValueError(
                f"no array was wanted for {', '.join(map(repr, unknown))}, but for "
                + (", ".join(repr(message.edge) for message in wanted) or "no edge")
            )
        if kind is Forward:
            if result.loss is not None:
                self.losses = self.losses or [None] * len(self._data)
                self.losses[action.microbatch] = result.loss
            self._saved[key], self._inputs[key] = result.saved, arrays
            live = sum(stage == action.stage for stage, _ in self._saved)
            most = self.peak_activations.get(action.stage, 0)
            self.peak_activations[action.stage] = max(most, live)
        elif kind is Backward:
            self._gradients.add(action.stage, result.weights)
        else:
            self._saved[key] = result.saved

    def _checked(self, message: Message, made: Mapping[str, Any]) -> Any:
        """The array for an edge, as the edge's layout has it on this rank."""
        edge = self._wiring.edge(message)
        forward = message.sender == edge.src_stage
        shape = self._driver.shapes[message.edge, forward]
        what = "the output" if forward else "the gradient"
        if made.get(message.edge) is None:
            raise ValueError(f"{what} for edge {edge.name!r} is missing; it has shape {shape}")
        array = as_array(made[message.edge])
        if self._resharder(message).transport == "nccl" and isinstance(array, np.ndarray):
            raise ValueError(
                f"{what} for edge {edge.name!r} lies in host memory, and NCCL moves none from "
                "there: return one of CuPy, or make the Driver with transport='mpi'"
            )
        memory = as_memory(array, what)  # whose dtype is NumPy's, whatever the library
        if memory.shape != shape or memory.dtype != edge.dtype:
            raise ValueError(
                f"{what} for edge {edge.name!r} has shape {memory.shape} and dtype {memory.dtype}, "
                f"the edge has shape {shape} and dtype {edge.dtype} on this rank"
            )
        return array

    def _free(self, action: Action) -> None:
        key = action.stage, action.microbatch
        self._saved.pop(key, None)
        self._inputs.pop(key, None)

    def _fail(self, action: Action, error: Exception) -> None:
        if self.error is None:
            self.error = CallbackError(
                explain(
                    "a callback must end without an error",
                    values=f"{type(error).__name__}: {error}",
                    context=f"action {action} (stage {action.stage}, "
                    + (f"micro-batch {action.microbatch}" if action.microbatch != ALL else "end")
                    + f"), rank {self._rank}, schedule {self._schedule.name}",
                    remedy="see its cause on that rank; the next step works, unless it left others "
                    "waiting in a collective of its own",
                )
            )
            self.error.__cause__ = error
        self._failed = True

    def _require_microbatches(self, count: int) -> None:
        try:
            found = len(self._data)
        except TypeError:
            found = -1
        if found != count:
            self.error = CallbackError(
                explain(
                    "step takes one item for each micro-batch",
                    values=(f"{found} items" if found >= 0 else type(self._data).__name__)
                    + f", {count} micro-batches",
                    context=f"rank {self._rank}",
                    remedy="pass None on ranks whose stages need no data",
                )
            )
            self._failed = True


#: What a step does for each op. Reductions come after all ranks have agreed that nothing failed.
_DO: dict[str, Callable[[Step, Action], None]] = {
    "F": Step._compute,
    "B": Step._compute,
    "I": Step._compute,
    "W": Step._compute,
    "SEND": Step._send,
    "RECV": Step._receive,
    "WAIT": Step._wait,
    "FREE": Step._free,
    "REDUCE": lambda step, action: None,
}
