"""What is told about an optimizer to the daemon, whose ctl and metrics tell others."""

from superoffload._core.gpu_attachment import GpuAttachment, GpuReport
from superoffload.v1 import optimizer_pb2


class GpuReporter:
    """Tells the daemon how its optimizer uses the GPU."""

    def __init__(self, attachment: GpuAttachment, cast_timings: list[tuple[int, float, float]]) -> None:
        self._attachment = attachment
        self._cast_timings = cast_timings
        self._reported: tuple[GpuReport, int] | None = None

    def report(self) -> None:
        """Where something is new: other residents, or a daemon that has taken over."""
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
            notes=report.notes,
        )
        attachment.call("ReportGpu", optimizer_pb2.ReportGpuRequest(name=attachment.optimizer.name, use=use))
        self._reported = present
