"""How an optimizer of this process becomes one in the daemon: created or found, filled, attached to."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import grpc
import torch

from superoffload._core import hosting, policies, run, run_checkpoint
from superoffload._core.attachment import Attachment
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment, measure_casts
from superoffload._core.run import Member
from superoffload.torch import groups, parameters
from superoffload.torch.algorithm import Algorithm, name_of
from superoffload.torch.gpu import cuda, meta
from superoffload.torch.gpu import move as gpu_move
from superoffload.torch.gpu.live import GpuParameters
from superoffload.torch.gpu.options import GpuOptions
from superoffload.torch.live import HostParameters, LiveParameters
from superoffload.torch.parameters import HostedParameter
from superoffload.torch.ranks.replicas import Replicas
from superoffload.v1 import optimizer_pb2

_T = TypeVar("_T")
_DEFAULT_BUCKET_BYTES = 64 << 20  # the daemon's


@dataclasses.dataclass
class Subject:
    """What is to be optimized."""

    connection: Connection
    name: str
    anonymous: bool
    algorithm: Algorithm
    param_groups: list[dict[str, Any]]
    hosted: list[HostedParameter]
    gpu: GpuOptions | None  # None: the parameters are on the CPU
    device: torch.device | None  # the GPU
    member: Member | None = None  # None: it trains alone
    replicas: Replicas | None = None
    group: run.Group | None = None  # of the ranks that it trains with

    def together(self, what: str, call: Callable[[], _T], undo: Callable[[_T], Any] = lambda _: None) -> _T:
        """Makes a call in which no rank waits for another: where one of them fails, all do."""
        return call() if self.group is None else run_checkpoint.together(self.group, what, call, undo)

    def restore(self, source: optimizer_pb2.RestoreOptimizerRequest) -> None:
        """Has the daemon load ``source`` into this optimizer, and takes hyper-parameters over. Nobody is attached."""
        hosting.restore(self.connection, self.name, source, 0 if self.member is None else self.member.lineage)
        restored = self.connection.get_whole(self.name)
        for group, values in zip(self.param_groups, restored.groups, strict=True):
            group.update(groups.from_proto(self.algorithm, values))


@dataclasses.dataclass
class _Found:
    """In the daemon, before it is attached to."""

    made: bool  # by this call
    restored: bool
    existing: optimizer_pb2.Optimizer | None
    request: optimizer_pb2.AttachOptimizerRequest


@dataclasses.dataclass
class Attached:
    created: bool  # False: with the state that it had before
    attachment: Attachment
    live: LiveParameters
    cast_timings: list[tuple[int, float, float]]


def attach(
    subject: Subject,
    sync: policies.Sync,
    given: optimizer_pb2.Policies,
    restore: optimizer_pb2.RestoreOptimizerRequest | None,
    bucket_bytes: int,
    synchronize: Callable[[], None],
) -> Attached:
    """Creates the optimizer where the daemon has none of its name; ``synchronize``: as for `GpuParameters`."""
    if subject.gpu is not None:
        parameters.check_row_major(subject.hosted)
    casts_on_gpu, cast_timings = _choose_cast(subject, bucket_bytes)

    def drop(found: _Found) -> None:
        if found.made:
            hosting.delete(subject.connection, subject.name)

    found = subject.together(
        "have its optimizer", lambda: _find(subject, sync, given, restore, bucket_bytes, casts_on_gpu), drop
    )
    attachment, live = subject.together("attach", lambda: _map(subject, found.request, synchronize))
    if found.existing is not None:
        hosting.update_policies(subject.connection, subject.name, found.existing.policies, given)
    if found.request.sync == optimizer_pb2.SYNC_PUSH:
        live.push_first()
    live.move_in()
    created = found.made or found.restored  # nothing of what was there before goes on
    return Attached(created, attachment, live, cast_timings)


def _find(
    subject: Subject,
    sync: policies.Sync,
    given: optimizer_pb2.Policies,
    restore: optimizer_pb2.RestoreOptimizerRequest | None,
    bucket_bytes: int,
    casts_on_gpu: bool,
) -> _Found:
    made = created = _create(subject, given, bucket_bytes, casts_on_gpu)
    request = optimizer_pb2.AttachOptimizerRequest(
        name=subject.name, sync=optimizer_pb2.SYNC_PUSH if created else policies.SYNC[sync]
    )
    existing = None
    if not created:
        existing = subject.connection.get_whole(subject.name)
        hosting.check_algorithm(existing, subject.algorithm.daemon_name, name_of)
        parameters.check_same(subject.hosted, existing, any_gradient_dtype=subject.gpu is not None)
    if restore is not None and (existing is None or existing.state == optimizer_pb2.OPTIMIZER_STATE_INCOMPLETE):
        try:
            subject.restore(restore)
        except Error:
            if created:
                hosting.delete(subject.connection, subject.name)
            raise
        request.sync = optimizer_pb2.SYNC_PULL
        created = True
    if request.sync == optimizer_pb2.SYNC_CHECK:
        request.parameter_crc32.extend(parameters.checksums(_values(subject)))
    elif request.sync == optimizer_pb2.SYNC_PUSH:
        try:
            _check_values(subject)
        except Error:
            if created:
                hosting.delete(subject.connection, subject.name)
            raise
    return _Found(made, created and not made, existing, request)


def _weights(subject: Subject) -> Mapping[str, torch.Tensor] | None:
    return None if subject.gpu is None else subject.gpu.weights


def _check_values(subject: Subject) -> None:
    """Raises Error for a parameter on meta without weights."""
    for parameter in subject.hosted:
        if parameter.tensor.device.type == "meta" and parameter.name not in (_weights(subject) or {}):
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"parameter {parameter.name} is on meta and has no value; pass model.named_parameters() and a state "
                "dict of the same names (GpuOptions(weights=...)), or let the daemon's parameters win (restore=, or "
                "sync='pull_params')",
            )


def _values(subject: Subject) -> Iterator[torch.Tensor]:
    """Of the parameters, in order."""
    _check_values(subject)
    for parameter in subject.hosted:
        value = meta.value_of(parameter, _weights(subject))
        assert value is not None, "that is checked"
        yield value


def _create(subject: Subject, given: optimizer_pb2.Policies, bucket_bytes: int, casts_on_gpu: bool) -> bool:
    """Returns False when the optimizer exists already."""
    request = optimizer_pb2.CreateOptimizerRequest(
        anonymous=subject.anonymous,
        name=subject.name,
        algorithm=subject.algorithm.daemon_name,
        parameters=parameters.specification(subject.hosted, torch.float32 if casts_on_gpu else None),
        policies=given,
        bucket_bytes=bucket_bytes,
        groups=[groups.to_proto(subject.algorithm, group) for group in subject.param_groups],
    )
    if subject.member is not None:
        subject.member.mark(request)
    return hosting.create(subject.connection, request)


def _choose_cast(subject: Subject, bucket_bytes: int) -> tuple[bool, list[tuple[int, float, float]]]:
    """Whether gradients of an optimizer to be created leave the GPU as fp32, and what was measured to find out."""
    if subject.gpu is None or subject.gpu.cast != "auto":
        return subject.gpu is not None and subject.gpu.cast == "gpu_fp32", []
    total = sum(parameter.local.numel() for parameter in subject.hosted)
    tensor = max((p.local for p in subject.hosted), key=torch.Tensor.numel)
    elements = min(total, (bucket_bytes or _DEFAULT_BUCKET_BYTES) // tensor.element_size())
    try:
        timings = measure_casts(cuda.ordinal(subject.device), parameters.DATA_TYPES[tensor.dtype], elements)
    except Error as error:
        if error.code != grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False, []  # what a full GPU has no room to measure needs the least of it
    _, fused_seconds, gpu_fp32_seconds = timings[-1]
    return gpu_fp32_seconds < fused_seconds, timings


def _moving(subject: Subject) -> gpu_move.Moving:
    assert subject.gpu is not None and subject.device is not None, "it has a GPU"
    moving = gpu_move.Moving(subject.hosted, subject.device, subject.gpu.weights)
    if subject.group is not None and subject.gpu.device is not None:
        moving.beside = parameters.not_hosted(subject.param_groups, subject.hosted)
    return moving


def _map(
    subject: Subject, request: optimizer_pb2.AttachOptimizerRequest, synchronize: Callable[[], None]
) -> tuple[Attachment, LiveParameters]:
    hosted = subject.hosted
    if subject.gpu is None:
        attachment = Attachment(subject.connection, request, torch.get_num_threads())
        parameters.map_views(hosted, attachment)
        return attachment, HostParameters(hosted, attachment, subject.replicas)
    attachment = GpuAttachment(
        subject.connection,
        request,
        cuda.ordinal(subject.device),
        subject.gpu.mover,
        0 if subject.gpu.device_slots == "auto" else subject.gpu.device_slots,
        functools.partial(gpu_move.move_in, _moving(subject)),
        functools.partial(cuda.stream_of, subject.device),
        "call zero_grad() and compute the gradients of this step again",
    )
    for parameter, placement in zip(hosted, attachment.optimizer.layout.placements, strict=True):
        parameter.buckets = parameters.buckets_of(placement)
    return attachment, GpuParameters(hosted, attachment, synchronize, subject.replicas)
