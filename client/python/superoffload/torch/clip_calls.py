"""What the clip_grad_norm_ calls of a loop do to its gradients.

torch scales ``.grad`` in place. The daemon scales what it was given, and ``.grad`` stays as it is, which saves a pass
over all gradients. A loop that goes on with gradients that were clipped, in the open step or after it, has them scaled
first.
"""

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Sequence

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch import shards

_EPSILON = 1e-6  # torch adds it to the norm, and so does the daemon


class ClipCalls:
    """Each call scales the gradients that those before it have left."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.drop()

    def drop(self) -> None:
        """The gradients are no longer there."""
        self.threshold: float | None = None  # of the norm of the gradients as they are; None does not clip
        self._coefficient = 1.0
        self._unscaled: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # and their versions

    def close(self) -> None:
        """Gradients that are still there are scaled: whoever has them next may use them."""
        for hook in self._hooks:
            hook.remove()
        with contextlib.suppress(Error):
            self._scale()

    def add(self, max_norm: float, norm: float) -> float:
        """One more; ``norm``: of the gradients as they are. Returns the norm that the call before has left."""
        max_norm = float(max_norm)
        if math.isnan(max_norm) or max_norm < 0:
            raise ValueError(f"max_norm is {max_norm} but must be at least 0; math.inf does not clip")
        if not math.isfinite(norm):
            return norm  # the step will be skipped
        left = norm * self._coefficient
        if max_norm < left + _EPSILON:
            coefficient = self._coefficient * max_norm / (left + _EPSILON)
            self.threshold = max_norm if self._coefficient == 1 else coefficient * (norm + _EPSILON)
            # To the daemon 0 means not to clip. This rounds gradients to zero.
            self.threshold = max(self.threshold, sys.float_info.min)
            self._coefficient = self.threshold / (norm + _EPSILON)
            self._remember()
        return left

    def on_step_end(self) -> None:
        self.threshold = None
        if self._unscaled:
            self._remember()

    def clipped(self) -> bool:
        """Whether the gradients that are about to be submitted were clipped in this step and are not scaled."""
        if self.threshold is None:
            self._scale()  # what the step before has left
        return self.threshold is not None

    def _remember(self) -> None:
        self._unscaled = {
            index: (weakref.ref(tensor.grad), tensor.grad._version)
            for index, tensor in enumerate(self._tensors)
            if tensor.grad is not None
        }
        if not self._hooks:
            calls = weakref.ref(self)
            for index, tensor in enumerate(self._tensors):
                if shards.is_sharded(tensor):  # FSDP adds to .grad itself
                    self._hooks.append(tensor.register_post_accumulate_grad_hook(_after(calls, index)))
                else:
                    self._hooks.append(tensor.register_hook(_before(calls)))

    def _is_left(self, index: int) -> bool:
        gradient = self._tensors[index].grad
        return gradient is not None and index in self._unscaled and self._unscaled[index][0]() is gradient

    @torch.no_grad()
    def _scale(self) -> None:
        """The gradients that are still there are about to be used again."""
        unscaled, coefficient = self._unscaled, self._coefficient
        left = list(filter(self._is_left, unscaled))
        self.drop()
        for index in left:
            gradient = self._tensors[index].grad
            assert gradient is not None, "is left"
            if gradient._version == unscaled[index][1]:
                gradient.mul_(coefficient)
            elif bool(gradient.any()):  # not zeroed
                raise changed()

    def on_accumulation(self) -> None:
        """Backward is about to add to a gradient."""
        if not self._unscaled:
            return
        replaced = [self._tensors[index].grad for index in self._unscaled if not self._is_left(index)]
        if any(gradient is not None and bool(gradient.any()) for gradient in replaced):
            self.drop()
            raise changed()
        self._scale()

    def on_accumulated(self, index: int) -> None:
        """A gradient has been added, to nothing if all is well."""
        is_left = self._is_left(index)
        self.drop()
        if is_left:
            raise changed()


def changed() -> Error:
    return Error(
        grpc.StatusCode.FAILED_PRECONDITION,
        "gradients that clip_grad_norm_ had clipped were changed; the daemon clips, and .grad is as it was before. "
        "Nothing was committed: call the optimizer's zero_grad(), compute the gradients again, and clip after the last "
        "change (overlap=False has clip_grad_norm_ scale .grad itself, where no rank has only a part of the model)",
    )


def _before(calls: "weakref.ref[ClipCalls]") -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        alive = calls()
        if alive is not None:
            alive.on_accumulation()

    return hook


def _after(calls: "weakref.ref[ClipCalls]", index: int) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        alive = calls()
        if alive is not None:
            alive.on_accumulated(index)

    return hook
