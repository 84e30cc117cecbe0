"""Has superoffload.jax take the CPU's arrays for a GPU's, whose driver is the fake one.

XLA computes on the CPU, and its memory stands for GPU memory; the handlers that it calls are those for the GPU, on the
driver's default stream, which is the calling thread. Everything but superoffload.jax.cuda, and which platform handlers
are registered for, is what runs on a GPU.
"""

import ctypes
import functools
import os
import pathlib

import jax
import pytest

from superoffload.jax import cuda, ffi

_SUPPORT = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "tests" / "support"
DRIVER = _SUPPORT / "fake-cuda" / "libcuda.so.1"
_PREFIX = "superoffload_on_fake_gpu_"


@functools.cache
def _register() -> None:
    as_cpu = ctypes.CDLL(_SUPPORT / "libsuperoffload_fake_xla_gpu.so").fakeXlaGpuHandler
    as_cpu.restype, as_cpu.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    for name in ffi._TARGETS["CUDA"]:
        target = jax.ffi.pycapsule(as_cpu(ffi._handler(name, "cuda")))
        jax.ffi.register_ffi_target(_PREFIX + name, target, platform="cpu")


def used_bytes() -> int:
    """Of the fake GPU's memory."""
    function = ctypes.CDLL(DRIVER).fakeCudaUsedBytes
    function.restype = ctypes.c_size_t
    return function()


_OURS = {(cuda, "is_on_gpu"), (cuda, "ordinal"), (ffi, "_register"), (ffi, "_PREFIX")}
_REAL = {place: getattr(*place) for place in _OURS}


def uninstall(patch: pytest.MonkeyPatch) -> None:
    """Arrays are the CPU's until `patch` is undone."""
    for (module, name), value in _REAL.items():
        patch.setattr(module, name, value)


def install(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone."""
    ctypes.CDLL(DRIVER, mode=ctypes.RTLD_GLOBAL)  # found by its name when the client library asks for the driver
    patch.setenv("LD_LIBRARY_PATH", str(DRIVER.parent))  # of daemons
    patch.setenv("FAKE_CUDA_DELAY", "300")
    patch.setenv("FAKE_CUDA_HOST_IS_GPU", "1")
    patch.setenv("FAKE_CUDA_NO_THREADS", "1")
    patch.setattr(cuda, "is_on_gpu", lambda sharding: True)
    patch.setattr(cuda, "ordinal", lambda device: 0)
    patch.setattr(ffi, "_register", _register)
    patch.setattr(ffi, "_PREFIX", _PREFIX)
