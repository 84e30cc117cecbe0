"""libsuperoffload.so (superoffload.h, superoffload_gpu.h) through ctypes."""

import ctypes
import functools
import os
import pathlib
import sys

import grpc

from superoffload._error import Error, from_number

INTERNAL = grpc.StatusCode.INTERNAL.value[0]
_ENVIRONMENT = "SUPEROFFLOAD_LIBRARY"
_FILE = "libsuperoffload.so.0"


class Verdict(ctypes.Structure):
    """superoffload_verdict."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("speculated_buckets", ctypes.c_uint32),
        ("republished_buckets", ctypes.c_uint32),
        ("next_slot", ctypes.c_uint32),
        ("consecutive_skips", ctypes.c_uint32),
        ("step", ctypes.c_uint64),
        ("committed_steps", ctypes.c_uint64),
        ("global_norm", ctypes.c_double),
        ("clip_coefficient", ctypes.c_double),
    ]


class Bucket(ctypes.Structure):
    """superoffload_bucket."""

    _fields_ = [
        ("elements", ctypes.c_uint64),
        ("parameters_offset", ctypes.c_uint64),
        ("gradient_offsets", ctypes.c_uint64 * 2),
        ("state_offset", ctypes.c_uint64),
        ("dtype", ctypes.c_uint32),
        ("gradient_dtype", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Group(ctypes.Structure):
    """superoffload_group."""

    _fields_ = [(name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")]


class GpuOptions(ctypes.Structure):
    """superoffload_gpu_options."""

    _fields_ = [
        ("ordinal", ctypes.c_int32),
        ("mover", ctypes.c_uint32),
        ("sharing", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("max_bucket_tensors", ctypes.c_uint32),
        ("next_slot", ctypes.c_uint32),
        ("algorithm", ctypes.c_uint32),
        ("bucket_count", ctypes.c_uint32),
        ("group_count", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("buckets", ctypes.POINTER(Bucket)),
        ("groups", ctypes.POINTER(Group)),
        ("state_offsets", ctypes.c_uint64 * 3),
        ("previous", ctypes.c_void_p),
    ]


class GpuReport(ctypes.Structure):
    """superoffload_gpu_report."""

    _fields_ = [
        ("mover", ctypes.c_uint32),
        ("sharing", ctypes.c_uint32),
        ("coherent", ctypes.c_uint32),
        ("staged", ctypes.c_uint32),
        ("seconds", ctypes.c_double * 4),
        ("gpu_bytes", ctypes.c_uint64),
        ("gpu", ctypes.c_char * 64),
        ("notes", ctypes.c_char * 512),
    ]


class Tensor(ctypes.Structure):
    """superoffload_tensor."""

    _fields_ = [("data", ctypes.c_uint64), ("first", ctypes.c_uint64), ("elements", ctypes.c_uint64)]


class Run(ctypes.Structure):
    """superoffload_run."""

    _fields_ = [("origin", ctypes.c_void_p), ("to", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


_P, _D, _U32, _U64, _I64 = ctypes.c_void_p, ctypes.c_double, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64
_SIZE_OUT = ctypes.POINTER(ctypes.c_size_t)

# name -> (result, arguments); int results are status codes.
_FUNCTIONS = {
    "version": (ctypes.c_char_p, []),
    "last_error": (ctypes.c_char_p, []),
    "connect": (ctypes.c_int, [ctypes.c_char_p, ctypes.POINTER(_P)]),
    "token": (ctypes.c_char_p, [_P]),
    "disconnect": (None, [_P]),
    "attach": (ctypes.c_int, [_P, _U64, _U64, _U32, ctypes.POINTER(_P)]),
    "detach": (None, [_P]),
    "parameters": (_P, [_P, _SIZE_OUT]),
    "gradients": (_P, [_P, _SIZE_OUT]),
    "state": (_P, [_P, _SIZE_OUT]),
    "set_group": (ctypes.c_int, [_P, _U32, _D, _D, _D, _D, _D]),
    "begin_step": (ctypes.c_int, [_P, _D]),
    "gradient_ready": (ctypes.c_int, [_P, _U32]),
    "measure_norm": (ctypes.c_int, [_P, _D]),
    "end_step": (ctypes.c_int, [_P, _D, _D]),
    "abandon_step": (ctypes.c_int, [_P]),
    "wait_norm": (ctypes.c_int, [_P, _I64, ctypes.POINTER(_D)]),
    "wait_verdict": (ctypes.c_int, [_P, _I64, ctypes.POINTER(Verdict)]),
    "wait_parameters": (ctypes.c_int, [_P, _U32, _I64]),
    "wait_step": (ctypes.c_int, [_P, _I64, ctypes.POINTER(Verdict)]),
    "copy_and_digest": (ctypes.c_int, [ctypes.POINTER(Run), _U32, _U32, ctypes.POINTER(_U64)]),
    "find_difference": (
        ctypes.c_int,
        [ctypes.POINTER(Run), _U32, _U32, _U32, _U32, ctypes.POINTER(_U32)],
    ),
    "gpu_attach": (ctypes.c_int, [_P, ctypes.POINTER(GpuOptions), ctypes.POINTER(GpuReport)]),
    "gpu_measure_cast": (ctypes.c_int, [ctypes.c_int32, _U32, _U64, ctypes.POINTER(_D), ctypes.POINTER(_D)]),
    "gpu_parameters": (_U64, [_P]),
    "gpu_stream": (_U64, [_P]),
    "gpu_pull": (ctypes.c_int, [_P]),
    "gpu_push": (ctypes.c_int, [_P, _U64]),
    "gpu_gradient_ready": (ctypes.c_int, [_P, _U32, ctypes.POINTER(Tensor), _U32, _U32, _U64]),
    "gpu_pack_after": (ctypes.c_int, [_P, _U64]),
    "gpu_await_parameters": (ctypes.c_int, [_P, _U32, _I64, _U64]),
    "gpu_set_resident": (ctypes.c_int, [_P, _U32]),
    "gpu_stall": (_D, [_P]),
}


@functools.cache
def _library() -> ctypes.CDLL:
    installed = pathlib.Path(sys.prefix) / "lib" / _FILE
    path = os.environ.get(_ENVIRONMENT) or (str(installed) if installed.exists() else _FILE)
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise Error(
            grpc.StatusCode.UNAVAILABLE,
            f"cannot load {path}: {error}; install superoffloadd or point ${_ENVIRONMENT} at its client library",
        ) from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"superoffload_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def load() -> None:
    """Raises Error when there is none."""
    _library()


def function(name: str):
    """superoffload_<name>, for the hot path."""
    return getattr(_library(), f"superoffload_{name}")


def check(code: int) -> None:
    """Raises Error when a status code is not OK."""
    if code:
        raise from_number(code, function("last_error")().decode())


def call(name: str, *arguments) -> None:
    check(function(name)(*arguments))
