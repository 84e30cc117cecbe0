"""Views of the daemon's memory that holds an optimizer's state."""

from collections.abc import Sequence

import torch

from superoffload._core.layout import ArrayPart, parts_of
from superoffload.torch.algorithm import MASTER, STEP, array_name, dtype_of
from superoffload.torch.hosting import Hosting
from superoffload.torch.state.codes import decoded
from superoffload.v1 import optimizer_pb2


def state_views(hosting: Hosting, indices: Sequence[int], keys: Sequence[str]) -> dict[int, dict[str, torch.Tensor]]:
    """Returns views of the present moment, right until the next step, by hosted parameter and key.

    They have the array's dtype and the parameter's local shape. Of codes they are copies of the numbers that these
    stand for, and the step is a copy, too.
    """
    steps = _settle(hosting, keys)
    result: dict[int, dict[str, torch.Tensor]] = {}
    for index in indices:
        shape, parts = hosting.hosted[index].local.shape, _parts(hosting, index)
        result[index] = {key: steps[index] for key in keys if key == STEP}
        for key in keys:
            if key != STEP:
                result[index][key] = _numbers(hosting, parts, array_name(key)).view(shape)
    return result


def stored_views(hosting: Hosting) -> dict[str, dict[str, torch.Tensor]]:
    """Returns views of all of the present moment as it is stored, by name of the parameter and key.

    Codes are codes, and their scales are one row.
    """
    steps = _settle(hosting, (STEP,))
    result: dict[str, dict[str, torch.Tensor]] = {}
    for index, parameter in enumerate(hosting.hosted):
        parts = _parts(hosting, index)
        result[parameter.name] = {STEP: steps[index]}
        for name, part in parts.items():
            key = MASTER if name == array_name(MASTER) else name
            result[parameter.name][key] = _view(hosting, part).view(part.shape(parameter.local.shape))
    return result


def _settle(hosting: Hosting, keys: Sequence[str]) -> list[torch.Tensor]:
    """Has the state be that of the last committed step. Returns each parameter's steps, if ``keys`` have them."""
    hosting.check_attached()
    hosting.quiesce()
    hosting.attachment.call("SettleOptimizer", optimizer_pb2.SettleOptimizerRequest(name=hosting.name))
    steps = hosting.attachment.parameter_steps() if STEP in keys else []
    return [torch.tensor(count, dtype=torch.float32, device="cpu") for count in steps]


def _view(hosting: Hosting, part: ArrayPart) -> torch.Tensor:
    return torch.frombuffer(hosting.attachment.state(part.offset, part.bytes), dtype=dtype_of(part))


def _numbers(hosting: Hosting, parts: dict[str, ArrayPart], name: str) -> torch.Tensor:
    part = parts[name]
    stored = _view(hosting, part)
    if not part.codes:
        return stored
    values = torch.tensor(part.codes, dtype=torch.float32, device="cpu")
    return decoded(stored, values, _view(hosting, parts[part.scales]), parts[part.scales].block)


def like_view(hosting: Hosting, index: int, key: str) -> torch.Tensor:
    """Returns a tensor without memory, of the dtype and the shape that `state_views` has."""
    if key == STEP:
        return torch.empty((), dtype=torch.float32, device="meta")
    part = _parts(hosting, index)[array_name(key)]
    dtype = torch.float32 if part.codes else dtype_of(part)
    return torch.empty(hosting.hosted[index].local.shape, dtype=dtype, device="meta")


def _parts(hosting: Hosting, index: int) -> dict[str, ArrayPart]:
    return parts_of(hosting.attachment.optimizer.layout, index, hosting.hosted[index].local.numel())
