"""What parameters are that the daemon publishes over their gradients: its masters say it, between steps."""

from collections.abc import Iterable
from typing import Any

import torch

from superoffload._core.attachment import Attachment
from superoffload._core.layout import ArrayPart, parts_of
from superoffload.torch import cuda
from superoffload.torch.algorithm import MASTER, array_name, dtype_of
from superoffload.torch.guards.master_canaries import KnownMasters, MasterCanaries


def values_of(attachment: Attachment, index: int, parameter: torch.Tensor) -> torch.Tensor:
    """What a parameter is since the last step: flat, on the CPU."""
    part = _masters(attachment, index, parameter)
    masters = torch.frombuffer(attachment.state(part.offset, part.bytes), dtype=dtype_of(part))
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
        firsts = by_canary(part.offset // dtype_of(part).itemsize for part in parts)
        within = offsets % widths // torch.int16.itemsize
        dtypes = [(parameter.dtype, dtype_of(part)) for parameter, part in zip(parameters, parts, strict=True)]
        self._noted = []
        known = []
        for dtype, master in set(dtypes):
            positions = by_canary(each == (dtype, master) for each in dtypes).nonzero().flatten()
            noted = _Noted((firsts + offsets // widths)[positions], master, device)
            self._noted.append(noted)
            order = torch.arange(len(positions), dtype=torch.int64, device=device)
            known.append(KnownMasters(dtype, noted.on_gpu, positions.to(device), order, within[positions].to(device)))
        self._canaries = MasterCanaries(known)

    def note(self) -> None:
        """They are those of the last step, until the next one begins."""
        state = self._attachment.state(0, self._bytes)  # a daemon that took over maps its memory elsewhere
        for noted in self._noted:
            noted.note(state)

    def write(self, expected: torch.Tensor, present: torch.Tensor) -> None:
        """Puts the canaries into ``expected``."""
        for noted in self._noted:
            noted.on_gpu.copy_(noted.on_cpu, non_blocking=True)
        self._canaries.write(expected, present)


class _Noted:
    """Masters of one dtype, at ``places`` of the state."""

    def __init__(self, places: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self._places = places
        self.on_cpu = cuda.pinned_like(places.to(dtype))
        self.on_gpu = torch.empty_like(self.on_cpu, device=device)

    def note(self, state: Any) -> None:
        masters = torch.frombuffer(state, dtype=self.on_cpu.dtype, count=len(state) // self.on_cpu.itemsize)
        torch.take(masters, self._places, out=self.on_cpu)


def _masters(attachment: Attachment, index: int, parameter: torch.Tensor) -> ArrayPart:
    return parts_of(attachment.optimizer.layout, index, parameter.numel())[array_name(MASTER)]
