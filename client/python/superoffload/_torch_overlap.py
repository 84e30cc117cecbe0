"""Decides, step by step, whether gradients may be handed over while backward still runs.

Handing over early is a bet that a gradient is complete and that nobody changes it before ``step()``. How often autograd
accumulates into each parameter in a step, and where ``zero_grad()`` is called between, is the pattern of a loop. A
pattern that is new is watched for some steps: nothing is handed over early, and every gradient is compared bit by bit,
in ``step()``, with what it was when autograd was done with it. If that shows an edit, overlap stays off. In the steps
that follow, a sample of every gradient is compared.
"""

from typing import Literal

import torch

Overlap = Literal["auto"] | bool

_WATCHED_AT_FIRST = 3
_WATCHED_AGAIN = 2
_PATTERNS_KEPT = 256


class OverlapPolicy:
    """``early``: gradients of the open step may leave during backward; ``watched``: they are compared in ``step()``."""

    def __init__(self, overlap: Overlap, parameters: int) -> None:
        if overlap not in ("auto", True, False):
            raise ValueError(f'overlap is {overlap!r} but must be "auto", True or False')
        self._overlap = overlap
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

    def _decide(self) -> None:
        self._decided = True
        self.early = self.watched = False
        if self._overlap is True:
            self.early = True
        elif self._overlap == "auto" and not _reduces_gradients():
            self.watched = self._to_watch > 0
            self.early = not self.watched

    def count(self, index: int) -> int:
        """Autograd has accumulated a gradient; returns how many more are expected in this step; negative: none were."""
        if not self._decided:
            self._decide()
        self._calls[index] += 1
        return self._expected[index] - self._calls[index]

    def is_first(self, index: int) -> bool:
        """Whether no gradient of this parameter has been accumulated since the last step."""
        return self._calls[index] == 0

    def on_zero_grad(self) -> None:
        if (calls := sum(self._calls)) > 0:
            self._zeroed.append(calls)

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
        """What was handed over early should not have been: nothing more of this step is, and the next are watched."""
        self.early = False
        self._decided = True
        self._to_watch = max(self._to_watch, _WATCHED_AGAIN)

    def turn_off(self) -> None:
        self._overlap = self.early = self.watched = False


def _reduces_gradients() -> bool:
    """Whether the loop may change gradients by torch.distributed, as DistributedDataParallel does after our hooks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
