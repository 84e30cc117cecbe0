"""The scale of its gradients that torch's GradScaler leaves at the optimizer for one step().

When step() raises, the GradScaler does not take it back, and multiplies the scale of its next step onto it.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import grpc
import torch

from superoffload._core.error import Error

ATTRIBUTES = ("grad_scale", "found_inf")  # of the optimizer, for one step


class GradScale:
    """What a GradScaler has left at one optimizer."""

    def __init__(self) -> None:
        self._scaled: list[weakref.ref[torch.Tensor]] = []  # gradients of a step that raised

    def take(self, optimizer: Any, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Returns the scale of a step that begins, or None. Raises Error for gradients that are still scaled."""
        if hasattr(optimizer, "grad_scale"):
            return optimizer.grad_scale
        if not self._scaled:
            return None
        scaled = [gradient() for gradient in self._scaled]
        if any(tensor.grad is not None and any(tensor.grad is gradient for gradient in scaled) for tensor in tensors):
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                "these gradients are still scaled: a GradScaler's step with them has raised. Call "
                "scaler.step(optimizer) again, or the optimizer's zero_grad() and compute them anew",
            )
        return None

    def on_error(self, optimizer: Any, tensors: Iterable[torch.Tensor]) -> None:
        """The step has raised."""
        if getattr(optimizer, "grad_scale", None) is not None:
            self._scaled = [weakref.ref(tensor.grad) for tensor in tensors if tensor.grad is not None]
        for name in ATTRIBUTES:
            vars(optimizer).pop(name, None)

    def forget(self) -> None:
        """The gradients have had their step, or are gone."""
        self._scaled = []
