"""How many of the blocks that stream stay on the GPU, each with memory of its own (``weights="auto"``)."""

from collections.abc import Callable, Iterable
from typing import Protocol

import grpc
import torch

from superoffload._core import blocks
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import Streamed
from superoffload.torch import cuda
from superoffload.torch.gpu.room import GpuRoom

_MOST_WATCHED = 5  # steps; then what the loop needs is measured whether or not it is still watched
_SLACK = 0.02  # of the GPU's memory: left free, so that what a loop needs more now and then is not asked for each time


class Units(Protocol):
    """What streams: `GpuAttachment`, `FrozenUnits`."""

    staying: frozenset[int]
    slot_bytes: int

    def keep_units(self, units: Iterable[int]) -> None: ...
    def note_weights(self, text: str) -> None: ...


class Staying:
    """At first no block stays: what the loop needs of the GPU's memory is not known before it has run.

    It is measured in the step after the first one in which gradients leave during backward. Then as many blocks stay
    as there is room for, and fewer once the loop needs more. ``share``: of the GPU's memory that may be in use, by
    everybody.
    """

    def __init__(self, source: Units, streamed: Streamed, device: torch.device, share: float) -> None:
        self._source, self._device, self._share = source, device, share
        self._units, self._shared = sorted(streamed.units), streamed.slots
        self._room: GpuRoom | None = None
        self._most = len(self._units)  # there was no memory for more
        self._steps = 0

    def after_step(self, watched: bool, quiesce: Callable[[], None]) -> None:
        self._steps += 1
        if self._room is not None:
            self._keep(self._wanted(self._room), quiesce)
        elif not watched or self._steps >= _MOST_WATCHED:
            cuda.release_cached(self._device)  # where gradients were while they stayed
            self._room = GpuRoom(self._device, self._share)

    def after_zero_grad(self, quiesce: Callable[[], None]) -> None:
        """Gives memory back when the loop has found none, and goes on."""
        if self._room is not None and self._room.was_lacking():
            self._keep(min(self._count, self._fitting(self._room, _SLACK)), quiesce)

    @property
    def _count(self) -> int:
        return len(self._source.staying)

    def _wanted(self, room: GpuRoom) -> int:
        most = min(self._most, self._fitting(room, _SLACK))
        if self._count > most:
            return most if self._count > self._fitting(room) else self._count
        return most

    def _fitting(self, room: GpuRoom, spare: float = 0.0) -> int:
        """How many blocks have room, when all others share their slots."""
        every, shared, slot_bytes = len(self._units), self._shared, self._source.slot_bytes
        slots = int(room.for_us((self._count + min(shared, every - self._count)) * slot_bytes, spare) // slot_bytes)
        return every if slots >= every else max(0, slots - shared)

    def _keep(self, count: int, quiesce: Callable[[], None]) -> None:
        if count == self._count:
            return
        quiesce()
        cuda.release_cached(self._device)
        while not self._kept(count):
            self._most = count = (count + self._count) // 2
        self._describe()

    def _kept(self, count: int) -> bool:
        streaming = set(blocks.evenly(len(self._units) - count, len(self._units)))
        try:
            self._source.keep_units(unit for place, unit in enumerate(self._units, 1) if place not in streaming)
        except Error as error:
            if error.code != grpc.StatusCode.RESOURCE_EXHAUSTED or count <= self._count:
                raise
            return False
        return True

    def _describe(self) -> None:
        every, size = len(self._units), self._source.slot_bytes / (1 << 20)
        self._source.note_weights(
            f"{self._count} of {every} blocks stay on the GPU and {every - self._count} stream: beside what the loop "
            f"needs, {self._share:.0%} of its memory has room for so many of {size:.0f} MiB"
        )
