"""libsuperoffload.so (superoffload.h, superoffload_gpu.h) through ctypes."""

import ctypes
import functools
import os

import grpc

from superoffload._core import programs, structures
from superoffload._core.error import Error, from_number

_ENVIRONMENT = "SUPEROFFLOAD_LIBRARY"
_FILE = "libsuperoffload.so.0"

_P, _D, _U32, _U64, _I64 = ctypes.c_void_p, ctypes.c_double, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64

# name -> (result, arguments); int results are status codes.
_FUNCTIONS = {
    "last_error": (ctypes.c_char_p, []),
    "size_of": (ctypes.c_size_t, [ctypes.c_char_p]),
    "connect": (ctypes.c_int, [ctypes.c_char_p, ctypes.POINTER(_P), ctypes.c_char_p]),
    "disconnect": (None, [_P]),
    "attach": (ctypes.c_int, [_P, _U64, _U64, _U32, ctypes.POINTER(_P)]),
    "detach": (None, [_P]),
    "memory": (ctypes.c_int, [_P, _U32, ctypes.POINTER(_P), ctypes.POINTER(ctypes.c_size_t)]),
    "open_trainer": (ctypes.c_int, [ctypes.POINTER(structures.TrainerOptions), ctypes.POINTER(_I64)]),
    "close_trainer": (None, [_I64]),
    "use_attachment": (ctypes.c_int, [_I64, _P, _U32, _U64, _U32, ctypes.POINTER(_U32)]),
    "set_scalars": (ctypes.c_int, [_I64, _U32, ctypes.POINTER(_D), _U32]),
    "hand_over": (ctypes.c_int, [_I64, ctypes.POINTER(structures.Gradients)]),
    "find_edited": (ctypes.c_int, [_I64, ctypes.POINTER(structures.Piece), _U32, ctypes.POINTER(_U32)]),
    "end": (ctypes.c_int, [_I64, ctypes.POINTER(structures.StepEnd)]),
    "wait": (ctypes.c_int, [_I64, ctypes.POINTER(structures.Awaited), _I64, ctypes.POINTER(structures.Answer)]),
    "receive": (
        ctypes.c_int,
        [_I64, ctypes.POINTER(structures.Range), _I64, ctypes.POINTER(_U64), ctypes.POINTER(ctypes.c_uint8)],
    ),
    "look": (ctypes.c_int, [_I64, ctypes.POINTER(structures.OpenStep), ctypes.POINTER(_U64)]),
    "agree": (ctypes.c_int, [ctypes.POINTER(structures.RunReport), _U32, _U32, ctypes.POINTER(structures.RunDecision)]),
    "copy_and_digest": (ctypes.c_int, [ctypes.POINTER(structures.Range), _U32, _U32, ctypes.POINTER(_U64)]),
    "gpu_attach": (
        ctypes.c_int,
        [_I64, _P, ctypes.POINTER(structures.GpuOptions), ctypes.POINTER(structures.GpuReport)],
    ),
    "gpu_reserve": (
        ctypes.c_int,
        [_I64, _P, ctypes.POINTER(structures.GpuOptions), ctypes.POINTER(_P), ctypes.POINTER(_U64)],
    ),
    "gpu_back": (ctypes.c_int, [_P, _U64, ctypes.POINTER(_U64), ctypes.POINTER(_U64)]),
    "gpu_give_back": (ctypes.c_int, [_P, _U64, _U64]),
    "gpu_back_units": (ctypes.c_int, [_P, _U32]),
    "gpu_give_units_back": (ctypes.c_int, [_P, _U64]),
    "gpu_release": (None, [_P]),
    "gpu_measure_cast": (ctypes.c_int, [ctypes.c_int32, _U32, _U64, ctypes.POINTER(_D), ctypes.POINTER(_D)]),
    "gpu_copy": (ctypes.c_int, [_P, _U32, _U64]),
    "gpu_lay_out": (
        ctypes.c_int,
        [ctypes.POINTER(structures.Bucket), _U32, _U32, ctypes.POINTER(_U64), ctypes.POINTER(_U64)],
    ),
    "gpu_read_unit": (ctypes.c_int, [_P, _U32, _U64]),
    "gpu_has_unit": (ctypes.c_int, [_P, _U32, ctypes.POINTER(_U32)]),
    "gpu_keep_units": (ctypes.c_int, [_P, ctypes.POINTER(_U32), _U32]),
    "lent_memory": (ctypes.c_int, [_P, _U64, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_size_t)]),
    "gpu_suspend": (ctypes.c_int, [_P]),
    "gpu_resume": (ctypes.c_int, [_P]),
    "frozen_open": (
        ctypes.c_int,
        [ctypes.c_int32, _P, _U64, ctypes.POINTER(_U64), _U32, _U32, ctypes.POINTER(_P), ctypes.POINTER(_U64)]
        + [ctypes.POINTER(_U64)],
    ),
    "frozen_read": (ctypes.c_int, [_P, _U32, _U64]),
    "frozen_has": (ctypes.c_int, [_P, _U32, ctypes.POINTER(_U32)]),
    "frozen_keep": (ctypes.c_int, [_P, ctypes.POINTER(_U32), _U32]),
    "frozen_close": (None, [_P]),
    "gpu_end_landings": (ctypes.c_int, [_P]),
    "gpu_set_resident": (ctypes.c_int, [_P, _U32]),
    "gpu_resident_masters": (ctypes.c_int, [_P, _U32, ctypes.POINTER(_U64)]),
    "xla_handler": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_P)]),
}


@functools.cache
def _library() -> ctypes.CDLL:
    path = os.environ.get(_ENVIRONMENT) or programs.installed("lib", _FILE) or _FILE
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise Error(
            grpc.StatusCode.UNAVAILABLE,
            f"cannot load {path}: {error}; install superoffloadd or point ${_ENVIRONMENT} at its client library",
        ) from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"superoffload_{name}", None)
        if function is None:
            raise _other_version(path, f"it has no superoffload_{name}")
        function.restype, function.argtypes = result, arguments
    for name, structure in structures.BY_NAME.items():
        size = library.superoffload_size_of(name.encode())
        if size != ctypes.sizeof(structure):
            raise _other_version(path, f"its {name} has {size} bytes, ours {ctypes.sizeof(structure)}")
    return library


def _other_version(path: str, difference: str) -> Error:
    return Error(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"{path} is of another version than this package: {difference}; install superoffloadd and the package of one "
        f"version, or point ${_ENVIRONMENT} at its client library",
    )


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
