"""Parameters on meta: what they are to be, and how they get memory."""

from collections.abc import Mapping
from typing import Any

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.shards import HostedParameter


def value_of(parameter: HostedParameter, weights: Mapping[str, torch.Tensor] | None) -> torch.Tensor | None:
    """What the elements that are hosted are to be; None: it is on meta, and the daemon has to know."""
    if parameter.matrix is not None:
        return parameter.matrix.whole
    value = mine(parameter.name, parameter.tensor, weights)
    return None if value is None else shards.rows_of(value, parameter.rows)


def mine(name: str, tensor: torch.Tensor, weights: Mapping[str, torch.Tensor] | None) -> torch.Tensor | None:
    """What the elements of this rank are to be. ``weights``: whole tensors, or distributed as the parameters are."""
    if tensor.device.type != "meta":
        return shards.local(tensor).detach()
    given = None if weights is None else weights.get(name)  # once: it may be read from a file
    if given is None:
        return None
    whole = given.detach()
    if whole.shape != tensor.shape:
        raise _refused(f"parameter {name} is {list(tensor.shape)}, but {list(whole.shape)} in the weights")
    value = shards.part(tensor, whole)
    if value is None:
        raise _refused(
            f"parameter {name} is distributed otherwise in the weights; give it whole, or with the mesh and the "
            "placements of the parameter"
        )
    return value.to(tensor.dtype)


def replace(name: str, tensor: torch.Tensor, local: torch.Tensor) -> None:
    """A tensor on meta cannot get data of another device: it becomes another one, which is the same object."""
    real: Any = torch.nn.Parameter(shards.like(tensor, local), requires_grad=tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    if getattr(tensor, "grad_dtype", tensor.dtype) != tensor.dtype:
        real.grad_dtype = tensor.grad_dtype
    try:
        torch.utils.swap_tensors(tensor, real)
    except RuntimeError as error:
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"parameter {name} cannot leave meta: {error}; build the optimizer before anything else keeps the model's "
            "parameters",
        ) from error


def _refused(what: str) -> Error:
    return Error(grpc.StatusCode.INVALID_ARGUMENT, what)
