"""An attachment whose gradients come in pieces on a GPU, from calls that XLA makes (superoffload_xla.h)."""

from superoffload._core import library
from superoffload._core.control import Connection
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.piece_attachment import PieceAttachment
from superoffload.v1 import optimizer_pb2


def _most_parameters(layout: optimizer_pb2.Layout) -> int:
    """That have elements in one bucket."""
    counts = [0] * len(layout.buckets)
    for placement in layout.placements:
        for bucket in range(placement.first_bucket, placement.first_bucket + placement.bucket_count):
            counts[bucket] += 1
    return max(counts)


def _any_stream() -> int:
    """JAX does not tell which one it uses, and `close_pieces` has waited for all of them."""
    return 0


class GpuPieceAttachment(PieceAttachment, GpuAttachment):
    """The parameters in its GPU memory are the daemon's; XLA's arrays are copies of them."""

    _again = "compute the gradients of this step again, from the parameters that this process has"

    def __init__(self, connection: Connection, request: optimizer_pb2.AttachOptimizerRequest, ordinal: int) -> None:
        super().__init__(connection, request, ordinal, "auto", 0, _most_parameters, None, _any_stream)

    def _attach(self, request: optimizer_pb2.AttachOptimizerRequest) -> None:
        if self.number:
            library.call("xla_attach", self.number, None)  # the present attachment ends when the next one begins
        super()._attach(request)
