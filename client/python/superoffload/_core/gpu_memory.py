"""Memory of a GPU that trainer and daemon share, as Python's views hold it (superoffload_gpu.h)."""

import collections
import contextlib
import ctypes
import sys
from collections.abc import Callable

from superoffload._core import library, structures

_UNITS = -1  # a piece that stands for all memory of units that stream

# Of which the last view went while the thread's stream was being captured; they keep their memories alive.
_postponed: "collections.deque[tuple[GpuMemory, range]]" = collections.deque()


class GpuMemory:
    """Addresses in GPU memory, with memory behind them as far as it was asked for; views keep it alive.

    Once nobody but views needs it, a piece in which no view lies gives its memory back, now and whenever a view goes.
    As with any tensor, that waits for the thread's current stream, and another stream that uses the view is for the
    caller to wait for. What a stream that is being captured has left goes back with the next that goes.
    """

    def __init__(
        self,
        trainer: int,
        attachment: ctypes.c_void_p,
        options: structures.GpuOptions,
        current_stream: Callable[[], int],
    ) -> None:
        self.handle = ctypes.c_void_p()
        self._current_stream = current_stream
        address = ctypes.c_uint64()
        reserved = ctypes.byref(self.handle), ctypes.byref(address)
        library.call("gpu_reserve", trainer, attachment, ctypes.byref(options), *reserved)
        self.address = address.value
        self.piece_bytes = self.backed_bytes = 0
        self._held: dict[int, set[int]] = {}  # by piece: what holds it
        self._left = False
        self.back(0)

    def back(self, end: int) -> None:
        """Has memory for what lies before ``end``, in whole pieces; RESOURCE_EXHAUSTED when the GPU has no more."""
        piece_bytes, backed_bytes = ctypes.c_uint64(), ctypes.c_uint64()
        library.call("gpu_back", self.handle, end, ctypes.byref(piece_bytes), ctypes.byref(backed_bytes))
        self.piece_bytes, self.backed_bytes = piece_bytes.value, backed_bytes.value

    def back_units(self, slots: int) -> None:
        """Has memory for what streams: so many units at once."""
        library.call("gpu_back_units", self.handle, slots)

    def hold(self, begin: int, end: int) -> "Hold":
        """What a view of these bytes keeps alive."""
        return self._hold(range(begin // self.piece_bytes, (end - 1) // self.piece_bytes + 1))

    def hold_units(self) -> "Hold":
        """What a view of something that streams keeps alive."""
        return self._hold(range(_UNITS, _UNITS + 1))

    def _hold(self, pieces: range) -> "Hold":
        hold = Hold(self, pieces)
        for piece in pieces:
            self._held.setdefault(piece, set()).add(id(hold))
        return hold

    def leave_to_views(self) -> None:
        """Attachments have ended: from now on only views need it."""
        self._left = True
        self.back(0)  # the attachment has backed the rest
        self._give_back(range(_UNITS, -(-self.backed_bytes // self.piece_bytes)))

    def let_go(self, hold: "Hold") -> None:
        for piece in hold.pieces:
            self._held[piece].discard(id(hold))
        if self._left:
            self._give_back(hold.pieces)

    def _give_back(self, pieces: range) -> None:
        due = [(self, pieces)]
        with contextlib.suppress(IndexError):  # several threads may take them
            while True:
                due.append(_postponed.popleft())
        for memory, pieces in due:
            if memory.handle and not memory._gave_back(pieces):
                _postponed.append((memory, pieces))

    def _gave_back(self, pieces: range) -> bool:
        stream = self._current_stream()
        unused = [piece for piece in pieces if not self._held.get(piece)]
        return all(self._gave_piece_back(piece, stream) for piece in unused)

    def _gave_piece_back(self, piece: int, stream: int) -> bool:
        if piece == _UNITS:
            return library.function("gpu_give_units_back")(self.handle, stream) == 0
        return library.function("gpu_give_back")(self.handle, piece, stream) == 0

    def __del__(self) -> None:
        if not sys.is_finalizing():
            # Python finalizes what refers to each other in any order: a hold may still let go.
            handle, self.handle = getattr(self, "handle", None), ctypes.c_void_p()
            library.function("gpu_release")(handle)


class Hold:
    """Keeps pieces of a `GpuMemory`. Its end may come in any thread."""

    def __init__(self, memory: GpuMemory, pieces: range) -> None:
        self._memory, self.pieces = memory, pieces

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():
            self._memory.let_go(self)
