"""How many buckets the GPU has room for, beside all that the loop needs of its memory."""

import bisect

import torch

from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.layout import bucket_bytes
from superoffload.torch import cuda


class ResidentRoom:
    """Of the last buckets of an attachment. ``share``: of the GPU's memory that may be in use, by everybody."""

    def __init__(self, attachment: GpuAttachment, device: torch.device, share: float) -> None:
        self._attachment, self._device, self._share = attachment, device, share
        self._totals = [0]  # bytes of the last so many buckets
        layout = attachment.optimizer.layout
        for bucket in reversed(layout.buckets):
            self._totals.append(self._totals[-1] + bucket_bytes(layout, bucket))
        self._failed = cuda.FailedAllocations(device)
        self._peak = 0  # of what torch's allocator had, or wanted to have
        # Before, the model may have lain there.
        self._peak_before = cuda.peak_reserved_bytes(device)

    def was_lacking(self) -> bool:
        """Whether the loop has found no memory since it was last asked what fits."""
        return self._failed.bytes > 0

    def fitting(self, spare: float = 0.0) -> int:
        """How many buckets fit, with ``spare`` more of the GPU's memory left free. It takes some 0.1 ms."""
        self._note_peak()
        residents = self._totals[self._attachment.resident_buckets]
        growth = self._peak - cuda.reserved_bytes(self._device)
        others = cuda.used_bytes(self._device) - residents + max(0, growth)
        room = (self._share - spare) * cuda.total_bytes(self._device) - others
        return max(0, bisect.bisect_right(self._totals, room) - 1)

    def _note_peak(self) -> None:
        self._peak = max(self._peak, cuda.reserved_bytes(self._device) + self._failed.take())
        peak = cuda.peak_reserved_bytes(self._device)
        if peak > self._peak_before:
            self._peak = max(self._peak, peak)
