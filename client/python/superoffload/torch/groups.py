"""torch's parameter groups: what of them the daemon is sent, and what of them is refused.

Options of torch.optim are taken where they change nothing, and refused where they would have to change results.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc
import torch

from superoffload._core import stored
from superoffload._core.attachment import Attachment
from superoffload._core.error import Error
from superoffload.torch.algorithm import OPTIM_BITS, Algorithm
from superoffload.v1 import optimizer_pb2

# Options that would change results: the value that does not, and what to do instead.
_REFUSED = {
    "differentiable": (False, "the step runs in another process, and autograd does not see it"),
    "max_grad_norm": (None, "it is the optimizer's, for all groups: pass it when building"),
}


def check_whole(groups: Iterable[dict[str, Any]]) -> None:
    """Raises Error for parameters of which this process has a shard only, or nothing yet."""
    for group in groups:
        for tensor in group["params"]:
            if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
                raise Error(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "a parameter of a lazy module has no shape yet; call the model once before building the optimizer",
                )
            kind = None
            if type(tensor).__name__ == "FlatParameter" or getattr(tensor, "_fsdp_flattened", False):
                kind = "sharded by FSDP"
            if kind is not None:
                raise Error(
                    grpc.StatusCode.UNIMPLEMENTED,
                    f"a parameter is {kind}; use FSDP2 (torch.distributed.fsdp.fully_shard)",
                )


def check_flags(options: Mapping[str, Any], algorithm: Algorithm, where: str = "") -> None:
    for option, (harmless, remedy) in {**_REFUSED, **algorithm.refused}.items():
        if options.get(option, harmless) not in (harmless, None):
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"{where}{option}={options[option]!r} is not supported: {remedy}",
            )


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values of a parameter group. Raises TypeError for text, of which Python would make numbers."""
    if texts := [f"{name} is {value!r}" for name, value in values.items() if isinstance(value, str | bytes)]:
        raise TypeError(f"{', '.join(texts)}, which is text and no number")
    return {name: float(value) for name, value in values.items()}


def sign(groups: Iterable[dict[str, Any]]) -> float:
    """What gradients are multiplied by: -1 to maximize. A step has one sign."""
    signs = {-1.0 if group.get("maximize") else 1.0 for group in groups}
    if len(signs) > 1:
        raise Error(
            grpc.StatusCode.UNIMPLEMENTED,
            "maximize is True in some parameter groups and False in others, which is not supported; give it one value, "
            "and negate the loss of the other parameters, or build an optimizer for them",
        )
    return signs.pop()


def check_groups(groups: Iterable[dict[str, Any]], algorithm: Algorithm) -> None:
    """Raises Error for an option of a parameter group, built, loaded or changed, that would have to change results."""
    for index, group in enumerate(groups):
        check_flags(group, algorithm, f"parameter group {index}: ")
        stored.check_optim_bits(group.get(OPTIM_BITS), algorithm.state_bits)
        if (objection := algorithm.objection(group)) is not None:
            raise Error(grpc.StatusCode.FAILED_PRECONDITION, f"parameter group {index} {objection}")
    sign(groups)


def optim_bits(groups: Iterable[Mapping[str, Any]]) -> list[int | None]:
    """In how many bits each group asks to have its state kept; None: that is up to the optimizer."""
    return [group.get(OPTIM_BITS) for group in groups]


def check_optim_bits(groups: Sequence[dict[str, Any]], built: list[int | None]) -> None:
    """Raises Error where a group asks for another width than the one that the optimizer was built with."""
    for index, (now, then) in enumerate(zip(optim_bits(groups), built, strict=True)):
        if now != then:
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"parameter group {index} has {OPTIM_BITS}={now}, but the optimizer keeps its state as {then} says, "
                "with which it was built; set it before, or build another optimizer and load this one's state_dict()",
            )


def set_optim_bits(groups: Sequence[dict[str, Any]], built: list[int | None]) -> None:
    """Has loaded groups say what the optimizer was built with."""
    for group, bits in zip(groups, built, strict=True):
        group.pop(OPTIM_BITS, None)
        if bits is not None:
            group[OPTIM_BITS] = bits


def send(algorithm: Algorithm, attachment: Attachment, param_groups: Sequence[dict[str, Any]]) -> None:
    """The open step, and those that follow, have the hyper-parameters of the groups as they are now."""
    check_groups(param_groups, algorithm)
    for index, group in enumerate(param_groups):
        attachment.set_scalars(index, list(algorithm.scalars(group).values()))


def to_proto(algorithm: Algorithm, group: dict[str, Any]) -> optimizer_pb2.ParameterGroup:
    """A group of torch, as the daemon takes it."""
    scalars = [optimizer_pb2.Scalar(name=name, value=value) for name, value in algorithm.scalars(group).items()]
    return optimizer_pb2.ParameterGroup(scalars=scalars)


def from_proto(algorithm: Algorithm, group: optimizer_pb2.ParameterGroup) -> dict[str, Any]:
    """The values of a group of the daemon, by torch's keys."""
    return algorithm.group_values({scalar.name: scalar.value for scalar in group.scalars})
