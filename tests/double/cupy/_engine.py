"""Streams, and the one thread of the process that executes them.

Each stream is first in, first out. Streams advance independently, except that CUDA's default stream
and the streams that are not "non-blocking" wait for each other. The thread never waits inside an
operation: it starts it, and asks it again and again whether it is done.

Timing is adversarial. Work starts only a while after it was enqueued, and the order among streams
is drawn, so a host or a stream that forgets to wait sees stale data.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import random
import threading
import time
from collections.abc import Callable

import numpy as np

from cupy import _devices, _memory, _settings
from cupy._errors import CUDARuntimeError, explained

#: How often work that something outside may finish is asked.
POLL_S = 0.0005

#: How often each call of interest was made.
counters: collections.Counter[str] = collections.Counter()


class Work:
    """One operation in a stream."""

    label = "work"
    #: Something outside of the streams may finish it, so it is asked on a timer.
    outside = True

    def start(self) -> None:
        """Begin; called once on the device thread when everything before it is done."""

    def poll(self) -> bool:
        """Whether it is done; called on the device thread, must not block, may raise."""
        return True


class Call(Work):
    """Work that a function does at once."""

    outside = False

    def __init__(self, label: str, function: Callable[[], object]) -> None:
        self.label = label
        self._function = function

    def start(self) -> None:
        self._function()


class Marker(Work):
    """A point in a stream that others may wait for."""

    label = "event"
    outside = False

    def __init__(self) -> None:
        self.done = False
        self.time_s = 0.0

    def start(self) -> None:
        self.time_s = time.monotonic()
        self.done = True


class WaitFor(Work):
    """A stream that waits for a point in another."""

    label = "wait for an event"
    outside = False

    def __init__(self, marker: Marker) -> None:
        self._marker = marker

    def poll(self) -> bool:
        return self._marker.done


class _Delay(Work):
    label = "delay"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def start(self) -> None:
        self._end_s = time.monotonic() + self._seconds

    def poll(self) -> bool:
        return time.monotonic() >= self._end_s


class _Entry:
    def __init__(self, work: Work) -> None:
        self.work = work
        self.number = next(_numbers)  # the order of all work in this process
        self.ready_s = time.monotonic() + _settings.DELAY_S
        self.started = False


class Stream:
    """A queue of work on one device."""

    def __init__(self, pointer: int, device: int, waits_for_default: bool) -> None:
        self.pointer = pointer
        self.device = device
        self.waits_for_default = waits_for_default
        self.entries: collections.deque[_Entry] = collections.deque()

    def first(self) -> float:
        """The number of the first entry that is not done, or infinity."""
        return self.entries[0].number if self.entries else float("inf")


_numbers = itertools.count()
_pointers = itertools.count(0x3000_0000_0000_0000, 0x100)  # of no memory, not even of a device
_lock = threading.RLock()
_something_to_do = threading.Condition(_lock)
_something_done = threading.Condition(_lock)
_default = {device: Stream(0, device, False) for device in range(_settings.DEVICES)}
_streams: dict[int, Stream] = {}  # by pointer, without the default ones
_busy: set[Stream] = set()  # a destroyed stream finishes what it has
_errors: dict[int, BaseException] = {}
_woken = False
_stopped = False
_thread: threading.Thread | None = None
# Destructors run anywhere, also inside the functions below, so they only leave a note here.
_notes: collections.deque[tuple[Callable[..., None], object]] = collections.deque()


# What the other modules call.


def enqueue(stream_ptr: int, work: Work) -> None:
    """Put work at the end of a stream; 0 and 1 are the default stream of the current device."""
    collect()
    stream = stream_of(stream_ptr)
    check(stream.device)
    _put(stream, work)


def wake() -> None:
    """Something changed outside: ask what is not done again, now."""
    global _woken
    with _lock:
        _woken = True
        _something_to_do.notify_all()


def host_view(pointer: int, nbytes: int, device: int | None = None) -> np.ndarray:
    """The memory behind a device pointer.

    Raises for a pointer that is unknown, freed, out of bounds, or of a device other than the one
    that is asked for. Work may still use memory that was given back after it was enqueued.
    """
    collect()
    view = _memory.device_memory.view(pointer, nbytes, on_device_thread())
    block = _memory.device_memory.find(pointer)
    if device is not None and block is not None and block.device != device:
        raise explained(
            CUDARuntimeError, 700, f"device {device} was given memory of device {block.device}"
        )
    return view


def first_in_stream(stream_ptr: int) -> Work | None:
    """What a stream is at now."""
    stream = stream_of(stream_ptr)
    with _lock:
        return stream.entries[0].work if stream.entries else None


def delay(stream_ptr: int, seconds: float) -> None:
    """Keep a stream busy."""
    enqueue(stream_ptr, _Delay(seconds))


def allocated_nbytes(device: int) -> int:
    """What arrays of a device hold, in whole units of CuPy's pool."""
    collect()
    return _memory.used(device)


def streams_idle() -> bool:
    """Whether all work of this process is done."""
    collect()
    with _lock:
        return not _busy


def forget_error(device: int) -> None:
    """Make a device usable again after an error, as only tests of errors may."""
    with _lock:
        _errors.pop(device, None)


def on_device_thread() -> bool:
    return threading.current_thread() is _thread


def make_stream(device: int, waits_for_default: bool) -> int:
    """A new stream's pointer."""
    with _lock:
        pointer = next(_pointers)
        _streams[pointer] = Stream(pointer, device, waits_for_default)
    return pointer


def stream_of(stream_ptr: int) -> Stream:
    """The stream with a pointer."""
    if stream_ptr in (0, 1):
        return _default[_devices.current()]
    with _lock:
        stream = _streams.get(stream_ptr)
    if stream is None:
        raise explained(CUDARuntimeError, 400, f"no stream has the pointer {stream_ptr:#x}")
    return stream


def check(device: int) -> None:
    """Raise the error that a device has met."""
    error = _errors.get(device)
    if error is None:
        return
    if isinstance(error, CUDARuntimeError):
        copy = CUDARuntimeError(error.status)
        copy.args = error.args
    else:
        copy = explained(CUDARuntimeError, 719, f"{type(error).__name__}: {error}")
    raise copy from error


def status(device: int) -> int:
    """Number of the error that a device has met; 0 for none."""
    error = _errors.get(device)
    return 0 if error is None else getattr(error, "status", 719)


def is_done(stream_ptr: int) -> bool:
    """Whether everything in a stream is done."""
    collect()
    stream = stream_of(stream_ptr)
    with _lock:  # at once, as an error empties the streams
        check(stream.device)
        streams = [stream]
        if stream.pointer == 0:
            streams += [other for other in _busy if _wait_for_each_other(stream, other)]
        return not any(each.entries for each in streams)


def synchronize(stream_ptr: int) -> None:
    """Wait for everything that is in a stream now."""
    stream = stream_of(stream_ptr)
    if stream.pointer == 0:  # waits for what the default stream waits for
        marker = Marker()
        enqueue(stream_ptr, marker)
        wait_until(stream.device, lambda: marker.done)
        return
    collect()
    with _lock:
        last = stream.entries[-1].number if stream.entries else -1
    wait_until(stream.device, lambda: stream.first() > last)


def synchronize_device(device: int) -> None:
    """Wait for everything that is in the streams of a device now."""
    collect()
    with _lock:
        last = max((each.entries[-1].number for each in _busy if each.device == device), default=-1)
        mine = [each for each in _busy if each.device == device]
    wait_until(device, lambda: all(each.first() > last for each in mine))


def wait_until(device: int, condition: Callable[[], bool]) -> None:
    """Block this thread until the device thread has made a condition true."""
    if on_device_thread():
        raise RuntimeError("work in a stream may not wait for streams")
    with _lock:
        while True:
            check(device)
            if condition() or _stopped:
                return
            _something_done.wait()


def later(function: Callable[..., None], argument: object) -> None:
    """Call a function soon; for destructors."""
    _notes.append((function, argument))


def collect() -> None:
    """Do what destructors have left to do."""
    while _notes:
        try:
            function, argument = _notes.popleft()
        except IndexError:  # another thread was faster
            return
        function(argument)


def destroy_stream(pointer: object) -> None:
    """Forget a stream; it finishes what it has."""
    with _lock:
        _streams.pop(pointer, None)  # type: ignore[arg-type]


def free(holding: object) -> None:
    """Give memory back in the order of the stream that it was taken in.

    Work that was enqueued there before still has it. Work in another stream has it only if
    somebody keeps it alive, as with CuPy's pool, which would hand it out again at once.
    """
    block, stream = holding  # type: ignore[misc]
    _memory.release(block)
    _put(stream, Call("free", lambda: _free_now(block)))


def _free_now(block: _memory.Block) -> None:
    _memory.device_memory.free(block)
    check_guards(block)


def check_guards(block: _memory.Block) -> None:
    """Raise where a kernel has written beside a block."""
    if block.was_overrun():
        raise explained(
            CUDARuntimeError,
            700,
            f"bytes just outside of the {block.nbytes} at {block.pointer:#x} were written",
        )


# The device thread.


def _put(stream: Stream, work: Work) -> None:
    global _thread, _woken
    with _lock:
        stream.entries.append(_Entry(work))
        _busy.add(stream)
        if _thread is None:
            _thread = threading.Thread(target=_execute, name="double of a device", daemon=True)
            _thread.start()
        _woken = True
        _something_to_do.notify_all()


def _execute() -> None:
    global _woken
    generator = random.Random(_settings.SEED)
    while not _stopped:
        collect()
        with _lock:
            _woken = False
            heads = [(stream, stream.entries[0]) for stream in _in_order() if _may_run(stream)]
        now = time.monotonic()
        ready = [head for head in heads if head[1].started or head[1].ready_s <= now]
        generator.shuffle(ready)
        moved = False
        for stream, entry in ready:
            moved |= _advance(stream, entry)
        if moved:
            continue
        with _lock:
            if not _woken and not _stopped:
                _something_to_do.wait(_pause_s([entry for _, entry in heads]))


def _in_order() -> list[Stream]:
    return sorted(_busy, key=lambda stream: (stream.device, stream.pointer))


def _may_run(stream: Stream) -> bool:
    """Whether the rules of the default stream let a stream's first entry run."""
    first = stream.first()
    return all(first < other.first() for other in _busy if _wait_for_each_other(stream, other))


def _wait_for_each_other(one: Stream, other: Stream) -> bool:
    if one.device != other.device or one is other:
        return False
    return (one.pointer == 0 and other.waits_for_default) or (
        other.pointer == 0 and one.waits_for_default
    )


def _pause_s(entries: list[_Entry]) -> float | None:
    """How long nothing can move, unless somebody wakes the thread."""
    now = time.monotonic()
    pauses = [max(0.0, entry.ready_s - now) for entry in entries if not entry.started]
    if any(entry.started and entry.work.outside for entry in entries):
        pauses.append(POLL_S)
    return min(pauses, default=None)


def _advance(stream: Stream, entry: _Entry) -> bool:
    """Start or ask one piece of work; whether anything changed."""
    with _lock:
        if not stream.entries or stream.entries[0] is not entry:
            return False  # an error has emptied the stream
    begins = not entry.started
    try:
        if begins:
            entry.started = True
            entry.work.start()
        done = entry.work.poll()
    except BaseException as error:
        _fail(stream.device, entry.work, error)
        return True
    if done:
        with _lock:
            stream.entries.popleft()
            if not stream.entries:
                _busy.discard(stream)
            _something_done.notify_all()
    return begins or done


def _fail(device: int, work: Work, error: BaseException) -> None:
    """The device is of no use from now on, and what it had to do is dropped."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} [in: {work.label}]", *error.args[1:])
    with _lock:
        _errors.setdefault(device, error)
        for stream in [each for each in _busy if each.device == device]:
            for entry in stream.entries:
                if isinstance(entry.work, Marker):
                    entry.work.done = True  # streams of other devices may wait for it
            stream.entries.clear()
            _busy.discard(stream)
        _something_done.notify_all()


@atexit.register
def _stop() -> None:
    """Let the thread end before the interpreter goes away underneath it."""
    global _stopped
    with _lock:
        _stopped = True
        _something_to_do.notify_all()
        _something_done.notify_all()
    if _thread is not None:
        _thread.join(1.0)
