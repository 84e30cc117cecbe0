"""Views of the daemon's memory that holds an optimizer's state."""

from collections.abc import Sequence

import torch

from superoffload._core.layout import ArrayPart, parts_of
from superoffload.torch.algorithm import STEP, array_name
from superoffload.torch.hosting import Hosting
from superoffload.v1 import optimizer_pb2


def state_views(hosting: Hosting, indices: Sequence[int], keys: Sequence[str]) -> dict[int, dict[str, torch.Tensor]]:
    """Returns views of the present moment, right until the next step, by hosted parameter and key.

    They have the array's dtype and the parameter's local shape; scales of blocks are one row. The step is a copy.
    """
    hosting.check_attached()
    hosting.quiesce()
    hosting.attachment.call("SettleOptimizer", optimizer_pb2.SettleOptimizerRequest(name=hosting.name))
    steps = hosting.attachment.parameter_steps() if STEP in keys else []
    result: dict[int, dict[str, torch.Tensor]] = {}
    for index in indices:
        shape, parts = hosting.hosted[index].local.shape, _parts(hosting, index)
        result[index] = {}
        for key in keys:
            if key == STEP:
                result[index][key] = torch.tensor(steps[index], dtype=torch.float32, device="cpu")
                continue
            part = parts[array_name(key)]
            buffer = hosting.attachment.state(part.offset, part.bytes)
            result[index][key] = torch.frombuffer(buffer, dtype=_dtype(part)).view(part.shape(shape))
    return result


def like_view(hosting: Hosting, index: int, key: str) -> torch.Tensor:
    """Returns a tensor without memory, of the dtype and the shape that `state_views` has."""
    if key == STEP:
        return torch.empty((), dtype=torch.float32, device="meta")
    part = _parts(hosting, index)[array_name(key)]
    return torch.empty(part.shape(hosting.hosted[index].local.shape), dtype=_dtype(part), device="meta")


def have_scales(hosting: Hosting) -> bool:
    """Whether some are codes, each block of which has a scale. Without a hosted parameter there are none."""
    return bool(hosting.hosted) and any(part.is_scale for part in _parts(hosting, 0).values())


def _parts(hosting: Hosting, index: int) -> dict[str, ArrayPart]:
    return parts_of(hosting.attachment.optimizer.layout, index, hosting.hosted[index].local.numel())


def _dtype(part: ArrayPart) -> torch.dtype:
    dtype = getattr(torch, part.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
