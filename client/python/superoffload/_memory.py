"""Passes of the client library over many runs of memory at once: copies with digests, and comparisons."""

import ctypes
from collections.abc import Sequence

from superoffload import _library

Run = tuple[int, int | None, int]  # addresses from and to, bytes


def _array(runs: Sequence[Run]) -> ctypes.Array:
    return (_library.Run * len(runs))(*runs)


def copy_and_digest(runs: Sequence[Run], threads: int) -> list[int]:
    """Digests of what is at ``from``, which is copied to ``to`` unless that is None."""
    digests = (ctypes.c_uint64 * len(runs))()
    _library.call("copy_and_digest", _array(runs), len(runs), threads, digests)
    return list(digests)


def find_difference(runs: Sequence[Run], threads: int, every_bytes: int = 0, random: int = 0) -> int | None:
    """Index of a run whose two sides differ, if any; ``every_bytes``: compares a sample of each, else all."""
    found = ctypes.c_uint32()
    _library.call("find_difference", _array(runs), len(runs), threads, every_bytes, random, ctypes.byref(found))
    return None if found.value == len(runs) else found.value
