"""One attachment after the other to an optimizer, and the trainer whose steps go through them."""

import contextlib
import ctypes
import enum
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from superoffload._core import library, memory, structures
from superoffload._core.control import GONE, Connection
from superoffload._core.error import Error
from superoffload._core.step_result import StepResult
from superoffload.v1 import optimizer_pb2

_WAIT_SLICE_MILLISECONDS = 500
_DETACH_TIMEOUT_SECONDS = 30  # a daemon that hangs must not hang its trainer's exit
_DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


class End(enum.IntEnum):
    """superoffload_end_kind."""

    END = 0
    PREPARE = 1
    PREPARED = 2
    ABANDON = 3
    MEASURE = 4


class _Region(enum.IntEnum):
    """superoffload_region."""

    PARAMETERS = 0
    GRADIENTS = 1
    STATE = 2


class Await(enum.IntEnum):
    """superoffload_await_kind."""

    NORM = 0
    PREPARED = 1
    VERDICT = 2
    STEP = 3
    BUCKET_ON_GPU = 5


class Resumed(enum.IntEnum):
    """superoffload_resumed."""

    NOTHING = 0
    SUBMITTED = 1
    COMMITTED = 2
    LOST = 3


class Stays(enum.IntEnum):
    """superoffload_stays: whose the memory of a gradient is once it was handed over."""

    NOT = 0
    UNTIL_PACKED = 1
    UNTIL_OVER = 2


Piece = tuple[int, int, int, int, int]  # address, first element, elements, parameter, DataType


def _c_pieces(pieces: Sequence[Piece]) -> ctypes.Array:
    values: Sequence[Any] = pieces  # ctypes makes its structures of tuples
    return (structures.Piece * len(pieces))(*values)


class Attachment:
    """Owns the mappings; views of them keep it alive.

    When the daemon dies inside a call and its successor recovers the optimizer, the call attaches anew, and the library
    submits what the open step had submitted once more. A step that had been committed before the daemon died is not
    submitted again.

    ``threads``: that a copy of gradients may use.
    """

    _again = "compute the gradients of this step again"  # after a death that has lost them

    def __init__(self, connection: Connection, request: optimizer_pb2.AttachOptimizerRequest, threads: int = 1) -> None:
        self._connection = connection
        self._threads = threads
        self._owner_pid = os.getpid()
        self._sync_again = optimizer_pb2.SYNC_PULL  # with a successor
        self._handles: list[ctypes.c_void_p] = []  # the last one is in use; the mappings of the others may be, too
        self.trainer = 0  # the library's number, which calls of XLA carry
        self._at_end: structures.OpenStep | None = None  # what it knew when it was closed
        self._lent_bytes = 0
        connection.again(lambda: self._attach(request))

    optimizer: optimizer_pb2.Optimizer  # as the daemon has described it last

    def _attach(self, request: optimizer_pb2.AttachOptimizerRequest, *, resumes: bool = True) -> Resumed:
        self._stream, response = self._connection.attach(request)
        if self._handles and response.optimizer.id != self.optimizer.id:
            self._stream.cancel()
            raise self._lost("another optimizer has its name now")
        self.optimizer = response.optimizer
        handle = ctypes.c_void_p()
        place = response.attachment_epoch, response.optimizer.step, len(response.optimizer.layout.buckets)
        library.call("attach", self._connection.handle, *place, ctypes.byref(handle))
        self._handles.append(handle)
        self._tail = False
        if not self.trainer:
            options, number = _options(self.optimizer, self._threads), ctypes.c_int64()
            self._lay_out(options)
            library.call("open_trainer", ctypes.byref(options), ctypes.byref(number))
            self.trainer = number.value
        self._give_memory(request.sync, response.next_slot)
        if self._lent_bytes:
            with contextlib.suppress(Error):  # it is there, whether or not there is still room for it in a budget
                self._lend(self._lent_bytes, held=True)
        return self._use(response.next_slot, resumes)

    def _lay_out(self, options: structures.TrainerOptions) -> None:
        """Decides where parameters lie in memory that is not the daemon's."""

    def _give_memory(self, sync: int, next_slot: int) -> None:
        """The attachment gets what it needs besides the daemon's memory."""

    def _use(self, next_slot: int, resumes: bool) -> Resumed:
        """Steps go through the last attachment from now on."""
        resumed = ctypes.c_uint32()
        place = self._handle, next_slot, self.optimizer.committed_steps, int(resumes)
        library.call("use_attachment", self.trainer, *place, ctypes.byref(resumed))
        return Resumed(resumed.value)

    def _leave(self) -> None:
        """No attachment is used, and an open step stays noted."""
        if self.trainer and self._at_end is None:
            library.call("use_attachment", self.trainer, None, 0, 0, 0, None)

    def __del__(self) -> None:
        # None: late in the interpreter's end. A forked child may have the library in the middle of a call.
        if sys is None or sys.is_finalizing() or os.getpid() != self._owner_pid:
            return
        self.close_trainer()
        for handle in self._handles:
            library.function("detach")(handle)

    def close_trainer(self) -> None:
        """Calls that submit end first; later ones fail, XLA's too."""
        if self.trainer and self._at_end is None:
            self._at_end = self.look()
            library.function("close_trainer")(self.trainer)

    @property
    def _handle(self) -> ctypes.c_void_p:
        return self._handles[-1]

    def _submit(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library about the open step; where the daemon is gone, its successor is told."""
        try:
            library.call(name, self.trainer, *arguments)
        except Error as error:
            self._recover(error)

    def call(self, method: str, request: Any) -> Any:
        """A control call about this optimizer, made again when the daemon has died. No step is open."""
        return self._between_steps(lambda: self._connection.call(method, request))

    def masters_from_published(self) -> None:
        """The published parameters become the masters. No step is open."""
        self.call("PushParameters", optimizer_pb2.PushParametersRequest(name=self.optimizer.name))

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
                resumed = self._attach(request)
                break
            except Error as again:
                if again.code == grpc.StatusCode.NOT_FOUND:
                    raise self._lost("the present daemon does not know it") from None
                if again.code != grpc.StatusCode.UNAVAILABLE:  # else it died again
                    raise
        if resumed == Resumed.LOST:
            raise Error(
                grpc.StatusCode.ABORTED,
                "the daemon died in the middle of a step, with gradients that were on their way; its successor has the "
                f"optimizer and the model has the parameters of the step before: {self._again}",
            )
        return resumed == Resumed.COMMITTED

    def come_back(self) -> bool:
        """Attaches anew where the daemon died in a whole step of XLA's. Returns whether it had."""
        if not self.look().lost:
            return False
        self._recover(Error(grpc.StatusCode.UNAVAILABLE, "the daemon is gone"))
        return True

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
            self._connection.again(lambda: self._attach(request, resumes=False))

    def end(self) -> None:
        """Ends the attachment and waits for it; the mappings stay until the last view of them is gone."""
        self._leave()
        with contextlib.suppress(Error):  # the daemon has ended it already, or is gone
            request = optimizer_pb2.DetachOptimizerRequest(name=self.optimizer.name)
            self._connection.call("DetachOptimizer", request, _DETACH_TIMEOUT_SECONDS)
        self._stream.cancel()

    # Gives parameters memory of their own whose values are the daemon's only.
    values_back: Callable[[], None] | None = None

    def leave_memory(self) -> None:
        """After `end()`: memory that views do not need is given back."""

    def give_values_back(self) -> None:
        """After `end()`."""
        back, self.values_back = self.values_back, None
        if back is not None:
            back()

    def _view(self, region: _Region, offset: int, count: int) -> Any:
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        library.call("memory", self._handle, region, ctypes.byref(base), ctypes.byref(size))
        assert base.value is not None, "it is there when the call succeeds"
        kind: Any = type("Region", (ctypes.c_byte * count,), {})
        view = kind.from_address(base.value + offset)
        view.attachment = self  # the memory must not be unmapped while anybody looks at it
        return view

    def parameters(self, offset: int, count: int) -> Any:
        """A writable buffer of `count` bytes of published parameters."""
        return self._view(_Region.PARAMETERS, offset, count)

    def gradients(self, offset: int, count: int) -> Any:
        """A writable buffer of `count` bytes of gradient slots."""
        return self._view(_Region.GRADIENTS, offset, count)

    def state(self, offset: int, count: int) -> Any:
        """A private buffer of `count` bytes of masters and moments; consistent only after settling."""
        return self._view(_Region.STATE, offset, count)

    def lend(self, size: int) -> mmap.mmap:
        """Memory on the daemon's NUMA node, zeros, for this process's own use: as long as anybody has it mapped.

        It counts as the user's until the attachment ends, also with another daemon. RESOURCE_EXHAUSTED: there is none.
        """
        number = self._lend(size)
        descriptor, whole = ctypes.c_int(), ctypes.c_size_t()
        library.call("lent_memory", self._handle, number, ctypes.byref(descriptor), ctypes.byref(whole))
        self._lent_bytes += size
        try:
            return mmap.mmap(descriptor.value, size)
        finally:
            os.close(descriptor.value)

    def _lend(self, size: int, held: bool = False) -> int:
        request = optimizer_pb2.LendMemoryRequest(name=self.optimizer.name, bytes=size, held=held)
        return self._connection.call("LendMemory", request).number

    # The open step.

    def look(self) -> structures.OpenStep:
        """What the library knows of it."""
        if self._at_end is not None:
            return self._at_end
        step = structures.OpenStep()
        library.call("look", self.trainer, ctypes.byref(step), None)
        return step

    @property
    def committed_steps(self) -> int:
        """Of which this process knows."""
        return self.look().committed_steps

    @property
    def undecided(self) -> bool:
        """Whether a step is prepared, and its verdict not known."""
        return bool(self.look().prepared)

    @property
    def scalar_names(self) -> list[str]:
        """Of hyper-parameters, in the algorithm's order."""
        return [scalar.name for scalar in self.optimizer.groups[0].scalars]

    def set_scalars(self, group: int, scalars: Sequence[float]) -> None:
        """Hyper-parameters of a parameter group, in the algorithm's order: of the open step and of later ones."""
        self._submit("set_scalars", group, (ctypes.c_double * len(scalars))(*scalars), len(scalars))

    def set_absent(self, parameters: Sequence[int]) -> None:
        """They have no gradient in the open step."""
        absent = (ctypes.c_uint32 * len(parameters))(*parameters)
        gradients = structures.Gradients(absent=absent, absent_count=len(parameters))
        self._submit("hand_over", ctypes.byref(gradients))

    def hand_over(self, pieces: Sequence[Piece]) -> None:
        """Gradients in the host's memory, where they may be in the slot of ``next_slot`` already."""
        gradients = structures.Gradients(pieces=_c_pieces(pieces), piece_count=len(pieces))
        self._submit("hand_over", ctypes.byref(gradients))

    def find_edited(self, pieces: Sequence[Piece]) -> int | None:
        """Index of one of these gradients that has other bytes than when it was handed over, if any."""
        index = ctypes.c_uint32()
        library.call("find_edited", self.trainer, _c_pieces(pieces), len(pieces), ctypes.byref(index))
        return None if index.value == len(pieces) else index.value

    def arrived(self) -> list[int]:
        """Elements of each parameter whose gradients have come in the open step.

        Raises Error for the first piece that a call of XLA has brought and that was refused.
        """
        elements = (ctypes.c_uint64 * len(self.optimizer.parameters))()
        library.call("look", self.trainer, ctypes.byref(structures.OpenStep()), elements)
        return list(elements)

    def _wait(self, function: str, *arguments: Any) -> None:
        """Waits in slices, so that ^C is heard: the arguments before the timeout, and those behind it as a tuple."""
        call = library.function(function)
        *before, behind = arguments
        while (code := call(*before, _WAIT_SLICE_MILLISECONDS, *behind)) == _DEADLINE:
            pass
        library.check(code)

    def _await(self, kind: Await) -> structures.Answer:
        awaited, answer = structures.Awaited(kind), structures.Answer()
        self._wait("wait", self.trainer, ctypes.byref(awaited), (ctypes.byref(answer),))
        return answer

    def wait_norm(self, gradient_scale: float) -> float:
        return self._wait_measured(gradient_scale).norm

    def wait_sum(self) -> float:
        """The sum of the squares of this rank's gradients; nothing is decided."""
        return self._wait_measured(1.0).sum_of_squares

    def _wait_measured(self, gradient_scale: float) -> structures.Answer:
        while True:
            try:
                library.call("end", self.trainer, ctypes.byref(structures.StepEnd(gradient_scale, kind=End.MEASURE)))
                return self._await(Await.NORM)
            except Error as error:
                self._recover(error)

    def _end(self, kind: End, gradient_scale: float = 1.0, max_grad_norm: float = 0.0, total: float = 0.0) -> None:
        streams = self._take_readers()
        end = structures.StepEnd(gradient_scale, max_grad_norm, total, kind, len(streams))
        end.streams = (ctypes.c_uint64 * len(streams))(*streams)
        self._submit("end", ctypes.byref(end))

    def _take_readers(self) -> Sequence[int]:
        """Streams of a GPU on which the parameters are read that the step's end changes."""
        return ()

    def wait_prepared(self, gradient_scale: float, max_grad_norm: float) -> float:
        """The sum of the squares of this rank's gradients, once the step outlives trainer and daemon.

        From its call on until the step has ended with `end_prepared_step`, an exception leaves the optimizer to an
        agreement of all ranks (run.py, run_step.py).
        """
        self._end(End.PREPARE, gradient_scale, max_grad_norm)
        while True:
            try:
                return self._await(Await.PREPARED).sum_of_squares
            except Error as error:
                self._recover(error)  # what a dead daemon had prepared refuses to be attached to

    def end_prepared_step(self, gradient_scale: float, max_grad_norm: float, total_sum_of_squares: float) -> None:
        self._end(End.PREPARED, gradient_scale, max_grad_norm, total_sum_of_squares)

    def end_step(self, gradient_scale: float, max_grad_norm: float) -> None:
        self._end(End.END, gradient_scale, max_grad_norm)

    def abandon_step(self) -> None:
        self._end(End.ABANDON)

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
        end = structures.StepEnd(gradient_scale=1.0, kind=End.ABANDON)
        while True:
            try:
                library.call("end", self.trainer, ctypes.byref(end))
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
        return None

    def wait_step(self) -> StepResult:
        """Waits until the parameters of the step that was ended last are final."""
        return self._wait_result(Await.STEP)

    def wait_verdict(self) -> StepResult:
        """What the step that was ended last turned out to be; its parameters may still be on their way."""
        return self._wait_result(Await.VERDICT)

    def wait_over(self) -> None:
        """After `wait_verdict()`: waits until its parameters are final."""
        if self._tail:
            self._tail = False
            try:
                self._await(Await.STEP)
            except Error as error:
                self._recover(error)

    def receive(self, ranges: Sequence[memory.Range]) -> list[int]:
        """Copies and digests as `memory` does, a range per parameter, each as soon as it is final."""
        digests, received = (ctypes.c_uint64 * len(ranges))(), (ctypes.c_uint8 * len(ranges))()
        if self._tail:
            try:
                self._wait("receive", self.trainer, memory.array(ranges), (digests, received))
                self._tail = False
            except Error as error:
                self._recover(error)  # then the parameters are there
        rest = [index for index, there in enumerate(received) if not there]
        for index, digest in zip(
            rest, memory.copy_and_digest([ranges[index] for index in rest], self._threads), strict=True
        ):
            digests[index] = digest
        return list(digests)

    def _wait_result(self, awaited: Await) -> StepResult:
        while True:
            try:
                result = StepResult.of(self._await(awaited).verdict)
                self._tail = awaited == Await.VERDICT
                return result
            except Error as error:
                if self._recover(error):
                    return self._committed_unseen()

    def _committed_unseen(self) -> StepResult:
        return StepResult.unseen(self.optimizer.step, self.optimizer.committed_steps)


def _options(optimizer: optimizer_pb2.Optimizer, threads: int) -> structures.TrainerOptions:
    """The model as the daemon has laid it out."""
    layout = optimizer.layout
    parameters = [
        structures.Parameter(
            name=parameter.name.encode(),
            elements=_product(parameter.shape),
            parameters_offset=place.parameters_offset,
            gpu_offset=place.parameters_offset,
            gradient_offsets=tuple(place.gradient_offsets),
            state_offset=place.state_offset,
            first_bucket=place.first_bucket,
            bucket_count=place.bucket_count,
            dtype=parameter.dtype,
            gradient_dtype=parameter.gradient_dtype or parameter.dtype,
        )
        for parameter, place in zip(optimizer.parameters, layout.placements, strict=True)
    ]
    buckets = _c_buckets(layout)
    return structures.TrainerOptions(
        parameters=(structures.Parameter * len(parameters))(*parameters),
        buckets=buckets,
        parameter_count=len(parameters),
        bucket_count=len(buckets),
        group_count=len(optimizer.groups),
        scalar_count=len(optimizer.groups[0].scalars),
        threads=threads,
    )


_BUCKET_FIELDS = (
    "elements",
    "parameters_offset",
    "state_offset",
    "dtype",
    "gradient_dtype",
    "group",
    "log_slots",
    "log_offset",
    "format",
)


def _c_buckets(layout: optimizer_pb2.Layout) -> ctypes.Array:
    """Of superoffload_bucket."""
    buckets = (structures.Bucket * len(layout.buckets))()
    for ours, bucket in zip(buckets, layout.buckets, strict=True):
        for field in _BUCKET_FIELDS:
            setattr(ours, field, getattr(bucket, field))
        ours.gpu_offset = bucket.parameters_offset
        ours.gradient_offsets[:] = bucket.gradient_offsets
    return buckets


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
