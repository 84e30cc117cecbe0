"""How much of a GPU's memory there is beside all that the loop needs of it."""

import torch

from superoffload.torch import cuda


class GpuRoom:
    """``share``: of the GPU's memory that may be in use, by everybody."""

    def __init__(self, device: torch.device, share: float) -> None:
        self._device, self._share = device, share
        self._failed = cuda.FailedAllocations(device)
        self._peak = 0  # of what torch's allocator had, or wanted to have
        # Before, the model may have lain there.
        self._peak_before = cuda.peak_reserved_bytes(device)

    def was_lacking(self) -> bool:
        """Whether the loop has found no memory since it was last asked what there is."""
        return self._failed.bytes > 0

    def for_us(self, ours: int, spare: float = 0.0) -> float:
        """Bytes that we may have, who have ``ours`` now, with ``spare`` more of the GPU's memory left free.

        It takes some 0.1 ms.
        """
        self._note_peak()
        growth = self._peak - cuda.reserved_bytes(self._device)
        others = cuda.used_bytes(self._device) - ours + max(0, growth)
        return (self._share - spare) * cuda.total_bytes(self._device) - others

    def _note_peak(self) -> None:
        self._peak = max(self._peak, cuda.reserved_bytes(self._device) + self._failed.take())
        peak = cuda.peak_reserved_bytes(self._device)
        if peak > self._peak_before:
            self._peak = max(self._peak, peak)
