"""The part of the CUDA runtime that the double has. Calls of interest are counted."""

from __future__ import annotations

from cupy import _copies, _devices, _engine, _memory, _settings
from cupy._errors import CUDARuntimeError

__all__ = ["CUDARuntimeError"]  # which is ours by its home, and CuPy's by its name

memcpyHostToHost = 0
memcpyHostToDevice = 1
memcpyDeviceToHost = 2
memcpyDeviceToDevice = 3
memcpyDefault = 4

memoryTypeUnregistered = 0
memoryTypeHost = 1
memoryTypeDevice = 2

streamLegacy = 1


class PointerAttributes:
    def __init__(self, device, devicePointer, hostPointer, type=-1):
        self.device = device
        self.devicePointer = devicePointer
        self.hostPointer = hostPointer
        self.type = type


def getDeviceCount():
    return _devices.count()


def getDevice():
    return _devices.current()


def setDevice(device):
    _devices.make_current(device)


def runtimeGetVersion():
    return 12090


def driverGetVersion():
    return 12090 if _settings.DEVICES else 0


def deviceGetPCIBusId(device):
    return f"{_settings.PCI_DOMAIN:04X}:{_devices.check(device) + 0x3B:02X}:00.0"


def getDeviceProperties(device):
    _devices.check(device)
    return {
        "name": b"Double of a GPU",
        "totalGlobalMem": _settings.MEMORY_NBYTES,
        "major": 8,
        "minor": 0,
        "multiProcessorCount": 4,
    }


def memGetInfo():
    total = _settings.MEMORY_NBYTES
    return total - _engine.allocated_nbytes(_devices.current()), total


def pointerGetAttributes(ptr):
    device = _devices.current()
    _engine.collect()
    block = _memory.device_memory.find(ptr)
    if block is not None and not block.released:
        return PointerAttributes(block.device, ptr, 0, memoryTypeDevice)
    if _memory.pinned_memory.find(ptr) is not None:
        return PointerAttributes(device, ptr, ptr, memoryTypeHost)
    return PointerAttributes(-2, 0, 0, memoryTypeUnregistered)


def memcpyAsync(dst, src, size, kind, stream):
    _engine.counters["memcpyAsync"] += 1
    _copies.copy(dst, src, size, kind, stream)


def memcpy(dst, src, size, kind):
    _engine.counters["memcpy"] += 1
    _copies.copy(dst, src, size, kind, 0)
    _engine.synchronize(0)


def memsetAsync(ptr, value, size, stream):
    _engine.counters["memsetAsync"] += 1
    _copies.fill(ptr, value, size, stream)


def eventRecord(event, stream):
    from cupy.cuda import stream as streams  # which imports this module

    streams._record(streams._event_at(event), stream)


def eventQuery(event):
    from cupy.cuda import stream as streams

    return streams._event_at(event)._query()


def streamSynchronize(stream):
    _engine.counters["streamSynchronize"] += 1
    _engine.synchronize(stream)


def deviceSynchronize():
    _engine.counters["deviceSynchronize"] += 1
    _engine.synchronize_device(_devices.current())
