"""How many of the last buckets to keep resident on the GPU: as few as make the trainer wait for nothing."""

import time
from collections.abc import Callable

import grpc

from superoffload._core import warn
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.layout import bucket_bytes
from superoffload.torch.gpu.options import GpuOptions
from superoffload.v1 import optimizer_pb2

_PATIENCE = 3  # steps with a stall before another bucket becomes resident
_CONTENT = 200  # steps without one before it is tried with one fewer
_STALL = 0.01  # of a step's time


class ResidentTuner:
    """Decides after each step. ``limit``: of buckets."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._least = 0  # fewer are known to stall
        self._stalled = 0  # steps in a row
        self._smooth = 0
        self.count = 0

    def after_step(self, stall_seconds: float, step_seconds: float) -> bool:
        """Whether ``count`` has changed."""
        if stall_seconds > _STALL * step_seconds:
            self._stalled, self._smooth = self._stalled + 1, 0
            self._least = max(self._least, min(self.count + 1, self._limit))
        else:
            self._stalled, self._smooth = 0, self._smooth + 1
        if self._stalled >= _PATIENCE and self.count < self._limit:
            self.count += 1
        elif self._smooth >= _CONTENT and self.count > self._least:
            self.count -= 1
        else:
            return False
        self._stalled = self._smooth = 0
        return True

    def refuse(self) -> None:
        """There was no memory for ``count``."""
        self._limit = self.count = max(0, self.count - 1)
        self._least = min(self._least, self._limit)


class Residents:
    """Keeps as many buckets resident as the user wants or the tuner finds, with a daemon that took over as well.

    ``alone``: False where other ranks train with this one. Their shards differ, and none may fail by itself: so it
    keeps as many as it has, and as fit.
    """

    def __init__(self, attachment: GpuAttachment, options: GpuOptions, alone: bool = True) -> None:
        self._attachment = attachment
        self._tuner: ResidentTuner | None = None
        self._count = 0
        self._step_time = time.monotonic()
        if options.resident_buckets == "auto":
            self._tuner = ResidentTuner(_limit(attachment.optimizer.layout, options.resident_bytes))
        elif alone:
            self._count = options.resident_buckets
            attachment.set_resident(self._count)
        else:
            self._count = min(options.resident_buckets, len(attachment.optimizer.layout.buckets))
            self._fit()

    def stall_seconds(self) -> float:
        """How long the forward passes since the last step have waited for parameters, if that is of interest."""
        return 0.0 if self._tuner is None else self._attachment.stall_seconds()

    def after_step(self, stall_seconds: float, quiesce: Callable[[], None]) -> None:
        if self._tuner is not None:
            now = time.monotonic()
            self._tuner.after_step(stall_seconds, now - self._step_time)
            self._step_time = now
            self._count = self._tuner.count
        if self._count != self._attachment.resident_buckets:
            self._apply(quiesce)

    def keep(self, count: int, quiesce: Callable[[], None]) -> None:
        """Keeps ``count`` buckets resident from now on; nothing is tuned."""
        self._tuner, self._count = None, count
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


def _limit(layout: optimizer_pb2.Layout, resident_bytes: int) -> int:
    """The most buckets whose state fits."""
    limit, total = 0, 0
    for bucket in reversed(layout.buckets):
        total += bucket_bytes(layout, bucket)
        limit += total <= resident_bytes
    return limit
