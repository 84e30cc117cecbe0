"""Finds parameters on a GPU that were written behind torch's back (``.data``, collectives).

Two bytes in every 16 KiB of every parameter that stays there, and of each shorter one, are compared with the published
parameters, which lie in the CPU's memory, or with masters where these know better.
"""

import random
from collections.abc import Callable

import torch

from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch import cuda
from superoffload.torch.ranks.shards import HostedParameter

_CANARY_BYTES = 2  # no parameter's element is shorter
_CANARY_EVERY = (16 << 10) // _CANARY_BYTES


class Canaries:
    """Places in the parameters of one attachment; they are drawn when it begins."""

    def __init__(self, hosted: list[HostedParameter], attachment: GpuAttachment) -> None:
        dice = random.Random()
        dice.seed()
        places: list[int] = []
        moved: list[int] = []  # on the GPU a parameter lies so much further on
        self.owners: list[int] = []  # of each, the parameter
        total = on_gpu = 0
        for index, placement in enumerate(attachment.optimizer.layout.placements):
            if attachment.streamed_units[index]:
                continue
            further = (attachment.gpu_offsets[index] - placement.parameters_offset) // _CANARY_BYTES
            first = placement.parameters_offset // _CANARY_BYTES
            count = hosted[index].theta.nbytes // _CANARY_BYTES
            mine = range(first + dice.randrange(min(count, _CANARY_EVERY)), first + count, _CANARY_EVERY)
            places += mine
            moved += [further] * len(mine)
            self.owners += [index] * len(mine)
            total, on_gpu = max(total, first + count), max(on_gpu, first + count + further)
        device = hosted[0].tensor.device
        self.attachment = attachment
        self._bytes = total * _CANARY_BYTES
        self._device = torch.empty(1, dtype=torch.int16, device=device).expand(on_gpu)
        if places:
            self._device = cuda.view(attachment.device_parameters(), self._device, attachment)
        self._host_places = torch.tensor(places, dtype=torch.int64, device="cpu")
        self._device_places = (self._host_places + torch.tensor(moved, dtype=torch.int64, device="cpu")).to(device)
        self._published = cuda.pinned_like(self._host_places.to(torch.int16))
        # Corrects the published ones, given those present.
        self.know_better: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        # What is noted instead of them.
        self.note_instead: Callable[[], None] | None = None

    @property
    def places(self) -> torch.Tensor:
        """Of each, in bytes of the parameters' memory; on the CPU."""
        return self._host_places * _CANARY_BYTES

    def note_published(self) -> None:
        """They are those of the last step, until the next one begins."""
        if self.note_instead is not None:
            return self.note_instead()
        if not self.owners:
            return
        # A daemon that took over maps its memory elsewhere.
        host = torch.frombuffer(self.attachment.parameters(0, self._bytes), dtype=torch.int16)
        torch.take(host, self._host_places, out=self._published)

    def begin_comparison(self) -> Callable[[], list[int]]:
        """What is returned gives the indices of parameters that differ now from those noted; it waits for the GPU."""
        if not self.owners:
            return list
        published = self._published.to(self._device_places.device, non_blocking=True)
        present = self._device[self._device_places]
        if self.know_better is not None:
            self.know_better(published, present)
        different = present != published
        any_different = cuda.begin_read(different.any())

        def find() -> list[int]:
            if not any_different():
                return []
            return sorted({self.owners[place] for place in different.nonzero().flatten().tolist()})

        return find
