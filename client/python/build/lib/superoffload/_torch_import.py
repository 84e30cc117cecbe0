"""A torch.optim state_dict as a checkpoint that the daemon can restore (server/checkpoint/index.h)."""

import json
import os
from typing import Any

import grpc
import torch

from superoffload._error import Error

_FILE = "state.safetensors"


def _committed_steps(states: list[dict[str, Any]]) -> int:
    steps = {int(state["step"]) for state in states}
    if len(steps) != 1:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the parameters of the state_dict have made {sorted(steps)} steps, but here all make the same number",
        )
    return steps.pop()


def _group(group: dict[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    values = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
    return {key: float(value) for key, value in {**values, "weight_decay": group["weight_decay"]}.items()}


def write_checkpoint(
    directory: str,
    state_dict: dict[str, Any],
    names: dict[int, str],
    tensors: dict[str, dict[str, torch.Tensor]],
    groups: list[int],
) -> None:
    """Writes masters from `tensors` and moments from `state_dict`.

    ``names``: parameter names by the state_dict's indices; ``groups``: the group of each, in the same order.
    Raises Error when the state_dict is of other parameters.
    """
    from safetensors.torch import save_file  # only here: training does without it

    missing = [name for index, name in names.items() if "exp_avg" not in state_dict["state"].get(index, {})]
    if missing:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the state_dict has no moments of {len(missing)} parameters, the first being {missing[0]}; it must be of "
            "an AdamW or Adam on the same parameters that has made a step",
        )
    saved = {}
    for index, name in names.items():
        state = state_dict["state"][index]
        saved[f"model.{name}"] = tensors[name]["master"]
        for key in ("exp_avg", "exp_avg_sq"):
            saved_shape, shape = list(state[key].shape), list(tensors[name][key].shape)
            if saved_shape != shape:
                raise Error(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{key} of {name} is {saved_shape} in the state_dict but {shape} in the model",
                )
            saved[f"{key}.{name}"] = state[key].detach().to("cpu", torch.float32).contiguous()
    save_file(saved, os.path.join(directory, _FILE))
    index = {
        "metadata": {
            "format": "superoffload",
            "version": 1,
            "committed_steps": _committed_steps([state_dict["state"][index] for index in names]),
            "total_size": sum(tensor.nbytes for tensor in saved.values()),
        },
        "groups": [_group(group) for group in state_dict["param_groups"]],
        "parameter_groups": dict(zip(names.values(), groups, strict=True)),
        "crc32": {},
        "weight_map": dict.fromkeys(saved, _FILE),
    }
    with open(os.path.join(directory, "model.safetensors.index.json"), "w") as file:
        json.dump(index, file)
