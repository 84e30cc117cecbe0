"""What modules' state dicts have of parameters that stream: their values, whatever lies in their places."""

import gc
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from superoffload.torch.hooks import weakly


class Values(Protocol):
    """Of parameters, by index."""

    def value(self, index: int) -> torch.Tensor:
        """On the CPU; the caller's own."""
        ...

    def load(self, index: int, value: torch.Tensor) -> bool:
        """False: the parameter itself can be written to."""
        ...


class StateDicts:
    """Hooks of all modules that have one of ``tensors``, by index."""

    def __init__(self, tensors: Mapping[int, torch.Tensor], values: Values) -> None:
        self._tensors, self._values = tensors, values
        self._indices = {id(tensor): index for index, tensor in tensors.items()}
        self._keys: set[str] = set()  # that the last state dict had
        self._handles: list[Any] = []
        if tensors:
            self._watch()

    def _watch(self) -> None:
        """An optimizer is given parameters, and not the modules that they are of."""
        for module in gc.get_objects():
            if issubclass(type(module), torch.nn.Module) and self._own(module):
                self._handles += [
                    module.register_state_dict_post_hook(weakly(self._on_save, passes=3)),
                    module.register_load_state_dict_pre_hook(weakly(self._on_load, passes=3)),
                    module.register_load_state_dict_post_hook(weakly(self._after_load, passes=2)),
                ]

    def _own(self, module: torch.nn.Module) -> list[tuple[str, int]]:
        own = module.__dict__.get("_parameters", {}).items()  # of one that is being made there are none yet
        return [(name, self._indices[id(tensor)]) for name, tensor in own if id(tensor) in self._indices]

    def _on_save(self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        for name, index in self._own(module):
            if prefix + name in state_dict:
                state_dict[prefix + name] = self._values.value(index)

    def _on_load(self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        for name, index in self._own(module):
            key = prefix + name
            self._keys.discard(key)
            value = state_dict.get(key)
            if not isinstance(value, torch.Tensor) or value.shape != self._tensors[index].shape:
                continue
            if self._values.load(index, value.detach()):
                del state_dict[key]
                self._keys.add(key)

    def _after_load(self, module: torch.nn.Module, incompatible: Any) -> None:
        """What was loaded is not missing."""
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in self._keys]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
