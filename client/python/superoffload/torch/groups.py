"""Hyper-parameters on their way from torch's parameter groups to the daemon."""

from collections.abc import Sequence
from typing import Any

from superoffload._core.attachment import Attachment
from superoffload.torch import options
from superoffload.torch.algorithm import Algorithm
from superoffload.v1 import optimizer_pb2


class SentGroups:
    """Sends the scalars of groups that have changed since they were sent last."""

    def __init__(self, algorithm: Algorithm, attachment: Attachment) -> None:
        self._algorithm = algorithm
        self._attachment = attachment
        self._sent: dict[int, tuple[float, ...]] = {}

    def send(self, param_groups: Sequence[dict[str, Any]]) -> None:
        options.check_groups(param_groups, self._algorithm)
        for index, group in enumerate(param_groups):
            scalars = tuple(self._algorithm.scalars(group).values())
            if scalars != self._sent.get(index):
                self._attachment.set_group(index, scalars)
                self._sent[index] = scalars

    def forget(self) -> None:
        """The daemon may have others than were sent."""
        self._sent.clear()


def to_proto(algorithm: Algorithm, group: dict[str, Any]) -> optimizer_pb2.ParameterGroup:
    scalars = [optimizer_pb2.Scalar(name=name, value=value) for name, value in algorithm.scalars(group).items()]
    return optimizer_pb2.ParameterGroup(scalars=scalars)


def from_proto(algorithm: Algorithm, group: optimizer_pb2.ParameterGroup) -> dict[str, Any]:
    """The same as torch's keys."""
    return algorithm.group_values({scalar.name: scalar.value for scalar in group.scalars})
