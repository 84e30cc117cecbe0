"""What `superoffload run --config` has chosen for the optimizers that stand in: keyword arguments of them."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from superoffload._core.policies import CheckpointSchedule
from superoffload.torch.gpu.options import GpuOptions, check_weights
from superoffload.torch.keywords import Keywords

VARIABLE = "SUPEROFFLOAD_STAND_IN_OPTIONS"  # JSON

# What the script says itself, or what is no text and no number.
_NOT_CHOSEN = {"maximize", "foreach", "capturable", "differentiable", "fused"}
_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@functools.cache
def chosen() -> dict[str, Any]:
    return keywords(json.loads(os.environ.get(VARIABLE, "{}")))


def keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError with a sentence for what is none."""
    known = sorted(Keywords.__annotations__.keys() - _NOT_CHOSEN)
    for name in given:
        if name not in known:
            raise ValueError(f"{name} is no option; there are {', '.join(known)}")
    made = dict(given)
    for name in made.keys() & {"state_dtype", "master_dtype"}:
        made[name] = _STATE_DTYPES.get(made[name])
        if made[name] is None:
            raise ValueError(f"{name} is {given[name]!r} but must be one of {', '.join(_STATE_DTYPES)}")
    for name, cls in (("gpu", GpuOptions), ("checkpoint", CheckpointSchedule)):
        if name in made:
            made[name] = _made(name, cls, made[name])
    if "weights" in made:
        check_weights(made["weights"])
    return made


def _made(name: str, cls: Any, fields: Any) -> Any:
    known = [field.name for field in dataclasses.fields(cls) if field.name != "weights"]
    if not isinstance(fields, Mapping) or not fields.keys() <= set(known):
        raise ValueError(f"{name} is {fields!r} but must have some of {', '.join(known)}")
    try:
        return cls(**fields)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error
