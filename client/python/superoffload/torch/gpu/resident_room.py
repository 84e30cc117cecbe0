"""How many buckets the GPU has room for, beside all that the loop needs of its memory."""

import bisect

import torch

from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.layout import bucket_bytes
from superoffload.torch.gpu.room import GpuRoom


class ResidentRoom:
    """Of the last buckets of an attachment. ``share``: of the GPU's memory that may be in use, by everybody."""

    def __init__(self, attachment: GpuAttachment, device: torch.device, share: float) -> None:
        self._attachment = attachment
        self._room = GpuRoom(device, share)
        self._totals = [0]  # bytes of the last so many buckets
        layout = attachment.optimizer.layout
        for bucket in reversed(layout.buckets):
            self._totals.append(self._totals[-1] + bucket_bytes(layout, bucket))

    def was_lacking(self) -> bool:
        """Whether the loop has found no memory since it was last asked what fits."""
        return self._room.was_lacking()

    def fitting(self, spare: float = 0.0) -> int:
        """How many buckets fit, with ``spare`` more of the GPU's memory left free."""
        room = self._room.for_us(self._totals[self._attachment.resident_buckets], spare)
        return max(0, bisect.bisect_right(self._totals, room) - 1)
