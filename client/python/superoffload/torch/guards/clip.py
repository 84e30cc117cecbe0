"""torch.nn.utils.clip_grad_norm_ for parameters whose gradients the daemon holds.

Trainers (Hugging Face Trainer, accelerate, hand-written loops) clip between backward and step. By then the daemon has
the gradients and their norm, so for the parameters of a superoffload optimizer the call returns the daemon's norm and
leaves the threshold for the verdict; gradients themselves are scaled later (clip_calls.py). All other calls go to torch
unchanged, those on an optimizer that submits in step() as well, whose gradients are still the loop's.
"""

import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch.hooks import eager
from superoffload.torch.ranks import shards

# id of a parameter -> the optimizer that hosts it.
_owners: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def check_free(parameters: Iterable[torch.Tensor]) -> None:
    """Raises Error when another open optimizer hosts one of them."""
    parameters = list(parameters)
    if _owner(parameters) is not None:
        gc.collect()  # it may be part of a cycle that nobody has any more
    if (owner := _owner(parameters)) is not None:
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the parameters belong to superoffload optimizer {owner.name} already; close() that one first (Lightning "
            "has it in trainer.optimizers)",
        )


def _owner(parameters: Iterable[torch.Tensor]) -> Any:
    """Returns an optimizer that hosts one of them."""
    return next((owner for parameter in parameters if (owner := _owners.get(id(parameter))) is not None), None)


def register(optimizer: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Routes clipping of these parameters to ``optimizer.clip_grad_norm_``."""
    _install()
    for parameter in parameters:
        _owners[id(parameter)] = optimizer


def unregister(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        _owners.pop(id(parameter), None)


def _with_gradients(parameters: Iterable[torch.Tensor]) -> set[int]:
    """The ids of those that have one, of elements of this rank."""
    return {id(p) for p in parameters if p.grad is not None and shards.local(p).numel() > 0}


@functools.cache
def _install() -> None:
    original = torch.nn.utils.clip_grad_norm_

    @eager
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        owners = {id(owner): owner for p in parameters if (owner := _owners.get(id(p))) is not None}
        if all(owner.clips_as_torch() for owner in owners.values()):
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        (optimizer, *others) = owners.values()
        theirs, clipped = _with_gradients(optimizer.hosted_parameters()), _with_gradients(parameters)
        if others or clipped != theirs or float(norm_type) != 2.0:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                "clip_grad_norm_ covers more than one optimizer's gradients, or a part of them, or uses another norm "
                "than the 2-norm, and a superoffload optimizer has them already; build it with overlap=False to clip "
                "so. Else clip each optimizer's parameters by themselves, or pass max_grad_norm= to the optimizer",
            )
        norm = optimizer.clip_grad_norm_(max_norm)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        return norm

    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_
