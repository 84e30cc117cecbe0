"""How many of the last buckets to keep resident on the GPU."""

import bisect
import time
from collections.abc import Callable

import torch

from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.layout import bucket_bytes
from superoffload._core.resident_buckets import ResidentBuckets
from superoffload.torch.gpu.options import GpuOptions
from superoffload.torch.gpu.room import GpuRoom

_PATIENCE = 3  # steps with a stall before more buckets become resident
_STALL = 0.01  # of a step's time
_FIRST = 8  # buckets; then twice as many
_SLACK = 0.02  # of the GPU's memory: left free, so that what a loop needs more now and then is not asked for each time


class ResidentRoom:
    """How many of the last buckets of an attachment the GPU has room for.

    ``share``: of the GPU's memory that may be in use, by everybody.
    """

    def __init__(self, attachment: GpuAttachment, device: torch.device, share: float) -> None:
        self._attachment = attachment
        self._room = GpuRoom(device, share)
        self._totals = [0]  # bytes of the last so many buckets
        layout = attachment.optimizer.layout
        for bucket in reversed(layout.buckets):
            self._totals.append(self._totals[-1] + bucket_bytes(layout, bucket))

    def was_lacking(self) -> bool:
        """Whether the loop has found no memory since it was last asked what fits."""
        return self._room.was_lacking()

    def fitting(self, spare: float = 0.0) -> int:
        """How many buckets fit, with ``spare`` more of the GPU's memory left free."""
        room = self._room.for_us(self._totals[self._attachment.resident_buckets], spare)
        return max(0, bisect.bisect_right(self._totals, room) - 1)


class ResidentTuner:
    """Decides after each step: none while the trainer waits for nothing, else as many as there is room for."""

    def __init__(self) -> None:
        self._stalled = 0  # steps in a row
        self._limit: int | None = None  # there was no memory for more
        self.count = 0

    def after_step(self, stall_seconds: float, step_seconds: float, room: ResidentRoom) -> None:
        self._stalled = self._stalled + 1 if stall_seconds > _STALL * step_seconds else 0
        if self.count == 0 and self._stalled < _PATIENCE:
            return
        most = self._most(room)
        if self.count > most:
            if self.count > room.fitting():
                self.count = most
        elif self._stalled >= _PATIENCE and self.count < most:
            self.count = min(most, max(_FIRST, 2 * self.count))
            self._stalled = 0

    def give_back(self, room: ResidentRoom) -> None:
        """What the loop needs."""
        self.count = min(self.count, self._most(room))

    def _most(self, room: ResidentRoom) -> int:
        most = room.fitting(_SLACK)
        return most if self._limit is None else min(most, self._limit)

    def refuse(self) -> None:
        """There was no memory for ``count``."""
        self._limit = self.count = max(0, self.count - 1)


class Residents(ResidentBuckets):
    """As many as the user wants or the tuner finds. ``possible``: whether the GPU has a kernel for the algorithm."""

    def __init__(
        self,
        attachment: GpuAttachment,
        options: GpuOptions,
        device: torch.device,
        possible: bool = True,
        alone: bool = True,
    ) -> None:
        self._tuner: ResidentTuner | None = None
        self._left = 0
        self._step_time = time.monotonic()
        self._room = ResidentRoom(attachment, device, options.resident_share)
        count = options.resident_buckets
        if count == "auto":
            self._tuner = ResidentTuner() if possible else None
            count = 0
        super().__init__(attachment, count, alone)

    def after_step(self, stall_seconds: float, quiesce: Callable[[], None]) -> None:
        if self._tuner is not None:
            now = time.monotonic()
            self._tuner.after_step(stall_seconds, now - self._step_time, self._room)
            self._step_time = now
            self._count = self._tuner.count
        self.keep(quiesce)

    def after_zero_grad(self, quiesce: Callable[[], None]) -> None:
        """Gives memory back when the loop has found none, and goes on."""
        if self._tuner is not None and self._tuner.count > 0 and self._room.was_lacking():
            self._tuner.give_back(self._room)
            self._count = self._tuner.count
            self.keep(quiesce)

    def choose(self, count: int, quiesce: Callable[[], None]) -> None:
        """Keeps ``count`` buckets resident from now on; nothing is tuned."""
        self._tuner, self._count = None, count
        self.keep(quiesce)

    def leave(self, quiesce: Callable[[], None]) -> None:
        """Has no bucket resident."""
        self._left, self._count = self._count, 0
        if self._tuner is not None:
            self._tuner.count = 0  # it finds out again
        self.keep(quiesce)

    def come_back(self, quiesce: Callable[[], None]) -> None:
        if self._tuner is None and self._left > 0:
            self._count = self._left
            self.keep(quiesce)

    def _fewer(self) -> int:
        if self._tuner is None:
            return super()._fewer()
        self._tuner.refuse()
        return self._tuner.count
