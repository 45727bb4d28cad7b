"""What the environment asks of the double; read once, at import."""

from __future__ import annotations

import os

#: Added to an address of the host to make a device pointer. The sum is an address that no x86-64 or
#: ARM processor accepts, so host code, NumPy or MPI that follows it dies at once. With
#: DOUBLE_CUDA_AWARE=1 nothing is added: so looks an MPI that understands device pointers.
OFFSET = 0 if os.environ.get("DOUBLE_CUDA_AWARE") == "1" else 0x2000_0000_0000_0000

#: Number of devices; 0 is a machine without a GPU.
DEVICES = int(os.environ.get("DOUBLE_DEVICES", "1"))

#: Memory of each device.
MEMORY_NBYTES = int(os.environ.get("DOUBLE_MEMORY_NBYTES", str(1 << 30)))

#: Work starts only this long after it was put into its stream, so who forgets to wait loses.
DELAY_S = float(os.environ.get("DOUBLE_DELAY_S", "0.0003"))

#: Draws the order in which streams and the blocks of kernels run.
SEED = int(os.environ.get("DOUBLE_SEED", "0"))

#: The CuPy that is doubled.
CUPY_VERSION = os.environ.get("DOUBLE_CUPY_VERSION", "14.2.0")

#: A folder of compiled kernels that the ranks of a run share; empty: one of this process alone.
CACHE = os.environ.get("DOUBLE_CACHE", "")

#: PCI domain of the devices: ranks whose devices are to be different GPUs set different ones.
PCI_DOMAIN = int(os.environ.get("DOUBLE_PCI_DOMAIN", "0"))
