"""Submits gradients, while backward still runs where that is known to do no harm (overlap.py).

A gradient belongs to the training loop until ``step()``: what was submitted early is checked there, before anything
is committed, and submitted again if the loop has changed it. The library counts what a bucket of the daemon's lacks.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import grpc
import torch

from superoffload._core import run_step
from superoffload._core.attachment import Attachment
from superoffload._core.error import Error
from superoffload._core.run import Group
from superoffload._core.run_step import For
from superoffload._core.step_result import StepResult
from superoffload.torch.hooks import eager, weakly
from superoffload.torch.interrupt import CutOff
from superoffload.torch.overlap import Overlap, OverlapPolicy
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.shards import HostedParameter


class Clipping(Protocol):
    """What the loop's clip_grad_norm_ calls do to gradients; see guards/clip_calls.py."""

    threshold: float | None

    def in_own_hands(self) -> contextlib.AbstractContextManager[None]: ...
    def add(self, max_norm: float, norm: float) -> float: ...
    def check(self) -> None: ...
    def drop(self) -> None: ...
    def on_step_end(self, unscaling: float = 1.0) -> None: ...
    def on_abandoned(self) -> None: ...
    def on_edited(self) -> None: ...
    def close(self) -> None: ...


class Matrices(Protocol):
    """Sharded parameters that ranks' daemons host whole; see ranks/matrices.py."""

    @property
    def are_gathered(self) -> bool: ...
    def has_any(self) -> bool: ...
    def check_gradients(self) -> None: ...
    def find_edited(self) -> str | None: ...
    def agree(self, changed: bool) -> tuple[bool, bool]: ...
    def gather_gradients(self) -> None: ...
    def forget_gradients(self) -> None: ...
    def on_scaled(self) -> None: ...


class Ranks(Protocol):
    """The ranks that train together; see ranks/sharding.py."""

    @property
    def group(self) -> Group: ...
    @property
    def trained(self) -> list[torch.nn.Parameter]: ...
    def reduce_gradients(self) -> None: ...


class Replicas(Protocol):
    """Parameters of which several ranks have the same elements; see ranks/replicas.py."""

    def check_gradients(self, whole: list[torch.nn.Parameter]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Given:
    """What a submitter works with, wherever gradients are.

    ``prepare_step`` is called before each BEGIN_STEP and sends hyper-parameters. ``make_clipping`` takes the trained
    parameters and what multiplies all of their gradients. ``ranks`` and what follows: None where this one trains alone.
    """

    hosted: list[HostedParameter]
    overlap: Overlap
    prepare_step: Callable[[], None]
    make_clipping: Callable[[Sequence[torch.Tensor], Callable[[float], bool]], Clipping]
    ranks: Ranks | None = None
    replicas: Replicas | None = None
    matrices: Matrices | None = None


class Submitter(abc.ABC):
    """The open step as the trainer sees it, wherever its gradients are.

    Its hooks hold it weakly: a model must not keep its optimizer alive. What has no underscore is also for the
    submitters that derive from this one.
    """

    def __init__(self, attachment: Attachment, given: Given) -> None:
        self.attachment = attachment
        self.hosted = given.hosted
        self.ranks = given.ranks
        self._matrices = given.matrices if given.matrices is not None and given.matrices.has_any() else None
        self.policy = OverlapPolicy(given.overlap, len(given.hosted), alone=given.ranks is None)
        self._prepare_step = given.prepare_step
        self._replicas = given.replicas
        self.begun = False
        self.cut_off = CutOff()
        self.clip = given.make_clipping(self.trained(), self.scale)
        self.reset()
        self.handles = [
            parameter.tensor.register_post_accumulate_grad_hook(eager(weakly(self.on_gradient, index)))
            for index, parameter in enumerate(given.hosted)
        ]
        self.indices = {id(parameter.tensor): index for index, parameter in enumerate(given.hosted)}
        self.averages: dict[int, torch.Tensor] = {}  # gradients that are not yet in .grad
        # In a run of several ranks hooks see gradients of whole parameters before anybody has averaged them.
        # Those of matrices that it hosts whole it has in step() only.
        self._seen_reduced = [
            given.ranks is None or (shards.is_sharded(parameter.tensor) and parameter.matrix is None)
            for parameter in given.hosted
        ]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def reset(self) -> None:
        """Forgets the open step."""
        if self._matrices is not None:
            self._matrices.forget_gradients()
        self.taken: set[int] = set()
        self.arrived: set[int] = set()
        self.asked_for_norm = False  # of the open step: the loop may still change its gradients
        self.finishing = False  # backward is over

    def on_gradient(self, index: int) -> None:
        """Autograd has accumulated a gradient of parameter `index`."""
        if self.cut_off.happened:
            return  # the next call of the optimizer settles that; step() takes what it finds
        tensor = self.hosted[index].tensor
        if not self._seen_reduced[index] or not shards.is_reduced(tensor):
            return  # step() takes it
        if not getattr(tensor, "ds_grad_is_ready", True):
            return  # a layer in tiles, each with a backward of its own: DeepSpeed's last one says that it is ready
        with self.cut_off:
            self.on_final(index, self.policy.count(index))

    def on_final(self, index: int, outstanding: int) -> None:
        if index in self.arrived:
            self.on_late_gradient(index)
        elif self.policy.watched and outstanding <= 0:
            self._take_now(index)
        elif self.policy.early and outstanding == 0:
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
            index = self.indices.get(id(tensor))
            if index is not None:
                expected.append((index, self.policy.count(index), gradient))
        return self.policy.watched, expected

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
                hosted = self.hosted[index]
                if hosted.tensor.grad is None:
                    continue  # whether it has one is known after backward
                self.averages[index] = shards.rows_of(gradient, hosted.rows)
                self.on_final(index, outstanding)
                self.averages.pop(index)

    def on_averages_in_place(self) -> None:  # noqa: B027, not all submitters need to know
        """Backward is over, and ``.grad`` is what `on_averaged` was given."""

    def check_strided(self, index: int) -> None:
        """Raises Error for a gradient that is sparse."""
        gradient = self.hosted[index].gradient
        if gradient is not None and gradient.layout != torch.strided:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"the gradient of {self.hosted[index].name} is {gradient.layout}; build the layer with sparse=False",
            )

    def _take_now(self, index: int) -> None:
        self.check_strided(index)
        self.take(index)
        self.taken.add(index)

    @abc.abstractmethod
    def on_late_gradient(self, index: int) -> None:
        """The gradient of parameter `index` has grown after it was submitted."""

    @abc.abstractmethod
    def take(self, index: int) -> None:
        """Remembers the gradient of parameter `index` as it is now, None included."""

    @abc.abstractmethod
    def find_edited(self) -> str | None:
        """The parameter whose gradient the loop has written or replaced since it was taken, if any."""

    def is_present(self, gradient: torch.Tensor) -> bool:
        """Whether it is one, and does not stand for what has gone."""
        return True

    def check_present(self) -> None:  # noqa: B027, on the CPU they are always there
        """Raises Error when a gradient is not the loop's any more."""

    @abc.abstractmethod
    def outdated(self) -> bool:
        """Whether a gradient that was taken has grown or gone since, by the loop's backward passes and zero_grad()."""

    @abc.abstractmethod
    def scale(self, factor: float) -> bool:
        """Multiplies all of ``.grad``. Returns whether the open step goes on with what was submitted of it."""

    @torch.no_grad()
    def multiply(self, factor: float) -> None:
        """Multiplies what is there of ``.grad``, on this rank."""
        given = [shards.gradient(tensor) for tensor in self.trained()]
        gradients = [gradient for gradient in given if gradient is not None and self.is_present(gradient)]
        if gradients:
            torch._foreach_mul_(gradients, factor)
        if self._matrices is not None:
            self._matrices.on_scaled()

    @abc.abstractmethod
    def hand_over(self, indices: Sequence[int]) -> None:
        """Gives the library the gradients of these parameters, which were taken. The step has begun."""

    @abc.abstractmethod
    def wait_end(self) -> StepResult:
        """The step has ended: waits for what the trainer needs of it."""

    def _arrive(self, indices: Sequence[int]) -> None:
        self.begin()
        self.arrived.update(indices)
        absent = [index for index in indices if not self.hosted[index].has_gradient]  # left alone, as in torch
        if absent:
            self.attachment.set_absent(absent)
        self.hand_over([index for index in indices if self.hosted[index].has_gradient])

    def begin(self) -> None:
        if self.begun:
            return
        self._prepare_step()
        self.begun = True

    def on_grad_scaler(self, used: bool) -> None:  # noqa: B027, not all submitters need to know
        """step() is about to end a step, called by a GradScaler or not."""

    def trained(self) -> list[torch.Tensor]:
        """The optimizer's parameters, of which other ranks may host a part or all."""
        return list(self.ranks.trained) if self.ranks is not None else [p.tensor for p in self.hosted]

    @property
    def gave_to_others(self) -> bool:
        """Whether other ranks have submitted what they have of this rank's gradients in the open step."""
        return self._matrices is not None and self._matrices.are_gathered

    @property
    def overlaps(self) -> bool:
        """Whether gradients may be submitted before step()."""
        return self.policy.on

    @property
    def watched(self) -> bool:
        """Whether the loop is being watched in the open step."""
        return self.policy.watched

    def has_gradients(self) -> bool:
        """Whether step() has anything to do."""
        return any(tensor.grad is not None for tensor in self.trained())

    def abandon(self) -> None:
        """Drops what was submitted, if anything. Gradients stay what they are."""
        if self.begun and self.attachment.look().begun:
            self.attachment.abandon_step()
            self.attachment.wait_step()
        self.begun = False
        self.reset()
        self.clip.on_abandoned()

    def settle(self, committed_steps: int) -> StepResult | None:
        """After a call was cut off: ends the step that was under way. Returns its result if it was committed.

        ``committed_steps``: of which the optimizer knows.
        """
        result = self.attachment.settle()
        self.begun = False
        self.abandon()
        self.policy.on_step_end()
        return result if result is not None and result.committed_steps > committed_steps else None

    def start_over(self) -> None:
        """Drops what was submitted, in order to submit gradients as they are now."""
        self.abandon()

    def on_zero_grad(self) -> None:
        self.policy.on_zero_grad()
        if self.arrived:  # too early, as it turns out
            self.policy.on_surprise()
        self.abandon()

    def finish(self) -> None:
        """Submits whatever is left, and again what has changed since it was submitted."""
        self.check_present()
        self.clip.check()
        self.finishing = True
        if self.ranks is not None:
            self.ranks.reduce_gradients()
        edited = None if self.outdated() else self.find_edited()
        if self._matrices is not None:
            self._gather_matrices(self._matrices, edited)
        elif edited is not None or self.outdated():
            self._submit_again(edited)
        for index in range(len(self.hosted)):
            if index not in self.taken:
                self._take_now(index)
        if rest := [index for index in range(len(self.hosted)) if index not in self.arrived]:
            self._arrive(rest)

    def _submit_again(self, edited: str | None) -> None:
        """Gradients have changed; ``edited``: one that the loop has changed, if it was that."""
        self.clip.on_edited()
        if edited is not None and self.policy.on:
            self.policy.on_edit(edited)
        self.start_over()
        self.finishing = True

    def _gather_matrices(self, matrices: Matrices, edited: str | None) -> None:
        """Has owners take the gradients of their matrices. Where gradients of one rank have changed, all begin anew."""
        matrices.check_gradients()
        while True:
            edited = edited or matrices.find_edited()
            changed, alike = matrices.agree(edited is not None or self.outdated())
            if changed:
                self._submit_again(edited)
                edited = None
            elif not alike:  # a rank has dropped them
                self.start_over()
                self.finishing = True
            else:
                break
        matrices.gather_gradients()

    def check_gone(self) -> None:  # noqa: B027, on the CPU none goes
        """After finish(): raises Error when a gradient was written whose memory was given back. Waits for the GPU."""

    def wait_norm(self) -> float:
        """Submits whatever is left and returns the norm of the gradients as they are."""
        self.asked_for_norm = True
        with self.told():
            self.finish()
            self.check_gone()
            if self.ranks is None:
                return self.attachment.wait_norm(1.0)
            own = self.attachment.wait_sum()
        return run_step.gather_norm(self.ranks.group, own)

    def told(self) -> contextlib.AbstractContextManager[None]:
        """What is refused inside, where ranks gather nothing, is raised on all of them."""
        return run_step.told(None if self.ranks is None else self.ranks.group, self.attachment)

    def check_empty(self) -> None:
        """Raises Error on all ranks where another one has gradients."""
        if self.ranks is not None:
            run_step.gather(self.ranks.group, For.EMPTY)

    def end(self, gradient_scale: float, max_grad_norm: float) -> StepResult:
        """Ends the step and waits until training can go on. All gradients must have been submitted."""
        if self.ranks is None or self._replicas is None:
            self.attachment.end_step(gradient_scale, max_grad_norm)
        else:
            # The loop averages these over the ranks, if anybody does.
            self._replicas.check_gradients([p for p in self.ranks.trained if not shards.is_sharded(p)])
            run_step.end_step(self.attachment, self.ranks.group, gradient_scale, max_grad_norm)
        result = self.wait_end()
        self.begun = False
        self.policy.on_step_end()
        self.reset()
        return result
