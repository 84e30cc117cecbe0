"""Weights on a GPU that stream and never change, from memory of this process (superoffload_gpu.h)."""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence

from superoffload._core import library
from superoffload._core.gpu_attachment import Streamed

_PAGE = 4096


class FrozenUnits:
    """Units of ``sizes`` bytes, counted from 1, that take turns at ``slots`` of a GPU's memory.

    ``host`` is where they come from: unit by unit, each from its one of ``offsets`` on. It must not change while a unit
    is read. Streams are integers.
    """

    staying: frozenset[int] = frozenset()
    slot_changes = 0  # counts what may have changed which units are in their slots
    report = ""  # how many stay, and why

    def __init__(self, sizes: Sequence[int], slots: int) -> None:
        self.streamed = Streamed(frozenset(range(1, 1 + len(sizes))), slots)
        self._sizes = (ctypes.c_uint64 * len(sizes))(*sizes)
        self.offsets, end = [], 0
        for size in sizes:
            self.offsets.append(end)
            end += -(-size // _PAGE) * _PAGE
        self.host = mmap.mmap(-1, end)
        self.host.madvise(mmap.MADV_HUGEPAGE)
        self._handle = ctypes.c_void_p()
        self.addresses: list[int] = []
        self.slot_bytes = 0

    def open(self, ordinal: int) -> None:
        """There is GPU memory for the slots, and units have addresses. RESOURCE_EXHAUSTED when the GPU has none."""
        addresses, slot_bytes = (ctypes.c_uint64 * len(self._sizes))(), ctypes.c_uint64()
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.host))
        library.call(
            "frozen_open",
            ordinal,
            base,
            len(self.host),
            self._sizes,
            len(self._sizes),
            self.streamed.slots,
            ctypes.byref(self._handle),
            addresses,
            ctypes.byref(slot_bytes),
        )
        self.addresses, self.slot_bytes = list(addresses), slot_bytes.value

    def read_unit(self, unit: int, stream: int) -> None:
        """Has ``stream`` wait for a unit: it is in its slot until another one is read."""
        self.slot_changes += 1
        library.call("frozen_read", self._handle, unit - 1, stream)

    def has_unit(self, unit: int) -> bool:
        has = ctypes.c_uint32()
        library.call("frozen_has", self._handle, unit - 1, ctypes.byref(has))
        return bool(has.value)

    def keep_units(self, units: Iterable[int]) -> None:
        """Which units have a slot for themselves from now on; also: what ``host`` has now is read from now on."""
        chosen = frozenset(units)
        self.slot_changes += 1
        given = (ctypes.c_uint32 * len(chosen))(*(unit - 1 for unit in sorted(chosen)))
        library.call("frozen_keep", self._handle, given, len(chosen))
        self.staying = chosen

    def note_weights(self, text: str) -> None:
        self.report = text

    def close(self) -> None:
        handle, self._handle = self._handle, ctypes.c_void_p()
        library.function("frozen_close")(handle)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()
