"""Hands gradients over, while backward still runs where that is known to do no harm (_torch_overlap.py).

A gradient belongs to the training loop until ``step()``: what was handed over early is checked there, before anything
is committed, and handed over again if the loop has changed it. A bucket goes to the daemon when all its parameters have
arrived.
"""

import abc
import os
import weakref
from collections.abc import Callable

import grpc
import torch

from superoffload import _memory, _torch_warn
from superoffload._attachment import Attachment, StepResult
from superoffload._error import Error
from superoffload._torch_interrupt import CutOff
from superoffload._torch_overlap import Overlap, OverlapPolicy
from superoffload._torch_parameters import HostedParameter

_SAMPLE_EVERY_BYTES = 4096


def _make_hook(hand_over: "weakref.ref[HandOver]", index: int) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        alive = hand_over()
        if alive is not None:
            alive.on_gradient(index)

    return hook


class HandOver(abc.ABC):
    """The open step as the trainer sees it, wherever its gradients are.

    ``prepare_step`` is called before each BEGIN_STEP and sends hyper-parameters. It is a weak reference, as are the
    hooks: a model must not keep its optimizer alive.
    """

    def __init__(
        self,
        attachment: Attachment,
        hosted: list[HostedParameter],
        overlap: Overlap,
        prepare_step: weakref.WeakMethod,
    ) -> None:
        self._attachment = attachment
        self._hosted = hosted
        self._policy = OverlapPolicy(overlap, len(hosted))
        self._prepare_step = prepare_step
        self._parts = [0] * len(attachment.optimizer.layout.buckets)
        for parameter in hosted:
            for bucket in parameter.buckets:
                self._parts[bucket] += 1
        self.expected_scale = 1.0  # gradient scale of the step before
        self._begun = False
        self.cut_off = CutOff()
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
        self._taken: set[int] = set()
        self._arrived: set[int] = set()
        self._asked_for_norm = False  # of the open step: the loop may still change its gradients
        self._finishing = False  # backward is over

    def on_gradient(self, index: int) -> None:
        """Autograd has accumulated a gradient of parameter `index`."""
        if self.cut_off.happened:
            return  # the next call of the optimizer settles that; step() takes what it finds
        with self.cut_off:
            outstanding = self._policy.count(index)
            if index in self._arrived:
                self._on_late_gradient(index)
            elif self._policy.watched and outstanding <= 0:
                self._take_now(index)
            elif self._policy.early and outstanding == 0:
                self._take_now(index)
                self._arrive(index)

    def _take_now(self, index: int) -> None:
        gradient = self._hosted[index].tensor.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"the gradient of {self._hosted[index].name} is {gradient.layout}; build the layer with sparse=False",
            )
        self._take(index)
        self._taken.add(index)

    @abc.abstractmethod
    def _on_late_gradient(self, index: int) -> None:
        """The gradient of parameter `index` has grown after it was handed over."""

    @abc.abstractmethod
    def _take(self, index: int) -> None:
        """Remembers the gradient of parameter `index` as it is now, None included."""

    @abc.abstractmethod
    def _find_edited(self) -> str | None:
        """The parameter whose gradient the loop has written or replaced since it was taken, if any."""

    @abc.abstractmethod
    def _outdated(self) -> bool:
        """Whether a gradient that was taken has grown or gone since, by the loop's backward passes and zero_grad()."""

    @abc.abstractmethod
    def _hand_over(self, bucket: int) -> None:
        """All gradients of the bucket have arrived."""

    @abc.abstractmethod
    def _wait_end(self) -> StepResult:
        """The step has ended: waits for what the trainer needs of it."""

    def _arrive(self, index: int) -> None:
        self._arrived.add(index)
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

    def has_gradients(self) -> bool:
        """Whether step() has anything to do."""
        return any(parameter.tensor.grad is not None for parameter in self._hosted)

    def abandon(self) -> None:
        """Drops what was handed over, if anything. Gradients stay what they are."""
        if self._begun:
            self._attachment.abandon_step()
            self._attachment.wait_step()
            self._begun = False
        self._reset()

    def settle(self, committed_steps: int) -> StepResult | None:
        """After a call was cut off: ends the step that was under way. Returns its result if it was committed.

        ``committed_steps``: of which the optimizer knows.
        """
        result = self._attachment.settle()
        self._begun = False
        self.abandon()
        self._policy.on_step_end()
        return result if result is not None and result.committed_steps > committed_steps else None

    def _start_over(self) -> None:
        """Drops what was handed over, in order to hand gradients over as they are now."""
        self.abandon()

    def on_zero_grad(self) -> None:
        self._policy.on_zero_grad()
        if self._arrived:  # too early, as it turns out
            self._policy.on_surprise()
        self.abandon()

    def finish(self) -> None:
        """Hands over whatever is left, and again what has changed since it was handed over."""
        self._finishing = True
        edited = None if self._outdated() else self._find_edited()
        if edited is not None and self._policy.on:
            self._policy.turn_off()
            _torch_warn.warn(
                f"the gradient of {edited} was changed between backward and step(): from now on gradients are handed "
                "over in step(), without overlap with backward (clip with max_grad_norm= or "
                "torch.nn.utils.clip_grad_norm_ to keep it; overlap=False says that this is meant)"
            )
        if edited is not None or self._outdated():
            self._start_over()
        for index in range(len(self._hosted)):
            if index not in self._taken:
                self._take_now(index)
            if index not in self._arrived:
                self._arrive(index)

    def wait_norm(self) -> float:
        """Hands over whatever is left and returns the norm of the gradients as they are."""
        self._asked_for_norm = True
        self.finish()
        return self._attachment.wait_norm(1.0)

    def end(self, gradient_scale: float, max_grad_norm: float) -> StepResult:
        """Ends the step and waits until training can go on. All gradients must have been handed over."""
        self._attachment.end_step(gradient_scale, max_grad_norm)
        result = self._wait_end()
        self.expected_scale = gradient_scale
        self._begun = False
        self._policy.on_step_end()
        self._reset()
        return result


class HostHandOver(HandOver):
    """Taking a gradient copies it to a slot that the daemon shares; ``.grad`` stays the loop's own tensor."""

    def _reset(self) -> None:
        super()._reset()
        self._late = False
        self._versions: dict[int, tuple[int, int]] = {}  # address and version of gradients that were taken

    def _slot(self, index: int) -> torch.Tensor:
        return self._hosted[index].slots[self._attachment.next_slot]

    def _on_late_gradient(self, index: int) -> None:
        self._late = True  # the daemon may be reading the slot: it is handed over again in step()

    @torch.no_grad()
    def _take(self, index: int) -> None:
        gradient = self._hosted[index].tensor.grad
        if gradient is None:
            self._slot(index).zero_()
            return
        self._slot(index).copy_(gradient)
        self._versions[index] = gradient.data_ptr(), gradient._version

    def _outdated(self) -> bool:
        return self._late or any((self._hosted[i].tensor.grad is None) == (i in self._versions) for i in self._taken)

    def _find_edited(self) -> str | None:
        samples, whole = [], []
        for index, taken in self._versions.items():
            gradient, slot = self._hosted[index].tensor.grad, self._slot(index)
            if gradient.dtype != slot.dtype or not gradient.is_contiguous():
                gradient = gradient.to(slot.dtype).contiguous()
                taken = None
            unwritten = self._policy.early and taken == (gradient.data_ptr(), gradient._version)
            (samples if unwritten else whole).append((index, gradient))
        for group, every in ((samples, _SAMPLE_EVERY_BYTES), (whole, 0)):
            runs = [(gradient.data_ptr(), self._slot(index).data_ptr(), gradient.nbytes) for index, gradient in group]
            random = int.from_bytes(os.urandom(4), "little")
            found = _memory.find_difference(runs, torch.get_num_threads(), every, random)
            if found is not None:
                return self._hosted[group[found][0]].name
        return None

    def _hand_over(self, bucket: int) -> None:
        self._attachment.gradient_ready(bucket)

    def _wait_end(self) -> StepResult:
        return self._attachment.wait_step()
