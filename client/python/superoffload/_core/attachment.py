"""The step plane of one attachment: its memory as bytes, its rings as calls."""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from superoffload._core import library, structures
from superoffload._core.control import GONE, Connection
from superoffload._core.error import Error
from superoffload._core.step_result import StepResult
from superoffload.v1 import optimizer_pb2

_WAIT_SLICE_MILLISECONDS = 500
_DETACH_TIMEOUT_SECONDS = 30  # a daemon that hangs must not hang its trainer's exit
_DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


class Attachment:
    """Owns the mappings; views of them keep it alive.

    When the daemon dies inside a call and its successor recovers the optimizer, the call attaches anew and submits
    again what the open step had submitted: the gradients are still in the memory that trainer and daemon share. A step
    that had been committed before the daemon died is not submitted again.
    """

    def __init__(self, connection: Connection, request: optimizer_pb2.AttachOptimizerRequest) -> None:
        self._connection = connection
        self._sync_again = optimizer_pb2.SYNC_PULL  # with a successor
        self._handles: list[ctypes.c_void_p] = []  # the last one is in use; the mappings of the others may be, too
        self.undecided = False  # a step is prepared, and its verdict not known
        self._submitted: list[tuple[Any, ...]] = []  # since the last step was over: function and arguments
        self._groups: dict[int, tuple[Any, ...]] = {}  # the last set_group of each group before that
        connection.again(lambda: self._attach(request))
        self.committed_steps: int = self.optimizer.committed_steps

    optimizer: optimizer_pb2.Optimizer  # as the daemon has described it last

    def _attach(self, request: optimizer_pb2.AttachOptimizerRequest) -> None:
        self._stream, response = self._connection.attach(request)
        if self._handles and response.optimizer.id != self.optimizer.id:
            self._stream.cancel()
            raise self._lost("another optimizer has its name now")
        self.optimizer = response.optimizer
        self.next_slot: int = response.next_slot
        handle = ctypes.c_void_p()
        place = response.attachment_epoch, response.optimizer.step, len(response.optimizer.layout.buckets)
        library.call("attach", self._connection.handle, *place, ctypes.byref(handle))
        self._handles.append(handle)

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # None: late in the interpreter's end
            for handle in getattr(self, "_handles", []):
                library.function("detach")(handle)

    @property
    def _handle(self) -> ctypes.c_void_p:
        return self._handles[-1]

    def _submit(self, *call: Any) -> None:
        """Calls a function of the library, now and again whenever the open step has to be submitted anew."""
        self._submitted.append(call)
        try:
            library.call(call[0], self._handle, *call[1:])
        except Error as error:
            if error.code != grpc.StatusCode.UNAVAILABLE:
                self._submitted.pop()
            self._recover(error)

    def call(self, method: str, request: Any) -> Any:
        """A control call about this optimizer, made again when the daemon has died. No step is open."""
        return self._between_steps(lambda: self._connection.call(method, request))

    def parameter_steps(self) -> Sequence[int]:
        """Committed steps in which each parameter had a gradient. No step is open."""
        whole = self._between_steps(lambda: self._connection.get_pages(self.optimizer.name))
        return whole.parameter_steps or [whole.committed_steps] * len(whole.parameters)

    def write_checkpoint(self, request: optimizer_pb2.CheckpointOptimizerRequest) -> optimizer_pb2.CheckpointProgress:
        """The same for the call that writes a checkpoint, of which a daemon that died may have published it."""

        def once() -> optimizer_pb2.CheckpointProgress:
            try:
                return self._connection.stream("CheckpointOptimizer", request)
            finally:
                request.again = True

        return self._between_steps(once)

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
                committed = self.optimizer.committed_steps > self.committed_steps
                if committed:
                    self._step_over()
                # The successor knows the hyper-parameters of the optimizer's creation only.
                for call in [*self._groups.values(), *self._submitted]:
                    library.call(call[0], self._handle, *call[1:])
                return committed
            except Error as again:
                if again.code == grpc.StatusCode.NOT_FOUND:
                    raise self._lost("the present daemon does not know it") from None
                if again.code != grpc.StatusCode.UNAVAILABLE:  # else it died again
                    raise

    def _lost(self, why: str) -> Error:
        return Error(
            grpc.StatusCode.DATA_LOSS,
            f'the masters and moments of optimizer "{self.optimizer.name}" are lost with the daemon that had them: '
            f"{why}; the parameters in this process are those of step {self.committed_steps}. close() this optimizer "
            "and build another, from a checkpoint or from these parameters",
        )

    @contextlib.contextmanager
    def detached(self) -> Iterator[Connection]:
        """Ends the attachment for the length of a with block, then attaches anew; views stay valid.

        A step that is open is dropped; one that is prepared has to be resolved meanwhile.
        """
        self.call("GetOptimizer", optimizer_pb2.GetOptimizerRequest(name=self.optimizer.name))  # comes back first
        self.end()
        try:
            yield self._connection
        finally:
            request = optimizer_pb2.AttachOptimizerRequest(name=self.optimizer.name, sync=optimizer_pb2.SYNC_PULL)
            self._connection.again(lambda: self._attach(request))
            self._submitted.clear()
            self.undecided = False
            self.committed_steps = self.optimizer.committed_steps

    def end(self) -> None:
        """Ends the attachment and waits for it; the mappings stay until the last view of them is gone."""
        with contextlib.suppress(Error):  # the daemon has ended it already, or is gone
            request = optimizer_pb2.DetachOptimizerRequest(name=self.optimizer.name)
            self._connection.call("DetachOptimizer", request, _DETACH_TIMEOUT_SECONDS)
        self._stream.cancel()

    def leave_memory(self) -> None:
        """After `end()`: memory that views do not need is given back."""

    def _view(self, function: str, offset: int, count: int) -> Any:
        base = library.function(function)(self._handle, None)
        if not base:
            library.check(library.INTERNAL)
        kind: Any = type("Region", (ctypes.c_byte * count,), {})
        region = kind.from_address(base + offset)
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
        call = library.function(function)
        while (code := call(self._handle, *before, _WAIT_SLICE_MILLISECONDS, result)) == _DEADLINE:
            pass
        library.check(code)

    def set_group(self, group: int, scalars: Sequence[float]) -> None:
        """Hyper-parameters of a parameter group, in the algorithm's order."""
        self._submit("set_group", group, (ctypes.c_double * len(scalars))(*scalars), len(scalars))

    def begin_step(self, gradient_scale: float) -> None:
        self._submit("begin_step", gradient_scale)

    def parameter_absent(self, parameter: int) -> None:
        """It has no gradient in the open step, none of whose buckets that hold it were submitted."""
        self._submit("parameters_absent", parameter, 1)

    def gradient_ready(self, bucket: int) -> None:
        self._submit("gradient_ready", bucket)

    def adopt(self, calls: Sequence[tuple[Any, ...]], gone: bool) -> None:
        """The open step was begun by others, with these calls of the library; ``gone``: the daemon is, since."""
        self._submitted.extend(calls)
        if gone:
            self._recover(Error(grpc.StatusCode.UNAVAILABLE, "the daemon is gone"))

    def wait_norm(self, gradient_scale: float) -> float:
        return self._wait_measured("wait_norm", gradient_scale)

    def wait_sum(self) -> float:
        """The sum of the squares of this rank's gradients; nothing is decided."""
        return self._wait_measured("wait_sum", 1.0)

    def _wait_measured(self, function: str, *gradient_scale: float) -> float:
        measured = ctypes.c_double()
        while True:
            try:
                if gradient_scale:  # else the step is prepared, which asks for it
                    library.call("measure_norm", self._handle, *gradient_scale)
                self._wait(function, ctypes.byref(measured))
                return measured.value
            except Error as error:
                self._recover(error)

    def wait_prepared(self, gradient_scale: float, max_grad_norm: float) -> float:
        """The sum of the squares of this rank's gradients, once the step outlives trainer and daemon.

        From its call on until the step has ended with `end_prepared_step`, an exception leaves the optimizer to an
        agreement of all ranks (run.py, run_step.py).
        """
        self.undecided = True
        self._submit("prepare_step", gradient_scale, max_grad_norm)
        return self._wait_measured("wait_prepared")  # what a dead daemon had prepared refuses to be attached to

    def end_prepared_step(self, gradient_scale: float, max_grad_norm: float, total_sum_of_squares: float) -> None:
        self._submit("end_prepared_step", gradient_scale, max_grad_norm, total_sum_of_squares)

    def end_step(self, gradient_scale: float, max_grad_norm: float) -> None:
        self._submit("end_step", gradient_scale, max_grad_norm)

    def abandon_step(self) -> None:
        self._submit("abandon_step")

    def settle(self) -> StepResult | None:
        """After any of these calls was cut off by an exception: no step is open, and the last one is over.

        Returns what it was, or None when this attachment has had none.
        """
        if self.undecided:
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"a step of optimizer {self.optimizer.name} is prepared, which other ranks may have committed; close() "
                "the optimizer and build it anew on all ranks, which agree on the step",
            )
        while True:
            try:
                library.call("abandon_step", self._handle)
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
        verdict = structures.Verdict()
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
        return StepResult.of(verdict)

    def _step_over(self) -> None:
        self.undecided = False
        self._groups |= {call[1]: call for call in self._submitted if call[0] == "set_group"}
        self._submitted.clear()

    def _committed_unseen(self) -> StepResult:
        self.committed_steps = self.optimizer.committed_steps
        return StepResult.unseen(self.optimizer.step, self.committed_steps)
