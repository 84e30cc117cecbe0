"""An attachment whose trainer computes on a GPU (superoffload_gpu.h)."""

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import grpc

from superoffload import _library
from superoffload._attachment import Attachment, StepResult
from superoffload._control import Connection
from superoffload._error import Error
from superoffload.v1 import optimizer_pb2

Mover = Literal["auto", "daemon", "trainer", "direct"]
MOVERS: tuple[Mover, ...] = ("auto", "daemon", "trainer", "direct")  # by enum superoffload_mover


@dataclasses.dataclass(frozen=True)
class GpuReport:
    """What an attachment found out about its GPU, and chose."""

    gpu: str
    mover: Mover
    sharing: str  # how the daemon maps the GPU memory: "legacy", "descriptor", or "" when it does not
    coherent: bool  # the GPU uses the host's page tables, as on a Superchip
    staged: bool  # registering failed, and copies are slow
    seconds: dict[str, float]  # of the same copies beside the same kernels, by mover; only those measured
    gpu_bytes: int
    notes: str  # why something was not done


def measure_casts(ordinal: int, dtype: int, bucket_elements: int) -> list[tuple[int, float, float]]:
    """Seconds to get gradients of DataType ``dtype`` off the GPU: elements, "fused", "gpu_fp32", by bucket size."""
    table = []
    for elements in sorted({max(1, bucket_elements // divisor) for divisor in (64, 8, 1)}):
        fused, gpu_fp32 = ctypes.c_double(), ctypes.c_double()
        _library.call("gpu_measure_cast", ordinal, dtype, elements, ctypes.byref(fused), ctypes.byref(gpu_fp32))
        table.append((elements, fused.value, gpu_fp32.value))
    return table


def _options(
    optimizer: optimizer_pb2.Optimizer, next_slot: int, ordinal: int, mover: Mover, slots: int, max_tensors: int
) -> _library.GpuOptions:
    layout = optimizer.layout
    buckets = (_library.Bucket * len(layout.buckets))()
    for ours, bucket in zip(buckets, layout.buckets, strict=True):
        for field in ("elements", "parameters_offset", "state_offset", "dtype", "gradient_dtype", "group"):
            setattr(ours, field, getattr(bucket, field))
        ours.gradient_offsets[:] = bucket.gradient_offsets
    groups = (_library.Group * len(optimizer.groups))(
        *((g.lr, g.beta1, g.beta2, g.eps, g.weight_decay) for g in optimizer.groups)
    )
    return _library.GpuOptions(
        ordinal=ordinal,
        mover=MOVERS.index(mover),
        slots=slots,
        max_bucket_tensors=max_tensors,
        next_slot=next_slot,
        algorithm=optimizer.algorithm,
        bucket_count=len(buckets),
        group_count=len(groups),
        buckets=buckets,
        groups=groups,
        state_offsets=(layout.master_offset, layout.exp_avg_offset, layout.exp_avg_sq_offset),
    )


class GpuAttachment(Attachment):
    """Parameters are on the GPU, at ``device_parameters()``; gradients leave it through slots.

    The GPU's memory stays the same over the death of a daemon: autograd's graph may hold views of it. Streams are
    integers.
    """

    def __init__(
        self,
        connection: Connection,
        request: optimizer_pb2.AttachOptimizerRequest,
        ordinal: int,
        mover: Mover,
        slots: int,
        max_tensors: Callable[[optimizer_pb2.Layout], int],
    ) -> None:
        self._gpu = ordinal, mover, slots, max_tensors
        self._tail = False  # of the last step: it may not be over
        super().__init__(connection, request)

    def _attach(self, request: optimizer_pb2.AttachOptimizerRequest) -> None:
        previous = self._handles[-1] if self._handles else None
        super()._attach(request)
        try:
            self._attach_gpu(previous, pulls=request.sync != optimizer_pb2.SYNC_PUSH)
        except Error:
            self.end()
            _library.function("detach")(self._handles.pop())  # the GPU's memory is still the previous one's
            raise
        if previous is not None:
            _library.function("detach")(self._handles.pop(0))
        self._tail = False
        self.resident_buckets = 0

    def _attach_gpu(self, previous: ctypes.c_void_p | None, pulls: bool) -> None:
        """Views of the GPU's memory stay valid: it is that of the previous attachment, if there is one."""
        ordinal, mover, slots, max_tensors = self._gpu
        options = _options(self.optimizer, self.next_slot, ordinal, mover, slots, max_tensors(self.optimizer.layout))
        options.previous = previous
        report = _library.GpuReport()
        _library.call("gpu_attach", self._handle, ctypes.byref(options), ctypes.byref(report))
        if pulls:
            self.pull()
        self.report = GpuReport(
            gpu=report.gpu.decode(),
            mover=MOVERS[report.mover],
            sharing=("", "legacy", "descriptor")[report.sharing],
            coherent=bool(report.coherent),
            staged=bool(report.staged),
            seconds={name: report.seconds[i] for i, name in enumerate(MOVERS) if report.seconds[i] > 0},
            gpu_bytes=report.gpu_bytes,
            notes=report.notes.decode(errors="replace"),
        )

    def _recover(self, error: Error) -> bool:
        """As of any attachment, but gradients that were handed over were on the GPU, and are gone with the daemon."""
        lost = self.step_is_open()
        if lost:
            self._submitted = [call for call in self._submitted if call[0] == "set_group"]
        committed = super()._recover(error)
        if lost and not committed:
            raise Error(
                grpc.StatusCode.ABORTED,
                "the daemon died in the middle of a step, with gradients that were on their way; its successor has the "
                "optimizer and the model has the parameters of the step before: call zero_grad() and compute the "
                "gradients of this step again",
            )
        return committed

    def step_is_open(self) -> bool:
        return any(call[0] == "begin_step" for call in self._submitted)

    def device_parameters(self) -> int:
        """Device pointer of the parameters, laid out as the host's."""
        return _library.function("gpu_parameters")(self._handle)

    def pack_stream(self) -> int:
        """The stream that reads gradients."""
        return _library.function("gpu_stream")(self._handle)

    def pull(self) -> None:
        _library.call("gpu_pull", self._handle)

    def push(self, stream: int) -> None:
        """Copies the parameters to the daemon's memory, after what ``stream`` has done."""
        _library.call("gpu_push", self._handle, stream)

    def hand_over(self, bucket: int, pieces: Sequence[tuple[int, int, int]], dtype: int, stream: int) -> None:
        """``pieces``: device pointer, first element of the bucket, elements; of DataType ``dtype``, ascending."""
        tensors = (_library.Tensor * len(pieces))(*pieces)
        try:  # not _submit(): a gradient is never handed over again
            _library.call("gpu_gradient_ready", self._handle, bucket, tensors, len(pieces), dtype, stream)
        except Error as error:
            self._recover(error)

    def pack_after(self, stream: int) -> None:
        """Gradients that are handed over from now on wait for what ``stream`` has been given so far, too."""
        _library.call("gpu_pack_after", self._handle, stream)

    def await_parameters(self, bucket: int, stream: int) -> None:
        """Has ``stream`` wait for the parameters of the step that was ended last."""
        try:
            self._wait("gpu_await_parameters", stream, bucket)
        except Error as error:
            self._recover(error)  # then the parameters are there

    def wait_verdict(self) -> StepResult:
        """What the step that was ended last turned out to be; its parameters may still be on their way."""
        self._tail = True
        return self._wait_result("wait_verdict")

    def wait_over(self) -> None:
        """Waits until the parameters of the step that was ended last are final."""
        if self._tail:
            self._tail = False
            try:
                self._wait("wait_step", None)
            except Error as error:
                self._recover(error)

    def set_resident(self, count: int) -> None:
        """The optimizer must have been settled since the last step."""
        _library.call("gpu_set_resident", self._handle, count)
        self.resident_buckets = count

    def stall_seconds(self) -> float:
        """How long ``await_parameters`` waited for the daemon since the last step was ended."""
        return _library.function("gpu_stall")(self._handle)
