"""Gradients of a step's backward passes, each of which leaves the GPU by itself (``accumulate="daemon"``)."""

import collections
from collections.abc import Iterator, Sequence

import torch

from superoffload._core.attachment import Stays
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch import cuda
from superoffload.torch.guards import tombstone
from superoffload.torch.guards.tombstone import Tombstones
from superoffload.torch.ranks.shards import DATA_TYPES, HostedParameter


class Passes:
    """What passes of the open step have brought: their sums are in the daemon's memory.

    In ``.grad`` is then what has come last, until it has left, and a tombstone behind it. It makes way for the next
    pass's, so that autograd adds to nothing.
    """

    def __init__(self, attachment: GpuAttachment, hosted: Sequence[HostedParameter], tombstones: Tombstones) -> None:
        self._attachment, self._hosted, self._tombstones = attachment, hosted, tombstones
        self.reset()

    def reset(self) -> None:
        # By parameter: what has not left, the oldest first, with its version.
        self._pieces: dict[int, collections.deque[tuple[torch.Tensor, int]]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, index: int) -> bool:
        """Whether a pass has brought a gradient of the parameter."""
        return index in self._pieces

    def add(self, index: int) -> None:
        """``.grad`` is what a pass has brought."""
        gradient = self._hosted[index].gradient
        assert gradient is not None, "autograd has just accumulated it"
        pieces = self._pieces.setdefault(index, collections.deque())
        pieces.append((gradient.detach(), gradient._version))
        piece = (gradient.data_ptr(), 0, gradient.numel(), index, DATA_TYPES[gradient.dtype])
        stream = cuda.current_stream(self._hosted[index].tensor)
        for left in self._attachment.hand_over_on_gpu(piece, stream, Stays.UNTIL_PACKED, more_follow=True):
            self._on_left(left)

    def _on_left(self, index: int) -> None:
        piece, _ = self._pieces[index].popleft()
        cuda.keep_for_stream(piece, self._attachment.pack_stream())
        tensor = self._hosted[index].tensor
        if tensor.grad is not None and tensor.grad.data_ptr() == piece.data_ptr():
            tensor.grad = self._tombstones.instead_of(tensor.grad)

    def make_way(self, index: int) -> None:
        """Another pass is about to bring a gradient. Raises Error where the loop has set it, or written to it."""
        self.check(index)
        self._hosted[index].tensor.grad = None

    def check(self, index: int) -> None:
        """Raises Error where ``.grad`` is not what the passes have left of it."""
        gradient = self._hosted[index].tensor.grad
        if self._tombstones.is_one(gradient):
            return
        pieces = self._pieces[index]
        if gradient is None or not pieces or gradient.data_ptr() != pieces[-1][0].data_ptr():
            raise tombstone.was_set(self._hosted[index].name)
        if gradient._version != pieces[-1][1]:
            raise tombstone.was_written()

    def bury(self, index: int) -> None:
        """What is in ``.grad`` is not the sum, which the loop may look for there."""
        tensor = self._hosted[index].tensor
        if tensor.grad is not None and not self._tombstones.is_one(tensor.grad):
            cuda.keep_for_stream(tensor.grad, self._attachment.pack_stream())
            tensor.grad = self._tombstones.instead_of(tensor.grad)
