"""A model whose parameters are on a GPU: how its optimizer attaches, and how it uses the GPU."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import grpc
import torch

from superoffload._core.attachment import Attachment
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment, GpuReport, measure_casts
from superoffload._core.gradient_memory import GradientMemory, why_not_streamed
from superoffload.torch import cuda, parameters
from superoffload.torch.attach import Subject
from superoffload.torch.gpu import forward, move, streams
from superoffload.torch.gpu.forward import ForwardWaits
from superoffload.torch.gpu.live import GpuParameters
from superoffload.torch.gpu.options import GpuOptions, Weights
from superoffload.torch.gpu.residents import Residents
from superoffload.torch.gpu.staying import Staying
from superoffload.torch.gpu.streams import GatheredStreams, StreamReader, Streams
from superoffload.torch.gpu.submitter import GpuSubmitter
from superoffload.torch.gpu.suspension import Suspension
from superoffload.torch.live import LiveParameters
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.shards import HostedParameter
from superoffload.torch.submitter import Given, Submitter
from superoffload.v1 import optimizer_pb2

_DEFAULT_BUCKET_BYTES = 64 << 20  # the daemon's
_SHORT_LOG = 3  # slots: of two steps, and the one to come
_TAPERING = 8  # buckets that are smaller


class GpuBackend:
    """A `Backend` (attach.py, lifecycle.py)."""

    casts_gradients = True

    def __init__(self, options: GpuOptions, device: torch.device, weights: Weights) -> None:
        self._options = options
        self._where = weights
        self._why_resident = ""  # where "auto" has no choice
        self._device = device
        self._may_be_resident = False  # as the algorithm says
        self._cast_timings: list[tuple[int, float, float]] = []  # elements, and seconds of "fused" and of "gpu_fp32"

    @property
    def streams(self) -> bool:
        return self._where not in ("resident", 0)

    @property
    def _adds_up(self) -> bool:
        return self._options.accumulate == "daemon"

    @property
    def weights(self) -> Mapping[str, torch.Tensor] | None:
        return self._options.weights

    def check(self, subject: Subject) -> None:
        """Raises Error for memory formats that a parameter would lose, and for what cannot be had together."""
        if self.streams and (obstacle := self._obstacle(subject)):
            if self._where != "auto":
                raise Error(*obstacle)
            self._where, self._why_resident = "resident", f"no blocks stream: {obstacle[1]}"
        if self._adds_up and subject.group is not None:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                "accumulate='daemon' is for one rank: those of several reduce their gradients first; leave it out",
            )
        for parameter in subject.hosted:
            if not parameter.local.is_contiguous():
                raise Error(
                    grpc.StatusCode.UNIMPLEMENTED,
                    f"parameter {parameter.name} has strides {list(parameter.local.stride())}, but on a GPU "
                    "parameters are row-major; call model.to(memory_format=torch.contiguous_format), or "
                    ".data = .data.contiguous()",
                )

    def _obstacle(self, subject: Subject) -> tuple[grpc.StatusCode, str] | None:
        """Why nothing can stream."""
        if why := why_not_streamed(self._options.gradient_slots, self._options.resident_buckets):
            return grpc.StatusCode.UNIMPLEMENTED, why
        if streams.count(subject.hosted) == 0:
            return (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"weights is {self._where!r}, but no blocks are found that could stream: pass "
                "model.named_parameters(), of a model whose blocks are in a list of modules; or weights='resident'",
            )
        if subject.group is not None:
            chosen = streams.choose(subject.hosted, self._where, self._options.stream_slots)
            if why := streams.obstacle_of_ranks(subject.hosted, chosen):
                return grpc.StatusCode.UNIMPLEMENTED, f"weights of several ranks do not stream: {why}"
        return None

    def choose_cast(self, hosted: list[HostedParameter], bucket_bytes: int) -> bool:
        if self._options.cast != "auto" or self._adds_up:  # of sums it would change results
            return self._options.cast == "gpu_fp32"
        total = sum(parameter.local.numel() for parameter in hosted)
        tensor = max((p.local for p in hosted), key=torch.Tensor.numel)
        elements = min(total, (bucket_bytes or _DEFAULT_BUCKET_BYTES) // tensor.element_size())
        try:
            self._cast_timings = measure_casts(cuda.ordinal(self._device), shards.DATA_TYPES[tensor.dtype], elements)
        except Error as error:
            if error.code != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return False  # what a full GPU has no room to measure needs the least of it
        _, fused_seconds, gpu_fp32_seconds = self._cast_timings[-1]
        return gpu_fp32_seconds < fused_seconds

    def gradient_memories(self, subject: Subject, bucket_bytes: int, casts: bool) -> Iterator[GradientMemory]:
        slots, may_narrow = self._options.gradient_slots, self._options.cast == "auto"
        in_place = GradientMemory(casts and not may_narrow, gradient_slots=1, in_place=True)
        if slots == "in_place":
            yield in_place
            return
        logs = list(self._logs(subject, bucket_bytes))
        for log in logs:
            yield GradientMemory(casts, 2 if slots == "auto" else slots, *log)
        if slots != "auto":
            return
        if casts and may_narrow:
            yield GradientMemory(False, 2, *logs[-1])
        yield GradientMemory(in_place.casts, 1, *logs[-1])
        if self.streams or self._adds_up:
            return
        alike = all(p.local.dtype == (torch.float32 if in_place.casts else p.gradient_dtype) for p in subject.hosted)
        if alike and not subject.algorithm.matrices:
            yield in_place

    def _logs(self, subject: Subject, bucket_bytes: int) -> Iterator[tuple[int, int]]:
        """How many of the last buckets have a log, and its slots."""
        count, steps = self._options.resident_buckets, self._options.resident_steps
        if not subject.algorithm.may_be_resident or count == 0 or steps == 1 or self.streams:
            yield 0, 0
        elif count != "auto":
            yield count, steps + 1
        elif cuda.is_integrated(self._device):
            yield 0, 0
        else:
            most = self._most_residents(subject, bucket_bytes or _DEFAULT_BUCKET_BYTES)
            yield most, steps + 1 if most > 0 else 0
            if most > 0:
                yield most, _SHORT_LOG
                yield 0, 0

    def _most_residents(self, subject: Subject, bucket_bytes: int) -> int:
        """How many buckets there may ever be room for, with some for those that taper."""
        free = self._options.resident_share * cuda.total_bytes(self._device) - cuda.used_bytes(self._device)
        gradient = max(p.local.element_size() for p in subject.hosted)
        resident = subject.algorithm.state_bytes + gradient
        return max(0, math.ceil(free / resident / (bucket_bytes // gradient)) + _TAPERING) if free > 0 else 0

    def map(
        self, subject: Subject, request: optimizer_pb2.AttachOptimizerRequest, synchronize: Callable[[], None]
    ) -> tuple[Attachment, LiveParameters]:
        resides = subject.algorithm.may_be_resident and not cuda.is_integrated(self._device)
        self._may_be_resident = resides and not self.streams
        attachment = GpuAttachment(
            subject.connection,
            request,
            cuda.ordinal(self._device),
            "trainer" if self._adds_up and self._options.mover == "auto" else self._options.mover,
            0 if self._options.device_slots == "auto" else self._options.device_slots,
            functools.partial(move.move_in, self._moving(subject)),
            functools.partial(cuda.stream_of, self._device),
            "call zero_grad() and compute the gradients of this step again",
            streams.choose(subject.hosted, self._where, self._options.stream_slots),
        )
        self._check_blocks(attachment)
        if self._why_resident:
            attachment.note_weights(self._why_resident)
        for parameter, placement in zip(subject.hosted, attachment.optimizer.layout.placements, strict=True):
            parameter.buckets = parameters.buckets_of(placement)
        return attachment, GpuParameters(subject.hosted, attachment, synchronize, subject.replicas)

    def _check_blocks(self, attachment: GpuAttachment) -> None:
        error = attachment.why_none_streams()
        if error is None:
            return
        if self._where == "auto":
            self._why_resident = "no blocks stream: the optimizer was created for weights that stay on the GPU"
            return
        attachment.end()
        raise error

    def _moving(self, subject: Subject) -> move.Moving:
        moving = move.Moving(subject.hosted, self._device, self._options.weights)
        if subject.group is not None and self._options.device is not None:
            moving.beside = parameters.not_hosted(subject.param_groups, subject.hosted)
        return moving

    def serve(
        self, attachment: Attachment, given: Given, send_written_state: Callable[[], None]
    ) -> tuple[Submitter, "UsedGpu"]:
        assert isinstance(attachment, GpuAttachment), "map() has made it"
        units = attachment.streamed_units
        streamed: StreamReader = (
            Streams(attachment, given.hosted, units, forward.call_around)
            if given.ranks is None or not any(units)
            else GatheredStreams(attachment, given.hosted, units)
        )
        waits = ForwardWaits(attachment, given.hosted, streamed)
        submitter = GpuSubmitter(attachment, given, waits, send_written_state, self._adds_up)
        residents = Residents(attachment, self._options, self._device, self._may_be_resident, alone=given.ranks is None)
        staying = None
        if self._where == "auto" and any(attachment.streamed_units):
            staying = Staying(attachment, attachment.streamed, self._device, self._options.resident_share)
        hook = functools.partial(forward.hook, outputs=False)
        suspension = Suspension(attachment, given.hosted, self._device, hook)
        return submitter, UsedGpu(attachment, waits, residents, streamed, staying, suspension, self._cast_timings)


class UsedGpu:
    """The GPU that an attachment uses: forward passes that wait for its parameters, and what stays there.

    The daemon is told how the GPU is used; ctl and metrics show that.
    """

    def __init__(
        self,
        attachment: GpuAttachment,
        waits: ForwardWaits,
        residents: Residents,
        streamed: StreamReader,
        staying: Staying | None,
        suspension: Suspension,
        cast_timings: list[tuple[int, float, float]],
    ) -> None:
        self._attachment = attachment
        self._streamed, self._staying = streamed, staying
        self._suspension = suspension
        self._cast_timings = cast_timings
        self._reported: tuple[GpuReport, int] | None = None
        self._watched = self._was_watched = True  # the last step, and the one before
        self.waits = waits
        self.residents = residents
        self._report_use()

    @property
    def report(self) -> GpuReport:
        return self._attachment.report

    def before_step_end(self) -> None:
        self.waits.before_step_end()

    def on_step_end(self, changed: bool, watched: bool) -> None:
        self.waits.on_step_end(changed, watched)
        self._watched, self._was_watched = watched, self._watched

    def wait_over(self) -> None:
        """Waits until the last step is over, in the daemon and on the GPU."""
        self._attachment.wait_over()

    def synchronize(self) -> None:
        """Has the current stream wait for the parameters of the last step."""
        self.waits.wait_all()

    def stall_seconds(self) -> float:
        """How long the forward passes since the last step have waited for parameters that the daemon did not have."""
        return self._attachment.stall_seconds()

    def after_step(self, stall_seconds: float, quiesce: Callable[[], None]) -> None:
        if self._watched or self._was_watched:  # without overlap forward waits for more
            stall_seconds = 0.0
        self.residents.after_step(stall_seconds, quiesce)
        if self._staying is not None:
            self._staying.after_step(self._watched, quiesce)
        self._report_use()

    def after_zero_grad(self, quiesce: Callable[[], None]) -> None:
        if self.is_released:
            return
        self.residents.after_zero_grad(quiesce)
        if self._staying is not None:
            self._staying.after_zero_grad(quiesce)
        self._report_use()

    @property
    def is_released(self) -> bool:
        return self._suspension.is_on

    def check_present(self) -> None:
        """Raises Error while the parameters have no GPU memory."""
        self._suspension.check()

    def release(self, quiesce: Callable[[], None]) -> None:
        """No gradient is there, and parameters are as published."""
        quiesce()
        if self._attachment.resident_buckets > 0:
            self.residents.leave(quiesce)
        try:
            self._suspension.begin()
        except Error:
            self.residents.come_back(quiesce)
            raise
        self._report_use()

    def resume(self, quiesce: Callable[[], None]) -> None:
        self._suspension.end()
        self.residents.come_back(quiesce)
        self._report_use()

    def before_close(self) -> None:
        """Raises Error for want of GPU memory that shards need."""
        self._suspension.before_close()

    def close(self) -> None:
        self.waits.close()

    def _report_use(self) -> None:
        """Reports to the daemon where something is new: residents have changed, or another daemon has taken over."""
        attachment = self._attachment
        present = attachment.report, attachment.resident_buckets
        if self._reported is not None and self._reported[0] is present[0] and self._reported[1] == present[1]:
            return
        report, layout = attachment.report, attachment.optimizer.layout
        use = optimizer_pb2.GpuUse(
            gpu=report.gpu,
            mover=report.mover,
            sharing=report.sharing,
            coherent=report.coherent,
            staged=report.staged,
            mover_seconds=report.seconds,
            cast="gpu_fp32" if any(b.gradient_dtype != b.dtype for b in layout.buckets) else "fused",
            cast_timings=[
                optimizer_pb2.CastTiming(elements=elements, fused_seconds=fused, gpu_fp32_seconds=fp32)
                for elements, fused, fp32 in self._cast_timings
            ],
            resident_buckets=attachment.resident_buckets,
            gpu_bytes=report.gpu_bytes,
            notes="; ".join(filter(None, [report.notes, report.weights])),
            streamed_units=len(set(attachment.streamed_units) - {0} - attachment.staying),
            stream_slots=attachment.streamed.slots,
            streamed_bytes=self._streamed.nbytes,
        )
        attachment.call("ReportGpu", optimizer_pb2.ReportGpuRequest(name=attachment.optimizer.name, use=use))
        self._reported = present
