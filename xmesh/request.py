"""Request: one call of a Resharder under way, to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xmesh.call import Part
from xmesh.errors import (
    OptionError,
    PeerError,
    TransferTimeout,
    TransportError,
    XmeshError,
    explain,
)
from xmesh.progress import seconds
from xmesh.wait_policy import Pause, sleep

if TYPE_CHECKING:
    from xmesh.resharder import Resharder


class Request:
    """One call under way; made by ``Resharder.start``."""

    def __init__(self, resharder: Resharder, parts: list[Part], call: int) -> None:
        self._resharder = resharder
        self.call = call
        self.parts = parts
        #: Done, or failed.
        self.over = False
        self._error: XmeshError | None = None
        self._when_over: Callable[[], object] | None = None

    @property
    def failed(self) -> bool:
        """Over, and not done."""
        return self._error is not None

    def when_over(self, call: Callable[[], object]) -> None:
        """Have something called once, as soon as this call is seen to be done or to have failed."""
        if self.over:
            call()
        else:
            self._when_over = call

    def test(self) -> bool:
        """Move everything on this communicator on once; True when this call is over.

        Over means done or failed: ``wait`` then returns, or raises, at once.
        """
        if not self.over:
            self._resharder.progress.step()
        return self.over

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the call and return its output.

        Args:
            timeout_s: seconds; None for what the Resharder was made with.

        Returns:
            The array (a tuple of arrays where the rank needs several boxes), ``out`` itself where
            it was given, None on ranks that need nothing. Under loopback a dict by rank. New ones
            are of the kind that ``like`` of the Resharder names.

        Raises:
            ArrayError: this rank's argument is wrong; at the first call, and at all over NCCL, any
                rank's, on all ranks.
                Or the library of a new output does not take it.
            PeerError: data of another rank did not come because its argument was refused there.
            TransferTimeout: time ran out; the resharder is closed then.
        """
        resharder = self._resharder
        self.finish(resharder.timeout_s if timeout_s is None else seconds(timeout_s))
        if self._error is not None:
            raise self._error
        return self._results()

    @property
    def _pause(self) -> Pause | None:
        """What a wait does; None where nothing ever moves once nothing does."""
        pause = self._resharder.pause
        return sleep if pause is None and any(part.on_gpu for part in self.parts) else pause

    def _results(self) -> Any:
        if not self._resharder.loopback:
            return self.parts[0].result() if self.parts else None
        results = {part.member.rank: part.result() for part in self.parts}
        return {rank: result for rank, result in results.items() if result is not None}

    def wait_on(self, stream: Any = None, timeout_s: float | None = None) -> Any:
        """Let a CUDA stream wait for this call in place of the host, and return its output.

        The host waits only until everything has been given to the GPU. What is given to the stream
        from now on sees the output, and may overwrite ``local``. Call ``wait`` as well before the
        resharder is closed: it tells whether the call has ended well.

        Args:
            stream: a stream of CuPy; None for this thread's current one. Arrays in host memory are
                complete on return, whatever the stream.
            timeout_s: see ``wait``.

        Returns:
            As ``wait``.

        Raises:
            XmeshError: as ``wait``, as far as it is known by now.
            OptionError: it is no stream of CuPy.
        """
        resharder = self._resharder
        limit_s = resharder.timeout_s if timeout_s is None else seconds(timeout_s)
        if stream is not None and not hasattr(stream, "wait_event"):
            raise OptionError(
                explain(
                    "wait_on takes a stream of CuPy",
                    values=f"{stream!r} of type {type(stream).__name__}",
                    remedy="for a stream of another library make one of it: "
                    "cupy.cuda.Stream.from_external(stream), or ExternalStream(number) before "
                    "CuPy 14",
                )
            )
        if not self.over:
            resharder.progress.wait(
                _Enqueued(self), limit_s, lambda: self._time_out(limit_s), self._pause
            )
        if self.over:
            return self.wait(limit_s)
        with resharder.progress.lock:
            for part in self.parts:
                part.let_wait(stream)
        return self._results()

    @property
    def enqueued(self) -> bool:
        """Not over yet, but everything left has been given to the GPU."""
        return all(part.over or part.enqueued for part in self.parts)

    def finish_now(self) -> None:
        """Wait until it is over, for the resharder's time-out; what went wrong, ``wait`` tells.

        Raises:
            TransferTimeout: time ran out; the resharder is closed then.
        """
        self.finish(self._resharder.timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Wait until the call is over, be it done or failed.

        Raises:
            TransferTimeout: time ran out; the resharder is closed then.
        """
        if not self.over:
            self._resharder.progress.wait(
                self, timeout_s, lambda: self._time_out(timeout_s), self._pause
            )

    def step(self) -> bool:
        """Move this call on without waiting; True when anything happened."""
        if self.over:
            return False
        moved = False
        over = True
        try:
            for part in self.parts:
                moved |= part.step()
                over &= part.over
        except Exception as error:
            # Of this call, and not of whoever waits for another one on the same communicator.
            self._fail(error)
            return True
        if over:
            errors = [found for part in self.parts if (found := part.error()) is not None]
            # Under loopback all errors meet here: the cause says more than what came of it.
            errors.sort(key=lambda failure: isinstance(failure, PeerError))
            self._finish(errors[0] if errors else None)
        return moved or over

    def _fail(self, error: Exception) -> None:
        """The transport failed: nothing is known of the messages under way."""
        failure = TransportError(
            explain(
                "a transfer must not fail on its way",
                values=f"{type(error).__name__}: {error}",
                context=f"tensor {self._resharder.plan.name!r}",
                remedy="look for a rank or a network that died; the resharder is closed now",
            )
        )
        failure.__cause__ = error
        self.give_up(failure)
        self._resharder.close(f"it failed: {error}")

    def _finish(self, error: XmeshError | None) -> None:
        self.over = True
        self._error = error
        self._resharder.finished(self)
        if self._when_over is not None:
            self._when_over()

    def give_up(self, error: XmeshError) -> None:
        """End it with an error; what is under way is abandoned."""
        for part in self.parts:
            part.abandon(str(error).partition("\n")[0])
        self._finish(error)

    def _time_out(self, limit_s: float) -> XmeshError:
        waiting = next(part for part in self.parts if not part.over)
        error = TransferTimeout(waiting.explain_timeout(limit_s))
        self.give_up(error)
        self._resharder.close(f"it gave up after {limit_s:g} s")
        return error


class _Enqueued:
    """A call whose work the GPU has, as something to wait for."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def over(self) -> bool:
        """The GPU has it all, or it is over."""
        return self._request.over or self._request.enqueued

    def step(self) -> bool:
        """The request is moved on by itself."""
        return False
