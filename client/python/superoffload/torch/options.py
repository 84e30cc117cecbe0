"""Options of torch.optim: taken where they change nothing, refused where they would have to change results."""

from collections.abc import Iterable, Mapping
from typing import Any

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch.algorithm import Algorithm

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
    """Of a parameter group. Raises TypeError for text, of which Python would make numbers and torch does not."""
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
        if (objection := algorithm.objection(group)) is not None:
            raise Error(grpc.StatusCode.FAILED_PRECONDITION, f"parameter group {index} {objection}")
    sign(groups)
