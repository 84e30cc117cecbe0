"""Values of parameters that stream: in the daemon's memory, while a slot may hold those of another block.

``state_dict()`` of the model has them from there, and what ``load_state_dict()`` brings is kept for push_params().
"""

import gc
from collections.abc import Iterable
from typing import Any

import grpc
import torch

from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch import cuda
from superoffload.torch.gpu.published import publish, published_of
from superoffload.torch.guards.own_operations import ours
from superoffload.torch.hooks import weakly
from superoffload.torch.ranks.shards import HostedParameter


class StreamedValues:
    """Of an attachment. Its hooks hold it weakly."""

    def __init__(self, hosted: list[HostedParameter], attachment: GpuAttachment) -> None:
        self._hosted, self._attachment = hosted, attachment
        units = enumerate(attachment.streamed_units)
        self._indices = {id(hosted[index].tensor): index for index, unit in units if unit}
        self._loaded: dict[int, tuple[torch.Tensor, int]] = {}  # by index; with its version then
        self._keys: set[str] = set()  # of state dicts that they were in
        self._handles: list[Any] = []
        if self._indices:
            self._watch()

    def has(self, index: int) -> bool:
        return id(self._hosted[index].tensor) in self._indices

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
        """The module's own parameters that stream, with their indices."""
        own = module.__dict__.get("_parameters", {}).items()  # of one that is being made there are none yet
        return [(name, self._indices[id(tensor)]) for name, tensor in own if id(tensor) in self._indices]

    def _on_save(self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        for name, index in self._own(module):
            if prefix + name in state_dict:
                state_dict[prefix + name] = self._value(index)

    def _on_load(self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        for name, index in self._own(module):
            value, parameter = state_dict.get(prefix + name), self._hosted[index]
            if parameter.tensor.data_ptr() != parameter.theta.data_ptr():
                continue  # the parameter has a place of its own
            if isinstance(value, torch.Tensor) and value.shape == parameter.tensor.shape:
                value = state_dict.pop(prefix + name).detach()
                self._loaded[index] = value, value._version
                self._keys.add(prefix + name)

    def _after_load(self, module: torch.nn.Module, incompatible: Any) -> None:
        """What was kept is not missing."""
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in self._keys]

    def _value(self, index: int) -> torch.Tensor:
        """What a parameter is, on the CPU: since the last step, or since something was loaded."""
        theta = self._hosted[index].theta
        if index in self._loaded:
            return self._taken(index).to("cpu", theta.dtype, copy=True)
        unit = self._attachment.streamed_units[index]
        if self._attachment.stays(unit):  # a step that is open may have published others
            self._attachment.read_unit(unit, cuda.current_stream(theta))
            with ours():
                return theta.detach().to("cpu", copy=True)
        self._attachment.wait_over()
        return published_of(self._attachment, index, theta).clone()

    def _taken(self, index: int) -> torch.Tensor:
        value, version = self._loaded[index]
        if value._version == version:
            return value
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"what was loaded into parameter {self._hosted[index].name}, which streams, was written to before "
            "push_params(); load it again",
        )

    def loaded(self) -> list[int]:
        """Indices of parameters whose values were loaded, and were not pushed."""
        return list(self._loaded)

    def forget_loaded(self) -> None:
        self._loaded.clear()
        self._keys.clear()

    @torch.no_grad()
    def to_published(self, written: Iterable[int]) -> None:
        """What was loaded, and what took a parameter's place, is published. Raises Error for what was written in it."""
        for index in filter(self.has, written):
            parameter = self._hosted[index]
            replaced = parameter.tensor.data_ptr() != parameter.theta.data_ptr()
            if not replaced and index not in self._loaded:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"parameter {parameter.name} streams, and was written in a place that it shares with other blocks; "
                    "nobody knows its value. pull_params() undoes that; to change it, load_state_dict() into its "
                    "module, or set its .data, and then push_params()",
                )
            value = parameter.tensor.detach() if replaced else self._taken(index)
            publish(self._attachment, index, parameter.theta, value)
            parameter.tensor.data = parameter.theta
        self.forget_loaded()

    def close(self) -> None:
        """The parameters' values are the model's own, on the CPU."""
        for handle in self._handles:
            handle.remove()
        self._attachment.give_values_back()
