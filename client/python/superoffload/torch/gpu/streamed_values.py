"""Values of parameters that stream: in the daemon's memory, while a slot may hold those of another block.

``state_dict()`` of the model has them from there, and what ``load_state_dict()`` brings is kept for push_params().
"""

from collections.abc import Callable, Iterable

import grpc
import torch

from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.torch import cuda
from superoffload.torch.gpu.published import publish, published_of
from superoffload.torch.guards.own_operations import ours
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.shards import HostedParameter


class StreamedValues:
    """Of an attachment. ``like``: this rank's elements of a parameter, on the CPU, as what the parameter is."""

    def __init__(
        self,
        hosted: list[HostedParameter],
        attachment: GpuAttachment,
        like: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._hosted, self._attachment, self._like = hosted, attachment, like
        units = enumerate(attachment.streamed_units)
        self.tensors = {index: hosted[index].tensor for index, unit in units if unit}
        self._loaded: dict[int, tuple[torch.Tensor, int]] = {}  # by index; with its version then

    def has(self, index: int) -> bool:
        return index in self.tensors

    def load(self, index: int, value: torch.Tensor) -> bool:
        parameter = self._hosted[index]
        mine = shards.part(parameter.tensor, value) if shards.is_sharded(parameter.tensor) else value
        if parameter.local.data_ptr() != parameter.theta.data_ptr() or mine is None:
            return False  # the parameter has a place of its own, or nobody knows which elements these are
        self._loaded[index] = mine, mine._version
        return True

    def value(self, index: int) -> torch.Tensor:
        """What a parameter is, on the CPU: since the last step, or since something was loaded. A DTensor's is one."""
        return self._like(self._hosted[index].tensor, self._mine(index))

    def _mine(self, index: int) -> torch.Tensor:
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

    def forget_if_same(self, index: int, published: torch.Tensor) -> None:
        """Nothing was loaded where that is what is published already, to the bit."""
        if index not in self._loaded:
            return
        value = self._taken(index).to("cpu", published.dtype).reshape(-1)
        if torch.equal(value.view(torch.uint8), published.view(torch.uint8)):
            del self._loaded[index]

    def forget_loaded(self) -> None:
        self._loaded.clear()

    @torch.no_grad()
    def to_published(self, written: Iterable[int]) -> None:
        """What was loaded, and what took a parameter's place, is published. Raises Error for what was written in it."""
        for index in filter(self.has, written):
            parameter = self._hosted[index]
            replaced = parameter.local.data_ptr() != parameter.theta.data_ptr()
            if not replaced and index not in self._loaded:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"parameter {parameter.name} streams, and was written in a place that it shares with other blocks; "
                    "nobody knows its value. pull_params() undoes that; to change it, load_state_dict() into its "
                    "module, or set its .data, and then push_params()",
                )
            value = parameter.tensor.detach() if replaced else self._taken(index)
            publish(self._attachment, index, parameter.theta, value)
            if replaced:
                parameter.tensor.data = parameter.theta
        self.forget_loaded()

    def close(self) -> None:
        """The parameters' values are the model's own, on the CPU."""
        self._attachment.give_values_back()
