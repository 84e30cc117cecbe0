"""Values of frozen parameters that stream: in this process's memory, where nothing changes them but a state dict."""

import collections
from collections.abc import Iterable, Mapping

import grpc
import torch

from superoffload._core import warn
from superoffload._core.error import Error
from superoffload._core.frozen_units import FrozenUnits
from superoffload.torch import cuda, meta
from superoffload.torch.ranks.shards import HostedParameter

_ALIGNMENT = 256  # bytes, as of parameters that train


class FrozenValues:
    """Takes ``parameters`` there, each with those of its one of ``units``, and out of a GPU's memory.

    Raises Error, INVALID_ARGUMENT, for parameters on meta of which ``weights`` have no value, before it takes any.
    """

    def __init__(
        self,
        parameters: list[HostedParameter],
        units: list[int],
        slots: int,
        weights: Mapping[str, torch.Tensor] | None,
    ) -> None:
        self._parameters, self._units = parameters, units
        self._check(weights)
        sizes = [0] * max(units)
        places = []  # each in its unit, one behind the other
        for parameter, unit in zip(parameters, units, strict=True):
            places.append(sizes[unit - 1])
            sizes[unit - 1] += -(-parameter.local.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.source = FrozenUnits(sizes, slots)
        self._places = places
        host = torch.frombuffer(self.source.host, dtype=torch.uint8)
        self._values = [self._take(index, host, weights) for index in range(len(parameters))]
        self._versions = [0] * len(parameters)
        self._of_unit: dict[int, list[int]] = collections.defaultdict(list)
        for index, unit in enumerate(units):
            self._of_unit[unit].append(index)
        self._are_new = False  # slots have those before

    def _check(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        known = set(weights or ())  # nothing is read for that
        for parameter in self._parameters:
            if parameter.tensor.device.type == "meta" and parameter.name not in known:
                raise Error(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"parameter {parameter.name} is on meta and has no value; pass weights= with its name",
                )

    @torch.no_grad()
    def _take(self, index: int, host: torch.Tensor, weights: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
        """The value lies in the host's memory from now on, and nowhere else."""
        parameter = self._parameters[index]
        value = meta.value_of(parameter, weights)
        assert value is not None, "it was looked for"
        begin = self.source.offsets[self._units[index] - 1] + self._places[index]
        taken = host[begin : begin + value.nbytes].view(value.dtype).view(value.shape)
        taken.copy_(value)
        if parameter.tensor.device.type == "meta":
            meta.replace(parameter.name, parameter.tensor, taken)
        else:
            parameter.tensor.data = taken
        return taken

    def bind(self, device: torch.device) -> None:
        """The parameters are where their units come to on the GPU, which is there."""
        for index, parameter in enumerate(self._parameters):
            address = self.source.addresses[self._units[index] - 1] + self._places[index]
            parameter.theta = cuda.view(address, parameter.local.detach(), self.source, device)
            parameter.tensor.data = parameter.theta
            self._versions[index] = parameter.tensor._version

    def before_read(self, unit: int) -> None:
        """Raises Error where somebody has written to one of the unit's parameters, whose place is not its own."""
        self._check_unwritten(self._of_unit[unit])
        if self._are_new:
            self._are_new = False
            self.source.keep_units(self.source.staying)

    def check_unwritten(self) -> None:
        """The same of all."""
        self._check_unwritten(range(len(self._parameters)))

    def _check_unwritten(self, indices: Iterable[int]) -> None:
        for index in indices:
            parameter = self._parameters[index]
            replaced = parameter.tensor.data_ptr() != parameter.theta.data_ptr()
            if replaced or parameter.tensor._version != self._versions[index]:
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"parameter {parameter.name} is frozen and streams, and was written to, which is lost; close() "
                    "what stream_frozen() has returned before you change it, or load_state_dict() into its module",
                )

    def value(self, index: int) -> torch.Tensor:
        self._check_unwritten([index])
        return self._values[index].clone()

    @torch.no_grad()
    def load(self, index: int, value: torch.Tensor) -> bool:
        self._values[index].copy_(value)
        self._are_new = True
        return True

    def close(self) -> None:
        """The parameters are on the CPU, with what they were before somebody wrote to them."""
        try:
            self.check_unwritten()
        except Error as error:
            warn.warn(str(error))
        for parameter, value in zip(self._parameters, self._values, strict=True):
            parameter.tensor.data = value
            del parameter.theta
        self.source.close()
