"""Views of the daemon's memory that holds an optimizer's state."""

from collections.abc import Sequence

import torch

from superoffload._core.layout import array_offsets
from superoffload.torch.algorithm import STEP, array_name
from superoffload.torch.hosting import Hosting
from superoffload.v1 import optimizer_pb2


def state_views(hosting: Hosting, indices: Sequence[int], keys: Sequence[str]) -> dict[int, dict[str, torch.Tensor]]:
    """Returns views of the present moment, right until the next step, by hosted parameter and key.

    Masters and moments are fp32 in the parameter's local shape; the step is a copy.
    """
    hosting.check_attached()
    hosting.quiesce()
    hosting.attachment.call("SettleOptimizer", optimizer_pb2.SettleOptimizerRequest(name=hosting.name))
    steps = hosting.attachment.parameter_steps() if STEP in keys else []
    layout = hosting.attachment.optimizer.layout
    offsets = array_offsets(layout)
    result: dict[int, dict[str, torch.Tensor]] = {}
    for index in indices:
        placement, shape = layout.placements[index], hosting.hosted[index].local.shape
        result[index] = {}
        for key in keys:
            if key == STEP:
                result[index][key] = torch.tensor(steps[index], dtype=torch.float32, device="cpu")
                continue
            offset = offsets[array_name(key)] + 4 * placement.state_offset
            buffer = hosting.attachment.state(offset, 4 * shape.numel())
            result[index][key] = torch.frombuffer(buffer, dtype=torch.float32).view(shape)
    return result
