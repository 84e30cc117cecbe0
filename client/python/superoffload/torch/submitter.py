"""Submits gradients, while backward still runs where that is known to do no harm (guards/overlap.py).

A gradient belongs to the training loop until ``step()``: what was submitted early is checked there, before anything
is committed, and submitted again if the loop has changed it. The library counts what a bucket of the daemon's lacks.
"""

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence

import grpc
import torch

from superoffload._core import run_step
from superoffload._core.attachment import Attachment
from superoffload._core.error import Error
from superoffload._core.run_step import For
from superoffload._core.step_result import StepResult
from superoffload.torch.eager import eager
from superoffload.torch.guards.clip_calls import ClipCalls
from superoffload.torch.guards.overlap import Overlap, OverlapPolicy
from superoffload.torch.interrupt import CutOff
from superoffload.torch.parameters import HostedParameter
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.replicas import Replicas
from superoffload.torch.ranks.sharding import Sharding


def _make_hook(submitter: "weakref.ref[Submitter]", index: int) -> Callable[[torch.Tensor], None]:
    @eager
    def hook(_: torch.Tensor) -> None:
        alive = submitter()
        if alive is not None:
            alive.on_gradient(index)

    return hook


class Submitter(abc.ABC):
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
        sharding: Sharding | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self._attachment = attachment
        self._hosted = hosted
        self._policy = OverlapPolicy(overlap, len(hosted), alone=sharding is None)
        self._prepare_step = prepare_step
        self._sharding = sharding
        self._replicas = replicas
        self._begun = False
        self.cut_off = CutOff()
        self.clip = ClipCalls(self.trained(), self.scale, alone=sharding is None)
        self._reset()
        self._handles = [
            parameter.tensor.register_post_accumulate_grad_hook(_make_hook(weakref.ref(self), index))
            for index, parameter in enumerate(hosted)
        ]
        self._indices = {id(parameter.tensor): index for index, parameter in enumerate(hosted)}
        self._given: dict[int, torch.Tensor] = {}  # gradients that are not yet in .grad
        # In a run of several ranks hooks see gradients of whole parameters before anybody has averaged them.
        self._seen_reduced = [sharding is None or shards.is_sharded(parameter.tensor) for parameter in hosted]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _reset(self) -> None:
        self._taken: set[int] = set()
        self._arrived: set[int] = set()
        self._asked_for_norm = False  # of the open step: the loop may still change its gradients
        self._finishing = False  # backward is over

    def on_gradient(self, index: int) -> None:
        """Autograd has accumulated a gradient of parameter `index`."""
        if self.cut_off.happened:
            return  # the next call of the optimizer settles that; step() takes what it finds
        tensor = self._hosted[index].tensor
        if not self._seen_reduced[index] or not shards.is_reduced(tensor):
            return  # step() takes it
        if not getattr(tensor, "ds_grad_is_ready", True):
            return  # a layer in tiles, each with a backward of its own: DeepSpeed's last one says that it is ready
        with self.cut_off:
            self._on_final(index, self._policy.count(index))

    def _on_final(self, index: int, outstanding: int) -> None:
        if index in self._arrived:
            self._on_late_gradient(index)
        elif self._policy.watched and outstanding <= 0:
            self._take_now(index)
        elif self._policy.early and outstanding == 0:
            self._take_now(index)
            self._arrive([index])

    def expect(
        self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[bool, list[tuple[int, int, torch.Tensor]]]:
        """Gradients of whole parameters that somebody has begun to average; `on_averaged` takes what is returned.

        First: whether the step is watched, so that they are worth waiting for.
        """
        expected: list[tuple[int, int, torch.Tensor]] = []
        if self.cut_off.happened:
            return False, expected
        for tensor, gradient in gradients:
            index = self._indices.get(id(tensor))
            if index is not None:
                expected.append((index, self._policy.count(index), gradient))
        return self._policy.watched, expected

    def beside_backward(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the GPU's work waits for what backward is not to wait for."""
        return contextlib.nullcontext()

    @torch.no_grad()
    def on_averaged(self, expected: Iterable[tuple[int, int, torch.Tensor]]) -> None:
        """They are averaged; ``.grad`` will be the same once backward is over."""
        if self.cut_off.happened:
            return
        with self.cut_off:
            for index, outstanding, gradient in expected:
                hosted = self._hosted[index]
                if hosted.tensor.grad is None:
                    continue  # whether it has one is known after backward
                self._given[index] = shards.rows_of(gradient, hosted.rows)
                self._on_final(index, outstanding)
                self._given.pop(index)

    def on_averages_in_place(self) -> None:  # noqa: B027, not all submitters need to know
        """Backward is over, and ``.grad`` is what `on_averaged` was given."""

    def _take_now(self, index: int) -> None:
        gradient = self._hosted[index].gradient
        if gradient is not None and gradient.layout != torch.strided:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"the gradient of {self._hosted[index].name} is {gradient.layout}; build the layer with sparse=False",
            )
        self._take(index)
        self._taken.add(index)

    @abc.abstractmethod
    def _on_late_gradient(self, index: int) -> None:
        """The gradient of parameter `index` has grown after it was submitted."""

    @abc.abstractmethod
    def _take(self, index: int) -> None:
        """Remembers the gradient of parameter `index` as it is now, None included."""

    @abc.abstractmethod
    def _find_edited(self) -> str | None:
        """The parameter whose gradient the loop has written or replaced since it was taken, if any."""

    def _is_present(self, gradient: torch.Tensor) -> bool:
        """Whether it is one, and does not stand for what has gone."""
        return True

    def _check_present(self) -> None:  # noqa: B027, on the CPU they are always there
        """Raises Error when a gradient is not the loop's any more."""

    @abc.abstractmethod
    def _outdated(self) -> bool:
        """Whether a gradient that was taken has grown or gone since, by the loop's backward passes and zero_grad()."""

    @abc.abstractmethod
    def scale(self, factor: float) -> bool:
        """Multiplies all of ``.grad``. Returns whether the open step goes on with what was submitted of it."""

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        given = [shards.gradient(tensor) for tensor in self.trained()]
        gradients = [gradient for gradient in given if gradient is not None and self._is_present(gradient)]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    @abc.abstractmethod
    def _hand_over(self, indices: Sequence[int]) -> None:
        """Gives the library the gradients of these parameters, which were taken. The step has begun."""

    @abc.abstractmethod
    def _wait_end(self) -> StepResult:
        """The step has ended: waits for what the trainer needs of it."""

    def _arrive(self, indices: Sequence[int]) -> None:
        self._begin()
        self._arrived.update(indices)
        for index in indices:
            if self._hosted[index].tensor.grad is None:  # left alone, as in torch
                self._attachment.set_absent(index)
        self._hand_over([index for index in indices if self._hosted[index].tensor.grad is not None])

    def _begin(self) -> None:
        if self._begun:
            return
        prepare_step = self._prepare_step()
        assert prepare_step is not None, "its optimizer has submitters only while it lives"
        prepare_step()
        self._begun = True

    def on_grad_scaler(self, used: bool) -> None:  # noqa: B027, not all submitters need to know
        """step() is about to end a step, called by a GradScaler or not."""

    def trained(self) -> list[torch.Tensor]:
        """The optimizer's parameters, of which other ranks may host a part or all."""
        return list(self._sharding.trained) if self._sharding is not None else [p.tensor for p in self._hosted]

    @property
    def overlaps(self) -> bool:
        """Whether gradients may be submitted before step()."""
        return self._policy.on

    @property
    def watched(self) -> bool:
        """Whether the loop is being watched in the open step."""
        return self._policy.watched

    def has_gradients(self) -> bool:
        """Whether step() has anything to do."""
        return any(tensor.grad is not None for tensor in self.trained())

    def abandon(self) -> None:
        """Drops what was submitted, if anything. Gradients stay what they are."""
        if self._begun and self._attachment.look().begun:
            self._attachment.abandon_step()
            self._attachment.wait_step()
        self._begun = False
        self._reset()
        self.clip.on_abandoned()

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
        """Drops what was submitted, in order to submit gradients as they are now."""
        self.abandon()

    def on_zero_grad(self) -> None:
        self._policy.on_zero_grad()
        if self._arrived:  # too early, as it turns out
            self._policy.on_surprise()
        self.abandon()

    def finish(self) -> None:
        """Submits whatever is left, and again what has changed since it was submitted."""
        self._check_present()
        self.clip.check()
        self._finishing = True
        if self._sharding is not None:
            self._sharding.reduce_gradients()
        edited = None if self._outdated() else self._find_edited()
        if edited is not None or self._outdated():
            self.clip.on_edited()
            if edited is not None and self._policy.on:
                self._policy.on_edit(edited)
            self._start_over()
            self._finishing = True
        for index in range(len(self._hosted)):
            if index not in self._taken:
                self._take_now(index)
        if rest := [index for index in range(len(self._hosted)) if index not in self._arrived]:
            self._arrive(rest)

    def check_gone(self) -> None:  # noqa: B027, on the CPU none goes
        """After finish(): raises Error when a gradient was written whose memory was given back. Waits for the GPU."""

    def wait_norm(self) -> float:
        """Submits whatever is left and returns the norm of the gradients as they are."""
        self._asked_for_norm = True
        with self.told():
            self.finish()
            self.check_gone()
            if self._sharding is None:
                return self._attachment.wait_norm(1.0)
            own = self._attachment.wait_sum()
        return run_step.gather_norm(self._sharding.group, own)

    def told(self) -> contextlib.AbstractContextManager[None]:
        """What is refused inside, where ranks gather nothing, is raised on all of them."""
        return run_step.told(None if self._sharding is None else self._sharding.group, self._attachment)

    def check_empty(self) -> None:
        """Raises Error on all ranks where another one has gradients."""
        if self._sharding is not None:
            run_step.gather(self._sharding.group, For.EMPTY)

    def end(self, gradient_scale: float, max_grad_norm: float) -> StepResult:
        """Ends the step and waits until training can go on. All gradients must have been submitted."""
        if self._sharding is None or self._replicas is None:
            self._attachment.end_step(gradient_scale, max_grad_norm)
        else:
            # The loop averages these over the ranks, if anybody does.
            self._replicas.check_gradients([p for p in self._sharding.trained if not shards.is_sharded(p)])
            run_step.end_step(self._attachment, self._sharding.group, gradient_scale, max_grad_norm)
        result = self._wait_end()
        self._begun = False
        self._policy.on_step_end()
        self._reset()
        return result
