"""Views of the daemon's memory that holds an optimizer's state."""

from collections.abc import Sequence

import torch

from superoffload._core.layout import ArrayPart, parts_of
from superoffload.torch.algorithm import STEP, array_name
from superoffload.torch.hosting import Hosting
from superoffload.v1 import optimizer_pb2


class StateViews:
    """Reads masters, moments and steps of the present moment."""

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting

    def of(self, indices: Sequence[int], keys: Sequence[str]) -> dict[int, dict[str, torch.Tensor]]:
        """Views by hosted parameter and key, right until the next step.

        They are of the array's dtype, in the parameter's local shape; scales of blocks are one row.
        """
        hosting = self._hosting
        hosting.check_attached()
        hosting.quiesce()
        hosting.attachment.call("SettleOptimizer", optimizer_pb2.SettleOptimizerRequest(name=hosting.name))
        steps = hosting.attachment.parameter_steps() if STEP in keys else []
        result: dict[int, dict[str, torch.Tensor]] = {}
        for index in indices:
            shape, parts = hosting.hosted[index].local.shape, self._parts(index)
            result[index] = {}
            for key in keys:
                if key == STEP:
                    result[index][key] = torch.tensor(steps[index], dtype=torch.float32, device="cpu")
                    continue
                part = parts[array_name(key)]
                buffer = hosting.attachment.state(part.offset, part.bytes)
                result[index][key] = torch.frombuffer(buffer, dtype=_dtype(part)).view(part.shape(shape))
        return result

    def like(self, index: int, key: str) -> torch.Tensor:
        """A tensor without memory, of the dtype and the shape that `of` has."""
        if key == STEP:
            return torch.empty((), dtype=torch.float32, device="meta")
        part = self._parts(index)[array_name(key)]
        shape = part.shape(self._hosting.hosted[index].local.shape)
        return torch.empty(shape, dtype=_dtype(part), device="meta")

    def have_scales(self) -> bool:
        """Whether some of them are codes, each block of which has a scale. Without a parameter there are none."""
        return bool(self._hosting.hosted) and any(part.is_scale for part in self._parts(0).values())

    def _parts(self, index: int) -> dict[str, ArrayPart]:
        return parts_of(self._hosting.attachment.optimizer.layout, index, self._hosting.hosted[index].local.numel())


def _dtype(part: ArrayPart) -> torch.dtype:
    dtype = getattr(torch, part.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
