"""How many of the last buckets to keep resident on the GPU."""

import bisect
import time
from collections.abc import Callable

import grpc
import torch

from superoffload._core import warn
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.layout import bucket_bytes
from superoffload.torch.gpu.options import GpuOptions
from superoffload.torch.gpu.room import GpuRoom
from superoffload.v1 import optimizer_pb2

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


class Residents:
    """Keeps as many buckets resident as the user wants or the tuner finds, with a daemon that took over as well.

    ``alone``: False where other ranks train with this one. Their shards differ, and none may fail by itself: so it
    keeps as many as it has, and as fit. ``possible``: whether the GPU has a kernel for the algorithm.
    """

    def __init__(
        self,
        attachment: GpuAttachment,
        options: GpuOptions,
        device: torch.device,
        possible: bool = True,
        alone: bool = True,
    ) -> None:
        self._attachment = attachment
        self._tuner: ResidentTuner | None = None
        self._count = self._left = 0
        self._step_time = time.monotonic()
        self._room = ResidentRoom(attachment, device, options.resident_share)
        if options.resident_buckets == "auto":
            self._tuner = ResidentTuner() if possible else None
        elif alone:
            self._count = options.resident_buckets
            attachment.set_resident(self._count)
        else:
            self._count = min(options.resident_buckets, len(attachment.optimizer.layout.buckets))
            self._fit()

    def after_step(self, stall_seconds: float, quiesce: Callable[[], None]) -> None:
        if self._tuner is not None:
            now = time.monotonic()
            self._tuner.after_step(stall_seconds, now - self._step_time, self._room)
            self._step_time = now
            self._count = self._tuner.count
        if self._count != self._attachment.resident_buckets:
            self._apply(quiesce)

    def after_zero_grad(self, quiesce: Callable[[], None]) -> None:
        """Gives memory back when the loop has found none, and goes on."""
        if self._tuner is not None and self._tuner.count > 0 and self._room.was_lacking():
            self._tuner.give_back(self._room)
            self._count = self._tuner.count
            if self._count != self._attachment.resident_buckets:
                self._apply(quiesce)

    def keep(self, count: int, quiesce: Callable[[], None]) -> None:
        """Keeps ``count`` buckets resident from now on; nothing is tuned."""
        self._tuner, self._count = None, count
        self._apply(quiesce)

    def leave(self, quiesce: Callable[[], None]) -> None:
        """Has no bucket resident."""
        self._left, self._count = self._count, 0
        if self._tuner is not None:
            self._tuner.count = 0  # it finds out again
        self._apply(quiesce)

    def come_back(self, quiesce: Callable[[], None]) -> None:
        if self._tuner is None and self._left > 0:
            self._count = self._left
            self._apply(quiesce)

    def _apply(self, quiesce: Callable[[], None]) -> None:
        quiesce()
        optimizer = self._attachment.optimizer
        # What becomes resident reads the state, and what no longer is has its parameters published again. Those behind
        # them are few.
        most = max(self._count, self._attachment.resident_buckets)
        first = max(0, len(optimizer.layout.buckets) - most)
        request = optimizer_pb2.SettleOptimizerRequest(name=optimizer.name, first_bucket=first)
        self._attachment.call("SettleOptimizer", request)
        self._fit()

    def _fit(self) -> None:
        while not self._fits():
            pass

    def _fits(self) -> bool:
        try:
            self._attachment.set_resident(self._count)
            return True
        except Error as error:
            if error.code != grpc.StatusCode.RESOURCE_EXHAUSTED or self._count == 0:
                raise
        if self._tuner is None:
            self._count -= 1
            warn.warn(f"the GPU has no memory for more than {self._count} resident buckets now")
        else:
            self._tuner.refuse()
            self._count = self._tuner.count
        return False
