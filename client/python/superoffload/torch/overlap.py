"""Decides, step by step, whether gradients may be submitted while backward still runs.

Submitting early is a bet that a gradient is complete and that nobody changes it before ``step()``. How often autograd
accumulates into each parameter in a step, and where ``zero_grad()`` is called between, is the pattern of a loop. A
pattern that is new is watched for some steps: nothing is submitted early. In each step every gradient that is still
there is compared, in ``step()``, with what it was when autograd was done with it. If that shows an edit, overlap stays
off.

Where a GPU's memory does not hold the gradients of a watched step, it is not watched, and they leave early.
"""

from typing import Literal

import torch

from superoffload._core import warn

Overlap = Literal["auto"] | bool

_WATCHED_AT_FIRST = 3
_WATCHED_AGAIN = 2
_PATTERNS_KEPT = 256


class OverlapPolicy:
    """``early``: gradients of the open step may leave during backward; ``watched``: they are compared in ``step()``."""

    def __init__(self, overlap: Overlap, parameters: int, alone: bool = True) -> None:
        if overlap not in ("auto", True, False):
            raise ValueError(f'overlap is {overlap!r} but must be "auto", True or False')
        self._overlap = overlap
        self._alone = alone  # False: gradients are counted once they are those of all ranks
        self._calls = [0] * parameters  # since the last step()
        self._previous = self._calls
        self._expected = [0] * parameters
        self._zeroed: list[int] = []  # calls of all parameters at each zero_grad() in between
        self._known: set[tuple] = set()
        self._to_watch = _WATCHED_AT_FIRST
        self._decided = False
        self.early = False
        self.watched = False

    @property
    def on(self) -> bool:
        return self._overlap is not False

    @property
    def _bets(self) -> bool:
        return self._overlap is True or (self._overlap == "auto" and not (self._alone and _reduces_gradients()))

    def _decide(self) -> None:
        self._decided = True
        self.watched = self._overlap == "auto" and self._to_watch > 0 and self._bets
        self.early = not self.watched and self._bets

    def learns(self) -> bool:
        """Whether a step begins whose gradients stay because it is watched, or because it is the first."""
        first = not any(self._expected)
        return not self._decided and self._bets and (first or (self._overlap == "auto" and self._to_watch > 0))

    def force_early(self) -> None:
        """There is no memory to learn in: a gradient is complete when it was in the step before, or at once."""
        self._overlap = True
        self._expected = [max(1, calls) for calls in self._expected]

    def count(self, index: int) -> int:
        """Autograd has accumulated a gradient; returns how many more are expected in this step; negative: none were."""
        if not self._decided:
            self._decide()
        self._calls[index] += 1
        return self._expected[index] - self._calls[index]

    def on_zero_grad(self) -> None:
        if (calls := sum(self._calls)) > 0:
            self._zeroed.append(calls)
            if not any(zeroed[: len(self._zeroed)] == tuple(self._zeroed) for _, zeroed in self._known):
                self.early = False  # as where memory was lacking in the midst of a step, which is begun anew

    def on_step_end(self) -> None:
        pattern = (tuple(self._calls), tuple(self._zeroed))
        self._to_watch -= self.watched
        if pattern not in self._known:
            if len(self._known) == _PATTERNS_KEPT:
                self._known.clear()
            self._known.add(pattern)
            self._to_watch = max(self._to_watch, _WATCHED_AGAIN)
        if self._calls == self._previous:
            self._expected = self._calls
        else:
            self._expected = [max(pair) for pair in zip(self._expected, self._calls, strict=True)]
        self._previous = self._calls
        self._calls = [0] * len(self._calls)
        self._zeroed = []
        self._decided = self.early = self.watched = False

    def on_surprise(self) -> None:
        """What was submitted early should not have been: nothing more of this step is, and the next are watched."""
        self.early = False
        self._decided = True
        self._to_watch = max(self._to_watch, _WATCHED_AGAIN)

    def turn_off(self) -> None:
        self._overlap = self.early = self.watched = False

    def on_use(self, gone: bool) -> None:
        """The loop uses gradients between clip_grad_norm_ and step(); ``gone``: some of them are no longer there."""
        if self.on:
            self.turn_off()
            now = "; of this step some have left the GPU and read as NaN, and others are not scaled" if gone else ""
            warn.warn(
                f"gradients were used between clip_grad_norm_ and step(){now}: from now on they are submitted in "
                "step(), without overlap with backward (use them before, or clip with max_grad_norm=, to keep it; "
                "overlap=False says that this is meant)"
            )

    def on_edit(self, name: str) -> None:
        """The loop has changed the gradient of that parameter after backward."""
        self.turn_off()
        warn.warn(
            f"the gradient of {name} was changed between backward and step(): from now on gradients are submitted in "
            "step(), without overlap with backward (clip with max_grad_norm= or torch.nn.utils.clip_grad_norm_ to keep "
            "it; overlap=False says that this is meant)"
        )


def _reduces_gradients() -> bool:
    """Whether the loop may change gradients by torch.distributed, as DistributedDataParallel does after our hooks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
