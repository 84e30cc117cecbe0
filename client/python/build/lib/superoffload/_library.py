"""libsuperoffload.so (superoffload.h) through ctypes."""

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


def function(name: str):
    """superoffload_<name>, for the hot path."""
    return getattr(_library(), f"superoffload_{name}")


def check(code: int) -> None:
    """Raises Error when a status code is not OK."""
    if code:
        raise from_number(code, function("last_error")().decode())


def call(name: str, *arguments) -> None:
    check(function(name)(*arguments))
