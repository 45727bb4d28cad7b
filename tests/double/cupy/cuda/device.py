"""Devices."""

from __future__ import annotations

from cupy import _devices
from cupy.cuda import runtime


class Device:
    id: int

    def __init__(self, device=None):
        self.id = _devices.current() if device is None else int(device)

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self):
        return hash(self.id)

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    def __enter__(self):
        _devices.push(self.id)
        return self

    def __exit__(self, *args):
        _devices.pop()

    def use(self):
        _devices.make_current(self.id)
        return self

    def synchronize(self):
        with self:
            runtime.deviceSynchronize()

    @property
    def mem_info(self):
        with self:
            return runtime.memGetInfo()

    @property
    def attributes(self):
        properties = runtime.getDeviceProperties(self.id)
        return {
            "ComputeCapabilityMajor": properties["major"],
            "ComputeCapabilityMinor": properties["minor"],
            "MaxThreadsPerBlock": 1024,
            "MultiProcessorCount": properties["multiProcessorCount"],
            "PageableMemoryAccess": 0,
            "UnifiedAddressing": 1,
            "WarpSize": 32,
        }

    @property
    def pci_bus_id(self):
        return runtime.deviceGetPCIBusId(self.id)

    @property
    def compute_capability(self):
        properties = runtime.getDeviceProperties(self.id)
        return f"{properties['major']}{properties['minor']}"


def get_device_id():
    return _devices.current()
