"""State that is no checkpoint, as a file of tensors from which the daemon restores an optimizer."""

import os
from collections.abc import Mapping
from typing import Any

import grpc
import torch

from superoffload._core import warn
from superoffload._core.error import Error
from superoffload.torch.algorithm import MASTER, STEP, Algorithm, array_name
from superoffload.v1 import optimizer_pb2


def from_torch(
    algorithm: Algorithm,
    state: Mapping[Any, Mapping[str, Any]],
    keys: dict[str, Any],
    present: Mapping[str, Mapping[str, torch.Tensor]],
) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
    """The state of the algorithm's counterpart in torch as arrays and ``step`` by parameter name, and committed steps.

    ``keys``: of each parameter in ``state``, by name. ``present`` has the arrays
    as they are; its masters are used where the state has none, as torch's has.
    Raises Error when the state is of other parameters, or of what is not supported.
    """
    made = {name: key for name, key in keys.items() if state.get(key)}  # torch has no state before the first gradient
    missing = [name for name, key in made.items() if not state[key].keys() >= {STEP, *algorithm.moments}]
    if missing or not made:
        unmade = missing or list(keys)
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the state_dict has no moments of {len(unmade)} parameters, the first being {unmade[0]}; it must be of an "
            f"{algorithm.name} on the same parameters that has made a step. To begin anew, optimizer.state.clear()",
        )
    known = {STEP, *algorithm.arrays}
    if unknown := sorted({array for key in made.values() for array in state[key]} - known):
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the state_dict has {', '.join(unknown)}, which {algorithm.name} does not have in the daemon",
        )
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    narrowed = 0
    for name in keys:
        if name in made:
            saved = state[made[name]]
        else:
            saved = {moment: torch.zeros_like(present[name][moment]) for moment in algorithm.moments}
        tensors[name] = {array: saved.get(array, present[name][MASTER]) for array in algorithm.arrays}
        for array, tensor in tensors[name].items():
            here = present[name][array]
            if tensor.shape != here.shape or not tensor.is_floating_point():
                raise Error(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{array} of {name} is {_words(tensor)} in the state_dict but {_words(here)} in the daemon",
                )
            narrowed += array != MASTER and tensor.dtype != here.dtype and here.dtype == torch.bfloat16
            tensors[name][array] = tensor.to("cpu", here.dtype)
        tensors[name][STEP] = saved.get(STEP, torch.tensor(0.0, dtype=torch.float32, device="cpu"))
    if narrowed:
        warn.warn(
            f"{narrowed} moments of the state_dict are rounded to bfloat16, in which this {algorithm.name.split()[0]} "
            "keeps them; build it with state_dtype=torch.float32 to have them as they are"
        )
    return tensors, max(int(arrays[STEP]) for arrays in tensors.values())


def write(
    path: str, tensors: Mapping[str, Mapping[str, torch.Tensor]], committed_steps: int
) -> optimizer_pb2.TensorFile:
    """Writes the arrays of each parameter, by name. ``step``: in how many steps it had a gradient, if not in all."""
    from safetensors.torch import save_file  # only here: training does without it

    saved = {
        f"{array_name(array)}.{name}": tensor.detach().contiguous()
        for name, arrays in tensors.items()
        for array, tensor in arrays.items()
        if array != STEP
    }
    for name, arrays in tensors.items():
        if STEP in arrays and (steps := int(arrays[STEP])) != committed_steps:
            saved[f"steps.{name}"] = torch.tensor(steps, dtype=torch.int64, device="cpu")
    path = os.path.abspath(path)
    save_file(saved, path)
    return optimizer_pb2.TensorFile(path=path, committed_steps=committed_steps)


def _words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
