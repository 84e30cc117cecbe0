"""Host memory that a daemon lends, in pieces of whatever size: where what leaves a GPU lies until it comes back."""

import collections
import mmap
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from superoffload.torch import cuda

_LEAST = 64 << 20  # bytes that are asked for at once; then as many as there are already
_MOST = 8 << 30
_ALIGNMENT = 4096


class Piece(NamedTuple):
    chunk: int
    begin: int
    size: int


class LentMemory:
    """``lend`` gives more of it, or raises Error. Pieces may be given back in any thread. Copies are the device's."""

    def __init__(self, lend: Callable[[int], mmap.mmap], device: torch.device) -> None:
        self._lend, self._device = lend, device
        self._chunks: list[torch.Tensor] = []
        self._end = 0  # of what of the last chunk was ever taken
        self._free: dict[int, list[Piece]] = collections.defaultdict(list)  # by size
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(chunk.numel() for chunk in self._chunks)

    def take(self, size: int) -> Piece:
        """Raises Error where the daemon has no more."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            if not self._chunks or self._end + size > self._chunks[-1].numel():
                self._grow(size)
            self._end += size
            return Piece(len(self._chunks) - 1, self._end - size, size)

    def _grow(self, size: int) -> None:
        chunk = torch.frombuffer(self._lend(max(size, _LEAST, min(self.nbytes, _MOST))), dtype=torch.uint8)
        cuda.register_host(chunk)
        self._chunks.append(chunk)
        self._end = 0

    def give_back(self, piece: Piece) -> None:
        with self._lock:
            self._free[piece.size].append(piece)

    def view(self, piece: Piece, like: torch.Tensor) -> torch.Tensor:
        """The piece's bytes as those of ``like``, contiguous."""
        size = like.numel() * like.element_size()
        return self._chunks[piece.chunk][piece.begin : piece.begin + size].view(like.dtype).view(like.shape)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if self._chunks:
            cuda.synchronize(self._device)  # a copy may still be under way
        while self._chunks:
            cuda.unregister_host(self._chunks.pop())
