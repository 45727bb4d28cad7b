"""Kernels from source."""

from __future__ import annotations

from cupy import _compiler, _devices, _launch
from cupy.cuda.stream import get_current_stream


def _refuse(backend, translate_cucomplex, enable_cooperative_groups):
    if backend != "nvrtc" or translate_cucomplex or enable_cooperative_groups:
        raise NotImplementedError("the double compiles plain kernels by the backend nvrtc alone")


class RawKernel:
    code: str
    name: str
    options: tuple[str, ...]

    def __init__(
        self,
        code,
        name,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        *,
        enable_cooperative_groups=False,
    ):
        _refuse(backend, translate_cucomplex, enable_cooperative_groups)
        if not (isinstance(code, str) and isinstance(name, str) and isinstance(options, tuple)):
            raise TypeError("code and name must be str, and options a tuple")
        self.code = code
        self.name = name
        self.options = options
        self._compiled: _compiler.Kernel | None = None

    def __call__(self, grid, block, args, *, shared_mem=0):
        _launch.launch(self._kernel(), grid, block, args, shared_mem, get_current_stream().ptr)

    def compile(self):
        self._kernel()

    def _kernel(self) -> _compiler.Kernel:
        _devices.current()  # raises where there is no GPU
        if self._compiled is None:
            self._compiled = _compiler.kernel(self.code, self.options, self.name)
        return self._compiled


class RawModule:
    code: str
    options: tuple[str, ...]

    def __init__(
        self,
        *,
        code=None,
        path=None,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        enable_cooperative_groups=False,
        name_expressions=None,
    ):
        _refuse(backend, translate_cucomplex, enable_cooperative_groups)
        if path is not None or name_expressions is not None:
            raise NotImplementedError('the double takes source, and names of extern "C" kernels')
        if code is None:
            raise TypeError("`code` must be given")
        self.code = code
        self.options = options

    def get_function(self, name):
        kernel = RawKernel(self.code, name, self.options)
        kernel.compile()
        return kernel
