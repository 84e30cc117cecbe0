"""An attachment whose gradients come in pieces, also from calls that XLA makes (superoffload_xla.h)."""

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any

from superoffload._core import library, run, run_step, structures
from superoffload._core.attachment import Attachment
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.step_result import StepResult, VerdictKind
from superoffload.v1 import optimizer_pb2


class PieceAttachment(Attachment):
    """Between two steps, ``prepare()`` makes it ready for the next one; pieces begin it, ``end_pieces()`` ends it."""

    def __init__(self, connection: Connection, request: optimizer_pb2.AttachOptimizerRequest, *gpu: Any) -> None:
        """``gpu``: what the next class of a `GpuPieceAttachment` takes."""
        self.number = 0  # of the submitter in this process
        super().__init__(connection, request, *gpu)
        self._scalars: dict[int, ctypes.Array] = {}
        self._absent: list[int] = []
        self._seen_steps = 0
        self._outdated = False  # scalars: programs of XLA have made steps since prepare()
        self._bucket_count = len(self.optimizer.layout.buckets)
        number = ctypes.c_int64()
        library.call("xla_open", ctypes.byref(self._options()), ctypes.byref(number))
        self.number = number.value
        library.call("xla_attach", self.number, self._handle)

    def _options(self) -> structures.XlaOptions:
        layout, parameters = self.optimizer.layout, self.optimizer.parameters
        rows = [
            structures.XlaParameter(
                elements=_product(parameter.shape),
                parameters_offset=place.parameters_offset,
                gradient_offsets=tuple(place.gradient_offsets),
                first_bucket=place.first_bucket,
                bucket_count=place.bucket_count,
                dtype=parameter.dtype,
            )
            for parameter, place in zip(parameters, layout.placements, strict=True)
        ]
        buckets = [
            structures.Bucket(elements=bucket.elements, gradient_offsets=tuple(bucket.gradient_offsets))
            for bucket in layout.buckets
        ]
        return structures.XlaOptions(
            parameters=(structures.XlaParameter * len(rows))(*rows),
            names=(ctypes.c_char_p * len(rows))(*[parameter.name.encode() for parameter in parameters]),
            buckets=(structures.Bucket * len(buckets))(*buckets),
            parameter_count=len(rows),
            bucket_count=len(buckets),
            group_count=len(self.optimizer.groups),
            scalar_count=len(self.scalar_names),
            threads=len(os.sched_getaffinity(0)),
        )

    @property
    def scalar_names(self) -> list[str]:
        return [scalar.name for scalar in self.optimizer.groups[0].scalars]

    def _attach(self, request: optimizer_pb2.AttachOptimizerRequest) -> None:
        super()._attach(request)
        if self.number:
            library.call("xla_attach", self.number, self._handle)

    def close_pieces(self) -> None:
        """Calls of XLA fail from now on; one that runs ends first."""
        library.function("xla_close")(self.number)

    def prepare(self, scalars: Sequence[Sequence[float]], gradient_scale: float) -> None:
        """The last step is over; pieces of the next one may come. ``scalars``: of each group."""
        for group, values in enumerate(scalars):
            self._scalars[group] = (ctypes.c_double * len(values))(*values)
            library.call("xla_set_scalars", self.number, group, self._scalars[group], len(values))
        self._absent.clear()
        self._outdated = False
        library.call("xla_step_over", self.number, self.next_slot, self.committed_steps, gradient_scale)

    def look(self) -> structures.XlaOpenStep:
        step = structures.XlaOpenStep()
        library.call("xla_look", self.number, ctypes.byref(step))
        return step

    def sync(self) -> structures.XlaOpenStep:
        """Takes notice of steps that ran inside of programs of XLA; attaches anew where the daemon died in one."""
        step = self.look()
        if step.steps != self._seen_steps:
            self._seen_steps = step.steps
            self._outdated = True
            self.next_slot, self.committed_steps = step.next_slot, step.committed_steps
        if step.lost:
            self.adopt([], gone=True)
            self.committed_steps = self.optimizer.committed_steps
        return step

    def arrived(self) -> list[int]:
        """Elements of each parameter whose gradients have come in the open step.

        Raises Error for the first piece that was refused.
        """
        elements = (ctypes.c_uint64 * len(self.optimizer.parameters))()
        library.call("xla_arrived", self.number, elements)
        return list(elements)

    def hand_over(self, parameter: int, first: int, elements: int, address: int) -> None:
        library.call("xla_hand_over", self.number, parameter, first, elements, address)

    def absent(self, parameter: int) -> None:
        library.call("xla_absent", self.number, parameter)
        self._absent.append(parameter)

    def end_pieces(
        self,
        scalars: Sequence[Sequence[float]],
        gradient_scale: float,
        max_grad_norm: float,
        ranks: run.Group | None,
    ) -> StepResult:
        """All gradients have come: ends the step and waits for it. The daemon's death is survived as in Attachment.

        ``scalars``: of each group, for this step. ``ranks``: over which the verdict is; None: this one trains alone.
        """
        with run_step.told(ranks, self):
            self._take_pieces(scalars)
        if ranks is None:
            self.end_step(gradient_scale, max_grad_norm)
        else:
            run_step.end_step(self, ranks, gradient_scale, max_grad_norm)
        return self.wait_step()

    def _take_pieces(self, scalars: Sequence[Sequence[float]]) -> None:
        """The open step becomes this attachment's."""
        step = structures.XlaOpenStep()
        buckets = (ctypes.c_uint32 * self._bucket_count)()
        library.call("xla_take", self.number, ctypes.byref(step), buckets)
        groups = [("set_group", group, values, len(values)) for group, values in self._scalars.items()]
        absent = [("parameters_absent", parameter, 1) for parameter in self._absent]
        ready = [("gradient_ready", bucket) for bucket in buckets[: step.bucket_count]]
        self.adopt([*groups, ("begin_step", step.gradient_scale), *absent, *ready], bool(step.gone))
        for group, values in enumerate(scalars):
            if self._outdated or list(values) != list(self._scalars[group]):  # a schedule says something else by now
                self.set_group(group, values)

    def drop(self) -> StepResult | None:
        """No step is open afterwards. Returns the last one's result, where it had been ended."""
        with contextlib.suppress(Error):  # it was told already
            step = structures.XlaOpenStep()
            library.call("xla_take", self.number, ctypes.byref(step), (ctypes.c_uint32 * self._bucket_count)())
        return self.settle()

    def last_inside(self) -> tuple[int, StepResult | None, dict[VerdictKind, int]]:
        """How many steps programs of XLA have made, the last of them, and how many were skipped."""
        step = self.look()
        skips = {kind: step.skips[kind] for kind in VerdictKind if kind.skipped}
        return step.steps, (StepResult.of(step.verdict) if step.steps else None), skips


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
