"""Streams and events, and which stream each thread uses on each device."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref

from cupy import _devices, _engine, _settings
from cupy._errors import CUDARuntimeError, explained

_of_thread = threading.local()
_event_pointers = itertools.count(0x3800_0000_0000_0000, 0x100)


def _current() -> dict[int, _BaseStream]:
    if not hasattr(_of_thread, "streams"):
        _of_thread.streams = {}
        _of_thread.before = []
    return _of_thread.streams


def get_current_stream(device_id=-1):
    device = _devices.current() if device_id == -1 else _devices.check(device_id)
    return _current().get(device, Stream.null)


class Event:
    ptr: int

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        if interprocess and not disable_timing:
            raise ValueError("an event for several processes must have disable_timing=True")
        self.ptr = next(_event_pointers)
        self._device = _devices.current()
        self._timed = not disable_timing
        self._marker: _engine.Marker | None = None
        _events[self.ptr] = self

    def record(self, stream=None):
        _record(self, get_current_stream().ptr if stream is None else stream.ptr)

    @property
    def done(self):
        return self._query() == 0  # as in CuPy, where an error looks like work under way

    def _query(self):
        status = _engine.status(self._device)
        return status or (0 if self._marker is None or self._marker.done else 600)

    def synchronize(self):
        _engine.counters["eventSynchronize"] += 1
        marker = self._marker
        if marker is not None:
            _engine.wait_until(self._device, lambda: marker.done)


#: Events by what stands for them in the runtime.
_events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()


def _event_at(pointer: int) -> Event:
    """The event that the runtime is asked for."""
    if pointer not in _events:
        raise explained(CUDARuntimeError, 400, f"there is no event {pointer}")
    return _events[pointer]


def _record(event: Event, stream_ptr: int) -> None:
    if _engine.stream_of(stream_ptr).device != event._device:
        raise explained(CUDARuntimeError, 400, "event and stream are of different devices")
    marker = _engine.Marker()
    _engine.enqueue(stream_ptr, marker)
    event._marker = marker


def get_elapsed_time(start_event, end_event):
    """Milliseconds between two events that are done."""
    markers = (start_event._marker, end_event._marker)
    if None in markers or not (start_event._timed and end_event._timed):
        raise CUDARuntimeError(400)
    if not all(marker.done for marker in markers):
        raise CUDARuntimeError(600)
    return (markers[1].time_s - markers[0].time_s) * 1e3


class _BaseStream:
    ptr: int
    device_id: int

    def __init__(self, ptr, device_id):
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other):
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self):
        return self.ptr

    def __repr__(self):
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"

    def _check_device(self) -> int:
        device = _devices.current()
        if self.device_id not in (-1, device):
            raise RuntimeError(
                f"the stream is of device {self.device_id}, and the current device is {device}"
            )
        return device

    def __enter__(self):
        device = self._check_device()
        streams = _current()
        _of_thread.before.append((device, streams.get(device, Stream.null)))
        streams[device] = self
        return self

    def __exit__(self, *args):
        streams = _current()
        device, before = _of_thread.before.pop()
        streams[device] = before

    def use(self):
        device = self._check_device()
        _current()[device] = self
        return self

    @property
    def done(self):
        return _engine.is_done(self.ptr)

    def synchronize(self):
        _engine.counters["streamSynchronize"] += 1
        _engine.synchronize(self.ptr)

    def record(self, event=None):
        if event is None:
            event = Event()
        _record(event, self.ptr)
        return event

    def wait_event(self, event):
        marker = event._marker
        if marker is not None and not marker.done:
            _engine.enqueue(self.ptr, _engine.WaitFor(marker))
        else:  # never recorded, or past: no wait
            _engine.stream_of(self.ptr)


class Stream(_BaseStream):
    null = None

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        if ptds:
            raise NotImplementedError("the double has no per-thread default stream")
        if priority is not None and _settings.CUPY_VERSION.startswith("13."):
            raise TypeError("CuPy 13 has no argument 'priority'")
        if null:
            super().__init__(0, -1)
        else:
            device = _devices.current()
            super().__init__(_engine.make_stream(device, not non_blocking), device)

    def __del__(self):
        if getattr(self, "ptr", 0) != 0 and not hasattr(self, "_foreign"):
            _engine.later(_engine.destroy_stream, self.ptr)

    if not _settings.CUPY_VERSION.startswith("13."):

        @classmethod
        def from_external(cls, obj):
            version, pointer = obj.__cuda_stream__()
            if version != 0:
                raise TypeError(f"version {version} of the CUDA stream protocol")
            stream = cls.__new__(cls)
            _BaseStream.__init__(stream, int(pointer), -1)
            stream._foreign = obj
            return stream


Stream.null = Stream(null=True)


class ExternalStream(_BaseStream):
    def __init__(self, ptr, device_id=-1):
        if not _settings.CUPY_VERSION.startswith("13."):
            warnings.warn(
                "ExternalStream is deprecated since CuPy 14", DeprecationWarning, stacklevel=2
            )
        super().__init__(ptr, device_id)
