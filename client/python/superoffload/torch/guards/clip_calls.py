"""What the clip_grad_norm_ calls of a loop do to its gradients.

torch scales ``.grad`` in place. The daemon scales what it was given, which saves a pass over all gradients before the
verdict. ``.grad`` is scaled when somebody uses it first, at the latest when the step is over.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch.guards.gradient_watch import GradientWatch
from superoffload.torch.hooks import eager, weakly
from superoffload.torch.ranks import shards

_EPSILON = 1e-6  # torch adds it to the norm, and so does the daemon


class ClipCalls:
    """Each call scales the gradients that those before it have left.

    ``scale`` multiplies all of ``.grad``, and returns whether what was submitted stands for them still. ``alone``: in
    one rank. In several FSDP and DistributedDataParallel have the memory of gradients, too.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], scale: Callable[[float], bool], *, alone: bool) -> None:
        self._tensors = tensors
        self._scale = weakly(scale, passes=1)
        self._watch = GradientWatch(tensors, weakly(self._on_use), sees_memory=alone)
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self.drop()

    def drop(self) -> None:
        """The gradients are as they are, or no longer there."""
        self._watch.end()
        self.threshold: float | None = None  # of the norm of what was submitted; None does not clip
        self._coefficient = 1.0  # of the gradients, to the loop
        self._scaled_by = 1.0  # of that, what ``.grad`` has had
        self._is_changed = False  # in a way that nobody can tell what the loop meant

    def close(self) -> None:
        """Gradients that are still there are scaled: whoever has them next may use them."""
        for hook in self._hooks.values():
            hook.remove()
        self.on_step_end()

    @property
    def _is_due(self) -> bool:
        """Whether ``.grad`` is not what the loop takes it for."""
        return self._coefficient != self._scaled_by

    def add(self, max_norm: float, norm: float) -> float:
        """Adds a call; ``norm``: of what was submitted. Returns the norm that the call before has left."""
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
            if self._scaled_by != 1:
                self._on_use()
            self._hook()
        return left

    @contextlib.contextmanager
    def in_own_hands(self) -> Iterator[None]:
        """Inside, nobody else uses the gradients."""
        self._watch.end()
        try:
            yield
        finally:
            if self._is_due and self._watch.is_late():
                self._on_use()
            elif self._is_due:
                self._watch.begin()

    def on_step_end(self, unscaling: float = 1.0) -> None:
        """What is left of the gradients becomes what torch leaves. ``unscaling``: of a GradScaler's step."""
        factor = unscaling * self._coefficient / self._scaled_by
        self.drop()
        if factor != 1:
            self._scale(factor)

    def on_abandoned(self) -> None:
        """What was submitted is dropped, and ``.grad`` is submitted next."""
        if not self._is_due:
            self.drop()

    def check(self) -> None:
        """Raises Error for gradients that were changed when they were not what the loop took them for."""
        if self._is_changed and any(tensor.grad is not None for tensor in self._tensors):
            raise _changed()

    def on_edited(self) -> None:
        """Gradients that were submitted have been changed unseen: raises Error if they were not scaled by then."""
        if self._is_due:
            self._is_changed = True
            raise _changed()

    def _on_use(self) -> None:
        """Somebody is about to use gradients."""
        if not self._is_due:
            return
        self._watch.end()
        factor, self._scaled_by = self._coefficient / self._scaled_by, self._coefficient
        if not self._scale(factor):
            self.drop()

    def _hook(self) -> None:
        """Has backward passes that add to the gradients use them."""
        for index, tensor in enumerate(self._tensors):
            if index in self._hooks or not tensor.requires_grad:
                continue
            if shards.is_sharded(tensor):  # FSDP adds to .grad itself
                self._hooks[index] = tensor.register_post_accumulate_grad_hook(eager(weakly(self.on_edited)))
            else:
                self._hooks[index] = tensor.register_hook(eager(weakly(self._on_use)))


def _changed() -> Error:
    return Error(
        grpc.StatusCode.FAILED_PRECONDITION,
        "gradients that clip_grad_norm_ had clipped were changed where nobody could see it, through memory that was "
        "taken from .grad before; the daemon clips, and .grad was as before. Nothing was committed: call the "
        "optimizer's zero_grad(), compute the gradients again, and clip after the last change (overlap=False has "
        "clip_grad_norm_ scale .grad at once, where no rank has only a part of the model)",
    )
