"""Tensors as a checkpoint that the daemon can restore (server/checkpoint/index.h)."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import torch

from superoffload._error import Error

_FILE = "state.safetensors"
_CHECKPOINT_ARRAYS = {"master": "model", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_MAX_AVERAGES = "max_exp_avg_sq"  # of amsgrad


def _hyperparameters(group: dict[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    values = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
    return {key: float(value) for key, value in {**values, "weight_decay": group["weight_decay"]}.items()}


def from_torch(
    state: Mapping[Any, Mapping[str, Any]], keys: dict[str, Any], masters: dict[str, torch.Tensor]
) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
    """The state of a torch.optim.AdamW as ``master``, ``exp_avg`` and ``exp_avg_sq`` by name, and committed steps.

    ``keys``: of each parameter in ``state``, by name. ``masters`` are used where the state has none, as torch's has.
    Raises Error when the state is of other parameters, or of what is not supported.
    """
    missing = [name for name, key in keys.items() if "exp_avg" not in state.get(key, {})]
    if missing:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the state_dict has no moments of {len(missing)} parameters, the first being {missing[0]}; it must be of "
            "an AdamW or Adam on the same parameters that has made a step",
        )
    steps = {int(state[key]["step"]) for key in keys.values()}
    if len(steps) != 1:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the parameters of the state_dict have made {sorted(steps)} steps, but here all make the same number",
        )
    if any(_MAX_AVERAGES in state[key] for key in keys.values()):
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            "the state_dict is of an optimizer with amsgrad=True, which is not supported",
        )
    tensors = {}
    for name, key in keys.items():
        tensors[name] = {array: state[key].get(array, masters[name]) for array in _CHECKPOINT_ARRAYS}
        for array, tensor in tensors[name].items():
            if tensor.shape != masters[name].shape:
                raise Error(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{array} of {name} is {list(tensor.shape)} in the state_dict but {list(masters[name].shape)} in "
                    "the model",
                )
    return tensors, steps.pop()


def write(
    directory: str,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    committed_steps: int,
    groups: Sequence[dict[str, Any]],
    parameter_groups: dict[str, int],
) -> None:
    """Writes ``master``, ``exp_avg`` and ``exp_avg_sq`` of each parameter, by name, into an existing directory."""
    from safetensors.torch import save_file  # only here: training does without it

    saved = {
        f"{_CHECKPOINT_ARRAYS[array]}.{name}": tensor.detach().to("cpu", torch.float32).contiguous()
        for name, arrays in tensors.items()
        for array, tensor in arrays.items()
    }
    save_file(saved, os.path.join(directory, _FILE))
    index = {
        "metadata": {
            "format": "superoffload",
            "version": 1,
            "committed_steps": committed_steps,
            "total_size": sum(tensor.nbytes for tensor in saved.values()),
        },
        "groups": [_hyperparameters(group) for group in groups],
        "parameter_groups": parameter_groups,
        "crc32": {},
        "weight_map": dict.fromkeys(saved, _FILE),
    }
    with open(os.path.join(directory, "model.safetensors.index.json"), "w") as file:
        json.dump(index, file)
