"""Hands gradients over while backward still runs, and notices when that was too early.

Autograd calls a hook each time a parameter's gradient has been accumulated. How often that happens per step (micro
batches, reentrant checkpointing) is learned: a parameter is handed over when its hook ran as often as in the step
that had most calls so far, and everything that is left is handed over in ``step()``. The first step hands over
nothing early. A bucket goes to the daemon when all its parameters have arrived.
"""

import abc
import warnings
import weakref
from collections.abc import Callable

import grpc
import torch

from superoffload._attachment import Attachment, StepResult
from superoffload._error import Error
from superoffload._torch_parameters import HostedParameter


def _make_hook(hand_over: "weakref.ref[HandOver]", index: int) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        alive = hand_over()
        if alive is not None:
            alive.on_gradient(index)

    return hook


class HandOver(abc.ABC):
    """The open step as the trainer sees it, wherever its gradients are.

    ``prepare_step`` is called before each BEGIN_STEP; it sends hyper-parameters and raises Error when the step must
    not begin. It is a weak reference, as are the hooks: a model must not keep its optimizer alive.
    """

    def __init__(
        self,
        attachment: Attachment,
        hosted: list[HostedParameter],
        overlap: bool,
        prepare_step: weakref.WeakMethod,
    ) -> None:
        self._attachment = attachment
        self._hosted = hosted
        self._overlap = overlap
        self._prepare_step = prepare_step
        self._parts = [0] * len(attachment.optimizer.layout.buckets)
        for parameter in hosted:
            for bucket in parameter.buckets:
                self._parts[bucket] += 1
        self._expected_calls = [0] * len(hosted)
        self._calls = [0] * len(hosted)
        self.expected_scale = 1.0  # gradient scale of the step before
        self._begun = False
        self._reset()
        self._handles = [
            parameter.tensor.register_post_accumulate_grad_hook(_make_hook(weakref.ref(self), index))
            for index, parameter in enumerate(hosted)
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _reset(self) -> None:
        self._missing = list(self._parts)
        self._arrived_version: list[int | None] = [None] * len(self._hosted)

    def on_gradient(self, index: int) -> None:
        """Autograd has accumulated a gradient of parameter `index`."""
        if self._begun and self._arrived_version[index] is not None:
            raise self._late_gradient(index)
        self._take_gradient(index)
        self._calls[index] += 1
        if self._overlap and self._calls[index] == self._expected_calls[index]:
            self._arrive(index)

    @abc.abstractmethod
    def _take_gradient(self, index: int) -> None:
        """The gradient of parameter `index` is what it is now, None included; it may still grow."""

    @abc.abstractmethod
    def _version(self, index: int) -> int:
        """Of the gradient that was taken: changes when somebody writes it."""

    @abc.abstractmethod
    def _changed(self, index: int, tolerated_writes: int) -> bool:
        """Whether the gradient, which has arrived, was written or replaced since."""

    @abc.abstractmethod
    def _hand_over(self, bucket: int) -> None:
        """All gradients of the bucket have arrived."""

    @abc.abstractmethod
    def _wait_end(self) -> StepResult:
        """The step has ended: waits for what the trainer needs of it."""

    def _check_dense(self, index: int, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"the gradient of {self._hosted[index].name} is {gradient.layout}; build the layer with sparse=False",
            )

    def _arrive(self, index: int) -> None:
        self._arrived_version[index] = self._version(index)
        for bucket in self._hosted[index].buckets:
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self._begin()
                self._hand_over(bucket)

    def _begin(self) -> None:
        if self._begun:
            return
        self._prepare_step()()
        self._attachment.begin_step(self.expected_scale)
        self._begun = True

    def _late_gradient(self, index: int) -> Error:
        passes = self._calls[index] + 1
        self._expected_calls = [max(calls, passes) for calls in self._expected_calls]
        self.abandon()
        return Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{self._hosted[index].name} got another gradient after it had been handed over: this step runs more "
            "backward passes than the steps before, so this one ran on parameters that were already updated. The step "
            "was abandoned and the parameters are those before it; compute its gradients again, or build the optimizer "
            "with overlap=False if the number of backward passes per step changes (to drop gradients on purpose, call "
            "the optimizer's zero_grad)",
        )

    def abandon(self) -> None:
        """Drops the open step, if any; parameters are then those of the step before."""
        if self._begun:
            self._attachment.abandon_step()
            self._attachment.wait_step()
            self._begun = False
        self._calls = [0] * len(self._hosted)
        self._reset()

    def _edited(self, tolerated_writes: int) -> bool:
        """Whether a gradient was changed after it arrived."""
        return any(
            version is not None and self._changed(index, tolerated_writes)
            for index, version in enumerate(self._arrived_version)
        )

    def finish(self, tolerated_writes: int = 0) -> None:
        """Hands over whatever is left; gradients that were edited since they arrived are handed over again.

        ``tolerated_writes``: in-place writes per gradient that are known to have kept its value.
        """
        if self._edited(tolerated_writes):
            calls = self._calls
            self.abandon()
            self._calls = calls
            if self._overlap:
                self._overlap = False
                warnings.warn(
                    "gradients were changed between backward and step, after they had been handed over; from now on "
                    "they are handed over in step(), without overlap (clip with max_grad_norm= or "
                    "torch.nn.utils.clip_grad_norm_ to keep it)",
                    RuntimeWarning,
                    stacklevel=3,
                )
        for index, version in enumerate(self._arrived_version):
            if version is None:
                self._take_gradient(index)
                self._arrive(index)

    def wait_norm(self) -> float:
        """Hands over whatever is left and returns the norm of the gradients as they are."""
        self.finish()
        return self._attachment.wait_norm(1.0)

    def end(self, gradient_scale: float, max_grad_norm: float) -> StepResult:
        """Ends the step and waits until training can go on. All gradients must have been handed over."""
        self._attachment.end_step(gradient_scale, max_grad_norm)
        result = self._wait_end()
        self.expected_scale = gradient_scale
        self._begun = False
        self._expected_calls = [max(pair) for pair in zip(self._expected_calls, self._calls, strict=True)]
        self._calls = [0] * len(self._hosted)
        self._reset()
        for parameter in self._hosted:
            parameter.tensor.grad = None  # the daemon reads this slot until the next step has been absorbed
        return result


class HostHandOver(HandOver):
    """Gradients lie in slots that the daemon shares; autograd's are moved there as they come."""

    def _slot(self, index: int) -> torch.Tensor:
        return self._hosted[index].slots[self._attachment.next_slot]

    def _take_gradient(self, index: int) -> None:
        tensor, slot = self._hosted[index].tensor, self._slot(index)
        gradient = tensor.grad
        if gradient is slot:
            return
        if gradient is None:
            slot.zero_()
            return
        self._check_dense(index, gradient)
        with torch.no_grad():
            slot.copy_(gradient)
        tensor.grad = slot

    def _version(self, index: int) -> int:
        return self._slot(index)._version

    def _changed(self, index: int, tolerated_writes: int) -> bool:
        slot, gradient = self._slot(index), self._hosted[index].tensor.grad
        replaced = gradient is not slot and (gradient is not None or self._calls[index] > 0)
        version = self._arrived_version[index]
        return replaced or slot._version not in (version, version + tolerated_writes)

    def _hand_over(self, bucket: int) -> None:
        self._attachment.gradient_ready(bucket)

    def _wait_end(self) -> StepResult:
        return self._attachment.wait_step()
