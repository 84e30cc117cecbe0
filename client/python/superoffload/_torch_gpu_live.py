"""A model's parameters on a GPU: views of the memory that the published ones are copied to.

What torch writes to them changes their versions. What is written behind torch's back (``.data``, collectives) is found
by canaries: two bytes in every 16 KiB of every parameter, and of each shorter one, are compared with the published
parameters, which lie in the CPU's memory.
"""

import random
from collections.abc import Callable

import torch

from superoffload import _torch_gpu
from superoffload._gpu_attachment import GpuAttachment
from superoffload._torch_live import LiveParameters
from superoffload._torch_parameters import HostedParameter

_CANARY_BYTES = 2  # no parameter's element is shorter
_CANARY_EVERY = (16 << 10) // _CANARY_BYTES


class _Canaries:
    def __init__(self, hosted: list[HostedParameter], attachment: GpuAttachment) -> None:
        dice = random.Random()
        dice.seed()
        places, self._owners = [], []
        total = 0
        for index, placement in enumerate(attachment.optimizer.layout.placements):
            first = placement.parameters_offset // _CANARY_BYTES
            count = hosted[index].tensor.nbytes // _CANARY_BYTES
            mine = range(first + dice.randrange(min(count, _CANARY_EVERY)), first + count, _CANARY_EVERY)
            places += mine
            self._owners += [index] * len(mine)
            total = max(total, first + count)
        device = hosted[0].tensor.device
        self._attachment = attachment
        self._bytes = total * _CANARY_BYTES
        like = torch.empty(1, dtype=torch.int16, device=device).expand(total)
        self._device = _torch_gpu.view(attachment.device_parameters(), like, attachment)
        self._host_places = torch.tensor(places)
        self._device_places = self._host_places.to(device)

    def published(self) -> torch.Tensor:
        # A daemon that took over maps its memory elsewhere.
        host = torch.frombuffer(self._attachment.parameters(0, self._bytes), dtype=torch.int16)
        return host[self._host_places]

    def different(self, published: torch.Tensor) -> list[int]:
        """Indices of parameters; waits for the GPU."""
        now = self._device[self._device_places].cpu()
        return sorted({self._owners[place] for place in (now != published).nonzero().flatten().tolist()})


class GpuParameters(LiveParameters):
    """``synchronize`` has the current stream wait for the parameters of the last step."""

    def __init__(
        self, hosted: list[HostedParameter], attachment: GpuAttachment, synchronize: Callable[[], None]
    ) -> None:
        super().__init__(hosted)
        self._attachment = attachment
        self._synchronize = synchronize
        self._versions: list[int] = []
        self._canaries = _Canaries(hosted, attachment)
        self._published: torch.Tensor | None = None  # canaries of the last step

    def before_step(self) -> None:
        if self._published is None:
            self._attachment.wait_over()
            self._published = self._canaries.published()

    def on_commit(self) -> None:
        self._published = None

    def adopt(self) -> None:
        for parameter in self._hosted:
            parameter.tensor.data = parameter.theta
        self.keep()

    def push(self) -> None:
        for parameter in self._hosted:
            if parameter.tensor.data_ptr() != parameter.theta.data_ptr():
                parameter.theta.copy_(parameter.tensor.detach())

    def keep(self) -> None:
        self._versions = [parameter.tensor._version for parameter in self._hosted]
        self._published = None

    def changed(self) -> list[str]:
        written = [
            parameter.name
            for parameter, version in zip(self._hosted, self._versions, strict=True)
            if parameter.tensor._version != version or parameter.tensor.data_ptr() != parameter.theta.data_ptr()
        ]
        if written:
            return written
        self.before_step()
        self._synchronize()
        return [self._hosted[index].name for index in self._canaries.different(self._published)]

    def close(self) -> None:
        for parameter in self._hosted:
            parameter.tensor.data = parameter.theta.clone()
