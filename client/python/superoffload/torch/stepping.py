"""The open step: from its first gradient to its verdict, and what becomes of it when a call is cut off."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from superoffload._core import skips, warn
from superoffload._core.attachment import Attachment
from superoffload._core.error import Error
from superoffload._core.step_result import StepResult, VerdictKind
from superoffload.torch import groups, interrupt
from superoffload.torch.live import LiveParameters
from superoffload.torch.submitter import Submitter


class Waits(Protocol):
    """Forward passes that wait for parameters on a GPU; see gpu/forward.py."""

    def before_step_end(self) -> None: ...
    def on_step_end(self, changed: bool, watched: bool) -> None: ...


class Stepping:
    """``forward_waits``: None where parameters are there when a step is over, on the CPU."""

    def __init__(
        self,
        attachment: Attachment,
        live: LiveParameters,
        submitter: Submitter,
        send_groups: Callable[[list[dict[str, Any]]], None],
        forward_waits: Waits | None,
    ) -> None:
        self._attachment = attachment
        self._live = live
        self._submitter = submitter
        self._send_groups = send_groups
        self._forward_waits = forward_waits
        self._clip = submitter.clip
        self._warned_of_empty_step = False
        self.last_result: StepResult | None = None
        self.skipped_steps: dict[VerdictKind, int] = {kind: 0 for kind in VerdictKind if kind.skipped}

    def committed_steps(self) -> int:
        return self.last_result.committed_steps if self.last_result else self._attachment.optimizer.committed_steps

    def step(self, param_groups: list[dict[str, Any]], grad_scale: torch.Tensor | None, max_grad_norm: float | None):
        """Returns False when there was nothing to do. ``grad_scale``: of a GradScaler."""
        if not self._submitter.has_gradients():
            self._on_empty_step()
            return False
        with self._clip.in_own_hands():
            with self._submitter.told():
                unscaling, threshold = self._finish_backward(param_groups, grad_scale, max_grad_norm)
            watched = self._submitter.watched
            result = self._submitter.end(groups.sign(param_groups) * unscaling, threshold)
            self._clip.on_step_end(unscaling)
        self._on_result(result, watched, may_skip=grad_scale is not None)
        return True

    def _finish_backward(
        self, param_groups: list[dict[str, Any]], grad_scale: torch.Tensor | None, max_grad_norm: float | None
    ) -> tuple[float, float]:
        """Submits what is left of the gradients.

        Returns what they are to be multiplied with, and their norm's threshold after that; 0 does not clip.
        """
        check_parameters = self._live.begin_check()  # a GPU compares while it still has backward to do
        self._submitter.on_grad_scaler(grad_scale is not None)
        self._submitter.finish()
        self._send_groups(param_groups)
        self._check(check_parameters)
        self._submitter.check_gone()
        unscaling = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        thresholds = [
            t for t in (self._clip.threshold and self._clip.threshold * unscaling, max_grad_norm) if t is not None
        ]
        if self._forward_waits is not None:
            self._forward_waits.before_step_end()
        return unscaling, min(thresholds, default=0.0)

    def _on_empty_step(self) -> None:
        self._submitter.check_empty()
        self._submitter.abandon()
        self._clip.drop()
        if not self._warned_of_empty_step:
            self._warned_of_empty_step = True
            warn.warn("step() was called, but no parameter has a gradient: nothing was done, as in torch.optim")

    def continue_from(self, before: "Stepping") -> None:
        """It was the same optimizer's."""
        self.last_result, self.skipped_steps = before.last_result, before.skipped_steps
        self._warned_of_empty_step = before._warned_of_empty_step

    def check_parameters(self) -> None:
        """Nothing is committed on top of parameters that somebody else has written."""
        self._check(self._live.check)

    def _check(self, check_parameters: Callable[[], None]) -> None:
        try:
            check_parameters()
        except Error:
            self._submitter.abandon()
            raise

    def _on_result(self, result: StepResult, watched: bool = False, may_skip: bool = False) -> None:
        """Cut off before ``last_result`` is set, it is done again: see settle()."""
        if self._forward_waits is not None:
            self._forward_waits.on_step_end(not result.kind.skipped, watched)
        if not result.kind.skipped:
            self._live.on_commit()
        self.last_result = result
        skips.count_skip(result, self.skipped_steps, expected=may_skip)

    def zero_grad(self) -> None:
        """Gradients of a step that was begun and not ended are dropped."""
        self.settle()
        self._clip.drop()
        with self._submitter.cut_off:
            self._submitter.on_zero_grad()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Returns the norm of the gradients as the calls before have left them."""
        with self._clip.in_own_hands():
            with torch.no_grad(), self._submitter.cut_off:
                norm = self._submitter.wait_norm()
            return self._clip.add(max_norm, norm)

    def settle(self) -> None:
        """After a call was cut off: the optimizer is between two steps."""
        if not self._submitter.cut_off.happened:
            return
        committed = self._submitter.settle(self.committed_steps())
        if committed is not None:
            self._clip.on_step_end()
            self._on_result(committed)
        self._submitter.cut_off.happened = False

    def settle_for(self, error: BaseException, committed_steps: int) -> None:
        """Settles, and notes at the error what became of the step."""
        with contextlib.suppress(Error):
            self.settle()
        if self._attachment.undecided:
            note = (
                "the step is prepared, and other ranks may have committed it; close() the optimizer and build it anew "
                "on all ranks, which agree on it"
            )
        elif self._submitter.cut_off.happened:
            note = "it is not known whether the step was committed, because the daemon does not answer"
        elif self.committed_steps() > committed_steps:
            note = "the step was committed; go on with the next one"
        else:
            note = "the step was not committed; parameters and state are those before it, step() can be called again"
        interrupt.add_note(error, note)

    def close(self) -> None:
        self._submitter.close()
        self._clip.close()

    def abandon(self) -> None:
        """No step is open afterwards."""
        self.settle()
        self._submitter.abandon()

    def restored(self) -> None:
        """The state is that of another moment."""
        self.last_result = None
