"""The step plane of one attachment: its memory as bytes, its rings as calls."""

import contextlib
import ctypes
import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from superoffload import _library
from superoffload._control import GONE, Connection
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
    # L2 norm of the unscaled gradients before clipping; NaN when abandoned, or when the daemon died between committing
    # the step and saying so. Likewise clip_coefficient.
    global_norm: float
    clip_coefficient: float
    speculated_buckets: int
    republished_buckets: int
    consecutive_skips: int


class Attachment:
    """Owns the mappings; views of them keep it alive.

    When the daemon dies inside a call and its successor recovers the optimizer, the call attaches anew and submits
    again what the open step had submitted: the gradients are still in the memory that trainer and daemon share. A step
    that had been committed before the daemon died is not submitted again.
    """

    def __init__(
        self,
        connection: Connection,
        request: optimizer_pb2.AttachOptimizerRequest,
    ) -> None:
        self._connection = connection
        self._sync_again = optimizer_pb2.SYNC_PULL  # with a successor
        self._handles: list[ctypes.c_void_p] = []  # the last one is in use; the mappings of the others may be, too
        self._submitted: list[tuple[Any, ...]] = []  # since the last step was over: function and arguments
        self._groups: dict[int, tuple[Any, ...]] = {}  # the last set_group of each group before that
        self._attach(request)
        self.committed_steps: int = self.optimizer.committed_steps

    def _attach(self, request: optimizer_pb2.AttachOptimizerRequest) -> None:
        self._stream, response = self._connection.attach(request)
        self.optimizer = response.optimizer
        self.next_slot: int = response.next_slot
        handle = ctypes.c_void_p()
        _library.call(
            "attach",
            self._connection.handle,
            response.attachment_epoch,
            response.optimizer.step,
            len(response.optimizer.layout.buckets),
            ctypes.byref(handle),
        )
        self._handles.append(handle)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for handle in getattr(self, "_handles", []):
                _library.function("detach")(handle)

    @property
    def _handle(self) -> ctypes.c_void_p:
        return self._handles[-1]

    def _submit(self, *call: Any) -> None:
        """Calls a function of the library, now and again whenever the open step has to be submitted anew."""
        self._submitted.append(call)
        try:
            _library.call(call[0], self._handle, *call[1:])
        except Error as error:
            if error.code != grpc.StatusCode.UNAVAILABLE:
                self._submitted.pop()
            self._recover(error)

    def call(self, method: str, request: Any) -> Any:
        """A control call about this optimizer, made again when the daemon has died. No step is open."""
        return self._between_steps(lambda: self._connection.call(method, request))

    def stream(self, method: str, request: Any) -> Any:
        """The same for a call that answers with a stream; returns its last message."""
        return self._between_steps(lambda: self._connection.stream(method, request))

    def _between_steps(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except Error as error:
                # Parameters stay as they are in memory: the trainer may have changed them.
                self._sync_again = optimizer_pb2.SYNC_PUSH
                try:
                    self._recover(error)
                finally:
                    self._sync_again = optimizer_pb2.SYNC_PULL

    def _recover(self, error: Error) -> bool:
        """When the daemon is gone: attaches to its successor.

        Returns whether the open step is committed already; if it is not, it has been submitted again. Raises the error
        when it is another one, or when there is no successor that knows the optimizer.
        """
        if error.code not in GONE:
            raise error
        while True:
            self._connection.wait_reopened()
            request = optimizer_pb2.AttachOptimizerRequest(name=self.optimizer.name, sync=self._sync_again)
            try:
                self._attach(request)
                if self.optimizer.committed_steps > self.committed_steps:
                    self._step_over()
                    for call in self._groups.values():
                        _library.call(call[0], self._handle, *call[1:])
                    return True
                # The successor knows the hyper-parameters of the optimizer's creation only.
                for call in [*self._groups.values(), *self._submitted]:
                    _library.call(call[0], self._handle, *call[1:])
                return False
            except Error as again:
                if again.code == grpc.StatusCode.NOT_FOUND:
                    raise error from None
                if again.code != grpc.StatusCode.UNAVAILABLE:  # else it died again
                    raise

    @contextlib.contextmanager
    def detached(self) -> Iterator[None]:
        """Ends the attachment for the length of a with block, then attaches anew; views stay valid. No step is open."""
        self.call("GetOptimizer", optimizer_pb2.GetOptimizerRequest(name=self.optimizer.name))  # comes back first
        self.end()
        try:
            yield
        finally:
            request = optimizer_pb2.AttachOptimizerRequest(name=self.optimizer.name, sync=optimizer_pb2.SYNC_PULL)
            self._connection.again(lambda: self._attach(request))
            self._submitted.clear()
            self.committed_steps = self.optimizer.committed_steps

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

    def _wait(self, function: str, result: Any, *before: Any) -> None:
        """Waits in slices, so that ^C is heard. ``before``: arguments that come before the timeout."""
        call = _library.function(function)
        while (code := call(self._handle, *before, _WAIT_SLICE_MILLISECONDS, result)) == _DEADLINE:
            pass
        _library.check(code)

    def set_group(self, group: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
        self._submit("set_group", group, lr, beta1, beta2, eps, weight_decay)

    def begin_step(self, gradient_scale: float) -> None:
        self._submit("begin_step", gradient_scale)

    def gradient_ready(self, bucket: int) -> None:
        self._submit("gradient_ready", bucket)

    def wait_norm(self, gradient_scale: float) -> float:
        norm = ctypes.c_double()
        while True:
            try:
                _library.call("measure_norm", self._handle, gradient_scale)
                self._wait("wait_norm", ctypes.byref(norm))
                return norm.value
            except Error as error:
                self._recover(error)

    def end_step(self, gradient_scale: float, max_grad_norm: float) -> None:
        self._submit("end_step", gradient_scale, max_grad_norm)

    def abandon_step(self) -> None:
        self._submit("abandon_step")

    def settle(self) -> StepResult | None:
        """After any of these calls was cut off by an exception: no step is open, and the last one is over.

        Returns what it was, or None when this attachment has had none.
        """
        while True:
            try:
                _library.call("abandon_step", self._handle)
                break
            except Error as error:
                if error.code == grpc.StatusCode.FAILED_PRECONDITION:  # none is open
                    break
                if self._recover(error):
                    return self._committed_unseen()
        try:
            return self.wait_step()
        except Error as error:
            if error.code != grpc.StatusCode.FAILED_PRECONDITION:
                raise
        self._step_over()
        return None

    def wait_step(self) -> StepResult:
        """Waits until the parameters of the step that was ended last are final."""
        return self._wait_result("wait_step")

    def _wait_result(self, function: str) -> StepResult:
        verdict = _library.Verdict()
        while True:
            try:
                self._wait(function, ctypes.byref(verdict))
                break
            except Error as error:
                if self._recover(error):
                    return self._committed_unseen()
        self._step_over()
        self.next_slot = verdict.next_slot
        self.committed_steps = verdict.committed_steps
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

    def _step_over(self) -> None:
        self._groups |= {call[1]: call for call in self._submitted if call[0] == "set_group"}
        self._submitted.clear()

    def _committed_unseen(self) -> StepResult:
        """The step was committed, and the daemon died before it could say so: what it was is not known."""
        self.committed_steps = self.optimizer.committed_steps
        return StepResult(
            kind=VerdictKind.COMMIT,
            step=self.optimizer.step,
            committed_steps=self.committed_steps,
            global_norm=math.nan,
            clip_coefficient=math.nan,
            speculated_buckets=0,
            republished_buckets=0,
            consecutive_skips=0,
        )
