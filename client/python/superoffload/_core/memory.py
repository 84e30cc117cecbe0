"""Passes of the client library over many ranges of memory at once: copies with digests."""

import ctypes
from collections.abc import Sequence
from typing import Any

from superoffload._core import library, structures

Range = tuple[int, int | None, int]  # addresses from and to, bytes


def array(ranges: Sequence[Range]) -> ctypes.Array:
    """Returns them as the library takes them."""
    values: Sequence[Any] = ranges  # ctypes makes its structures of tuples
    return (structures.Range * len(ranges))(*values)


def copy_and_digest(ranges: Sequence[Range], threads: int) -> list[int]:
    """Digests of what is at ``from``, which is copied to ``to`` unless that is None."""
    digests = (ctypes.c_uint64 * len(ranges))()
    library.call("copy_and_digest", array(ranges), len(ranges), threads, digests)
    return list(digests)
