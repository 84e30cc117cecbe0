"""Hyper-parameters on their way from torch's parameter groups to the daemon."""

from collections.abc import Sequence
from typing import Any

from superoffload._core.attachment import Attachment
from superoffload.torch import options
from superoffload.torch.algorithm import Algorithm
from superoffload.v1 import optimizer_pb2


def send(algorithm: Algorithm, attachment: Attachment, param_groups: Sequence[dict[str, Any]]) -> None:
    """The open step, and those that follow, have the hyper-parameters of the groups as they are now."""
    options.check_groups(param_groups, algorithm)
    for index, group in enumerate(param_groups):
        attachment.set_scalars(index, list(algorithm.scalars(group).values()))


def to_proto(algorithm: Algorithm, group: dict[str, Any]) -> optimizer_pb2.ParameterGroup:
    scalars = [optimizer_pb2.Scalar(name=name, value=value) for name, value in algorithm.scalars(group).items()]
    return optimizer_pb2.ParameterGroup(scalars=scalars)


def from_proto(algorithm: Algorithm, group: optimizer_pb2.ParameterGroup) -> dict[str, Any]:
    """The same as torch's keys."""
    return algorithm.group_values({scalar.name: scalar.value for scalar in group.scalars})
