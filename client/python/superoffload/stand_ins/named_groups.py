"""Groups of parameters that a script has passed without names, with those that they have in its model.

So blocks of the model are known, which stream, and messages say which parameter they are about.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from superoffload.stand_ins import module_names


def repeatable(parameters: Any) -> Any:
    """What can be looked at more than once; else as given."""
    if isinstance(parameters, Iterator):
        parameters = list(parameters)
    if isinstance(parameters, (list, tuple)):
        for group in parameters:
            if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
                group["params"] = list(group["params"])
    return parameters


def copies(groups: Any) -> Any:
    """With names where no parameter has one and a module has them all. What is no list of parameters: as given."""
    if isinstance(groups, torch.Tensor):
        return groups
    made = [dict(group) if isinstance(group, dict) else {"params": group} for group in groups]
    lists = [_listed(group.get("params")) for group in made]
    parameters = [tensor for tensors in lists for tensor in tensors]
    names = module_names.find(parameters) if all(map(torch.is_tensor, parameters)) else None
    if not names:
        return [dict(group) if isinstance(group, dict) else group for group in groups]
    pairs = zip(names, parameters, strict=True)
    for group, tensors in zip(made, lists, strict=True):
        group["params"] = [next(pairs) for _ in tensors]
    if any(isinstance(group, dict) for group in groups):
        return made
    return [pair for group in made for pair in group["params"]]


def added(groups: Sequence[Mapping[str, Any]], group: dict[str, Any]) -> dict[str, Any]:
    """``group``, which is about to be added to ``groups``: with names where these have some and it has none."""
    known = [name for before in groups for name in before.get("param_names", ())]
    if not known:
        return group
    (group,) = repeatable([group])
    parameters = _listed(group.get("params"))
    if not all(map(torch.is_tensor, parameters)):
        return group
    before = [tensor for others in groups for tensor in others["params"]]
    found = module_names.find([*before, *parameters])
    names = found[len(before) :] if found else [f"parameter {len(before) + at}" for at in range(len(parameters))]
    names = [f"{name} (added)" if name in known else name for name in names]
    return {**group, "params": list(zip(names, parameters, strict=True))}


def _listed(parameters: Any) -> list[Any]:
    """What torch refuses, a set for one, is no list of parameters."""
    one = isinstance(parameters, (torch.Tensor, set)) or not isinstance(parameters, Iterable)
    return [parameters] if one else list(parameters)
