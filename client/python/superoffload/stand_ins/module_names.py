"""Names of parameters that a script has passed without any: those of the module that they are in."""

import gc
from collections.abc import Iterator, Sequence

import torch


def find(parameters: Sequence[torch.Tensor]) -> list[str] | None:
    """Names as in ``named_parameters()`` of the smallest module that has all of them; None where no module has."""
    wanted = {id(parameter) for parameter in parameters}
    having = [_names_in_smallest(root, wanted) for root in _roots() if wanted <= set(map(id, root.parameters()))]
    if not having:
        return None
    names = min(having, key=len)
    return [names[id(parameter)] for parameter in parameters]


def _roots() -> list[torch.nn.Module]:
    """Modules that are in no other one; also those that were wrapped in an object which is none."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    inside = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in inside and "_modules" in vars(module)]


def _children(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in vars(module).get("_modules", {}).values():  # it may be half built
        if child is not None:
            yield child


def _names_in_smallest(module: torch.nn.Module, wanted: set[int]) -> dict[int, str]:
    for child in _children(module):
        if wanted <= {id(parameter) for parameter in child.parameters()}:
            return _names_in_smallest(child, wanted)
    return {id(tensor): name for name, tensor in module.named_parameters()}
