"""The step plane of one attachment: its memory as bytes, its rings as calls."""

import contextlib
import ctypes
import dataclasses
import enum
import sys
from typing import Any

import grpc

from superoffload import _library
from superoffload._control import Connection
from superoffload._error import Error
from superoffload.v1 import optimizer_pb2

_WAIT_SLICE_MILLISECONDS = 500
_DETACH_TIMEOUT_SECONDS = 30  # a daemon that hangs must not hang its trainer's exit
_DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


class VerdictKind(enum.IntEnum):
    """What a step turned out to be."""

    COMMIT = 1
    CLIP = 2
    SKIP_NON_FINITE = 3
    SKIP_OVERFLOW = 4
    SKIP_ABANDONED = 5

    @property
    def skipped(self) -> bool:
        return self > VerdictKind.CLIP


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The daemon's report on one step."""

    kind: VerdictKind
    step: int  # attempts so far, skipped ones included
    committed_steps: int
    global_norm: float  # L2 norm of the unscaled gradients before clipping; NaN when abandoned
    clip_coefficient: float
    speculated_buckets: int
    republished_buckets: int
    consecutive_skips: int


class Attachment:
    """Owns the mappings; views of them keep it alive."""

    def __init__(self, connection: Connection, request: optimizer_pb2.AttachOptimizerRequest) -> None:
        self._connection = connection
        self._stream, response = connection.attach(request)
        self.optimizer = response.optimizer
        self.next_slot: int = response.next_slot
        self._handle = ctypes.c_void_p()
        _library.call(
            "attach",
            connection.handle,
            response.attachment_epoch,
            response.optimizer.step,
            len(response.optimizer.layout.buckets),
            ctypes.byref(self._handle),
        )
        self._gradient_ready = _library.function("gradient_ready")

    def __del__(self) -> None:
        if not sys.is_finalizing() and getattr(self, "_handle", None):
            _library.function("detach")(self._handle)

    def end(self) -> None:
        """Ends the attachment and waits for it; the mappings stay until the last view of them is gone."""
        with contextlib.suppress(Error):  # the daemon has ended it already, or is gone
            request = optimizer_pb2.DetachOptimizerRequest(name=self.optimizer.name)
            self._connection.call("DetachOptimizer", request, _DETACH_TIMEOUT_SECONDS)
        self._stream.cancel()

    def _view(self, function: str, offset: int, count: int) -> Any:
        base = _library.function(function)(self._handle, None)
        if not base:
            _library.check(_library.INTERNAL)
        region = type("Region", (ctypes.c_byte * count,), {}).from_address(base + offset)
        region.attachment = self  # the memory must not be unmapped while anybody looks at it
        return region

    def parameters(self, offset: int, count: int) -> Any:
        """A writable buffer of `count` bytes of published parameters."""
        return self._view("parameters", offset, count)

    def gradients(self, offset: int, count: int) -> Any:
        """A writable buffer of `count` bytes of gradient slots."""
        return self._view("gradients", offset, count)

    def state(self, offset: int, count: int) -> Any:
        """A private buffer of `count` bytes of masters and moments; consistent only after settling."""
        return self._view("state", offset, count)

    def _wait(self, function: str, result: Any) -> None:
        """Waits in slices, so that ^C is heard."""
        while (code := _library.function(function)(self._handle, _WAIT_SLICE_MILLISECONDS, result)) == _DEADLINE:
            pass
        _library.check(code)

    def set_group(self, group: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
        _library.call("set_group", self._handle, group, lr, beta1, beta2, eps, weight_decay)

    def begin_step(self, gradient_scale: float) -> None:
        _library.call("begin_step", self._handle, gradient_scale)

    def gradient_ready(self, bucket: int) -> None:
        _library.check(self._gradient_ready(self._handle, bucket))

    def wait_norm(self, gradient_scale: float) -> float:
        _library.call("measure_norm", self._handle, gradient_scale)
        norm = ctypes.c_double()
        self._wait("wait_norm", ctypes.byref(norm))
        return norm.value

    def end_step(self, gradient_scale: float, max_grad_norm: float) -> None:
        _library.call("end_step", self._handle, gradient_scale, max_grad_norm)

    def abandon_step(self) -> None:
        _library.call("abandon_step", self._handle)

    def wait_step(self) -> StepResult:
        """Waits until the parameters of the step that was ended last are final."""
        verdict = _library.Verdict()
        self._wait("wait_step", ctypes.byref(verdict))
        self.next_slot = verdict.next_slot
        return StepResult(
            kind=VerdictKind(verdict.kind),
            step=verdict.step,
            committed_steps=verdict.committed_steps,
            global_norm=verdict.global_norm,
            clip_coefficient=verdict.clip_coefficient,
            speculated_buckets=verdict.speculated_buckets,
            republished_buckets=verdict.republished_buckets,
            consecutive_skips=verdict.consecutive_skips,
        )
