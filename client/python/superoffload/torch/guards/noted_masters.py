"""What parameters are that the daemon publishes over their gradients: its fp32 masters say it, between steps."""

from collections.abc import Iterable

import torch

from superoffload._core.attachment import Attachment
from superoffload._core.layout import ArrayPart, parts_of
from superoffload.torch import cuda
from superoffload.torch.algorithm import MASTER, array_name
from superoffload.torch.guards.master_canaries import KnownMasters, MasterCanaries


def values_of(attachment: Attachment, index: int, parameter: torch.Tensor) -> torch.Tensor:
    """What a parameter is since the last step: flat, on the CPU."""
    part = _masters(attachment, index, parameter)
    masters = torch.frombuffer(attachment.state(part.offset, part.bytes), dtype=torch.float32)
    return masters.to(parameter.dtype, copy=True)


class NotedMasters:
    """Those of canaries, for their comparison later.

    ``owners`` are the parameters of the canaries, and ``places`` those in the parameters' memory, in bytes.
    """

    def __init__(
        self,
        attachment: Attachment,
        parameters: list[torch.Tensor],
        owners: list[int],
        places: torch.Tensor,
        device: torch.device,
    ) -> None:
        self._attachment = attachment
        parts = [_masters(attachment, index, parameter) for index, parameter in enumerate(parameters)]
        self._bytes = max(part.offset + part.bytes for part in parts)

        def by_canary(numbers: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(numbers), dtype=torch.int64, device="cpu")[owners]

        widths = by_canary(parameter.element_size() for parameter in parameters)
        offsets = places - by_canary(place.parameters_offset for place in attachment.optimizer.layout.placements)
        self._places = by_canary(part.offset // torch.float32.itemsize for part in parts) + offsets // widths
        self._masters = cuda.pinned_like(self._places.to(torch.float32))
        self._on_gpu = torch.empty_like(self._masters, device=device)
        within = offsets % widths // torch.int16.itemsize
        known = []
        for dtype in {parameter.dtype for parameter in parameters}:
            positions = by_canary(parameter.dtype == dtype for parameter in parameters).nonzero().flatten()
            there = positions.to(device)
            known.append(KnownMasters(dtype, self._on_gpu, there, there, within[positions].to(device)))
        self._canaries = MasterCanaries(known)

    def note(self) -> None:
        """They are those of the last step, until the next one begins."""
        # A daemon that took over maps its memory elsewhere.
        masters = torch.frombuffer(self._attachment.state(0, self._bytes), dtype=torch.float32)
        torch.take(masters, self._places, out=self._masters)

    def write(self, expected: torch.Tensor, present: torch.Tensor) -> None:
        """Puts the canaries into ``expected``."""
        self._on_gpu.copy_(self._masters, non_blocking=True)
        self._canaries.write(expected, present)


def _masters(attachment: Attachment, index: int, parameter: torch.Tensor) -> ArrayPart:
    return parts_of(attachment.optimizer.layout, index, parameter.numel())[array_name(MASTER)]
