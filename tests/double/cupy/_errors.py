"""The errors of CUDA and of CuPy."""

from __future__ import annotations

_RUNTIME = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    21: ("cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"),
    100: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    600: ("cudaErrorNotReady", "device not ready"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    716: ("cudaErrorMisalignedAddress", "misaligned address"),
    719: ("cudaErrorLaunchFailure", "unspecified launch failure"),
}
_DRIVER = {
    1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    400: ("CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"),
    500: ("CUDA_ERROR_NOT_FOUND", "named symbol not found"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
}


class CUDARuntimeError(RuntimeError):
    """What calls of the CUDA runtime raise."""

    def __init__(self, status):
        self.status = status
        super().__init__("{}: {}".format(*_RUNTIME.get(status, ("cudaErrorUnknown", "unknown"))))


class CUDADriverError(RuntimeError):
    """What launches raise: CuPy makes them by the driver's interface."""

    def __init__(self, status):
        self.status = status
        super().__init__("{}: {}".format(*_DRIVER[status]))


class OutOfMemoryError(MemoryError):
    """A device has no room left."""

    def __init__(self, size, total, limit=0):
        text = f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes"
        super().__init__(f"{text}, limit set to: {limit:,} bytes)." if limit else f"{text}).")


def explained(kind, status: int, text: str):
    """An error with a status of CUDA that also says what the double has found."""
    error = kind(status)
    error.args = (f"{error.args[0]} ({text})",)
    return error
