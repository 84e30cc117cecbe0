"""A model whose parameters are in the CPU's memory: what its optimizer attaches with, and who submits gradients."""

from collections.abc import Callable, Mapping

import torch

from superoffload._core.attachment import Attachment
from superoffload.torch import parameters
from superoffload.torch.attach import Subject
from superoffload.torch.host_submitter import HostSubmitter
from superoffload.torch.live import HostParameters, LiveParameters
from superoffload.torch.ranks.shards import HostedParameter
from superoffload.torch.submitter import Given, Submitter
from superoffload.v1 import optimizer_pb2


class OnHost:
    """A `Place` (attach.py, attaching.py)."""

    casts_gradients = False
    weights: Mapping[str, torch.Tensor] | None = None

    def check(self, hosted: list[HostedParameter]) -> None:
        pass

    def choose_cast(self, hosted: list[HostedParameter], bucket_bytes: int) -> bool:
        return False

    def map(
        self, subject: Subject, request: optimizer_pb2.AttachOptimizerRequest, synchronize: Callable[[], None]
    ) -> tuple[Attachment, LiveParameters]:
        attachment = Attachment(subject.connection, request, torch.get_num_threads())
        parameters.map_views(subject.hosted, attachment)
        return attachment, HostParameters(subject.hosted, attachment, subject.replicas)

    def serve(
        self, attachment: Attachment, given: Given, send_written_state: Callable[[], None]
    ) -> tuple[Submitter, None]:
        return HostSubmitter(attachment, given), None
