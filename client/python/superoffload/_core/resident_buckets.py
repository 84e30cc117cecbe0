"""Buckets that stay resident on the GPU, as many as are wanted and fit."""

from collections.abc import Callable

import grpc

from superoffload._core import warn
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload.v1 import optimizer_pb2


class ResidentBuckets:
    """Keeps ``count`` of the last buckets resident, with a daemon that took over as well.

    ``alone``: False where other processes train with this one. Their shards differ, and none may fail by itself: so it
    keeps as many as it has, and as fit.
    """

    def __init__(self, attachment: GpuAttachment, count: int, alone: bool) -> None:
        self._attachment = attachment
        self._count = count
        if alone:
            attachment.set_resident(count)
        else:
            self._count = min(count, len(attachment.optimizer.layout.buckets))
            self._fit()

    def keep(self, quiesce: Callable[[], None]) -> None:
        """Others may be resident than are wanted. ``quiesce`` leaves no step open."""
        if self._count == self._attachment.resident_buckets:
            return
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
            self._count = self._fewer()

    def _fits(self) -> bool:
        try:
            self._attachment.set_resident(self._count)
            return True
        except Error as error:
            if error.code != grpc.StatusCode.RESOURCE_EXHAUSTED or self._count == 0:
                raise
            return False

    def _fewer(self) -> int:
        """There is no GPU memory for so many."""
        warn.warn(f"the GPU has no memory for more than {self._count - 1} resident buckets now")
        return self._count - 1
