"""How an optimizer of this process becomes one in the daemon: created or found, filled, attached to."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import grpc
import torch

from superoffload._core import optimizers, policies, run, stored
from superoffload._core.attachment import Attachment
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuReport
from superoffload._core.gradient_memory import GradientMemory, create_with_first
from superoffload._core.run import Member
from superoffload.torch import groups, meta, parameters
from superoffload.torch.algorithm import Algorithm, name_of
from superoffload.torch.live import LiveParameters, Replicas
from superoffload.torch.ranks.shards import HostedParameter
from superoffload.torch.submitter import Given, Submitter
from superoffload.v1 import optimizer_pb2


class Gpu(Protocol):
    """The GPU that an attachment uses; see gpu/backend.py."""

    @property
    def report(self) -> GpuReport: ...
    def before_step_end(self) -> None: ...
    def on_step_end(self, changed: bool, watched: bool) -> None: ...
    def wait_over(self) -> None: ...
    def synchronize(self) -> None: ...
    def stall_seconds(self) -> float: ...
    def after_step(self, stall_seconds: float, quiesce: Callable[[], None]) -> None: ...
    def after_zero_grad(self, quiesce: Callable[[], None]) -> None: ...
    @property
    def is_released(self) -> bool: ...
    def check_present(self) -> None: ...
    def release(self, quiesce: Callable[[], None]) -> None: ...
    def resume(self, quiesce: Callable[[], None]) -> None: ...
    def before_close(self) -> None: ...
    def close(self) -> None: ...


class Backend(Protocol):
    """Where the model's parameters are while they are trained: the CPU's memory (host.py), a GPU's (gpu/backend.py)."""

    @property
    def casts_gradients(self) -> bool:
        """Whether gradients of any dtype can be handed over."""

    @property
    def streams(self) -> bool:
        """Whether parameters of blocks stream."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor] | None:
        """Values of parameters that are on meta."""

    def check(self, subject: "Subject") -> None:
        """Raises Error for parameters that cannot be there, and for what cannot be had together."""

    def choose_cast(self, hosted: list[HostedParameter], bucket_bytes: int) -> bool:
        """Whether gradients of an optimizer to be created leave as fp32, whatever their dtype."""

    def gradient_memories(self, subject: "Subject", bucket_bytes: int, casts: bool) -> Iterator[GradientMemory]:
        """What an optimizer to be created has for gradients. Where the daemon has no memory for it, the next one.

        ``casts``: they leave sooner as fp32.
        """

    def map(
        self, subject: "Subject", request: optimizer_pb2.AttachOptimizerRequest, synchronize: Callable[[], None]
    ) -> tuple[Attachment, LiveParameters]:
        """Attaches. ``synchronize`` has the GPU's current stream wait for the parameters of the last step."""

    def serve(
        self, attachment: Attachment, given: Given, send_written_state: Callable[[], None]
    ) -> "tuple[Submitter, Gpu | None]":
        """Makes what submits gradients to ``attachment``, which `map` has made.

        ``send_written_state`` is called before the first gradient of a step leaves a GPU.
        """


@dataclasses.dataclass
class Subject:
    """What is to be optimized."""

    connection: Connection
    name: str
    anonymous: bool
    algorithm: Algorithm
    param_groups: list[dict[str, Any]]
    hosted: list[HostedParameter]
    backend: Backend
    seed: int | None = None  # of stochastic rounding; None: 0, or the one that the optimizer has
    member: Member | None = None  # None: it trains alone
    replicas: Replicas | None = None
    group: run.Group | None = None  # of the ranks that it trains with

    def in_float32(self) -> list[bool]:
        """Whose state is kept so, whatever that of others is."""
        return [
            self.algorithm.in_float32(each.name, each.tensor.shape, each.local.dtype, self.param_groups[each.group])
            for each in self.hosted
        ]

    def restore(self, source: optimizer_pb2.RestoreOptimizerRequest) -> None:
        """Has the daemon load ``source`` into this optimizer, and takes hyper-parameters over. Nobody is attached."""
        optimizers.restore(self.connection, self.name, source, 0 if self.member is None else self.member.lineage)
        restored = self.connection.get_whole(self.name)
        for group, values in zip(self.param_groups, restored.groups, strict=True):
            group.update(groups.from_proto(self.algorithm, values))


@dataclasses.dataclass
class _Found:
    """What the daemon has of the optimizer before that is attached to."""

    made: bool  # by this call
    restored: bool
    existing: optimizer_pb2.Optimizer | None
    request: optimizer_pb2.AttachOptimizerRequest


@dataclasses.dataclass
class Attached:
    """What an attach has made."""

    created: bool  # False: with the state that it had before
    attachment: Attachment
    live: LiveParameters


def attach(
    subject: Subject,
    sync: policies.Sync,
    given: optimizer_pb2.Policies,
    restore: optimizer_pb2.RestoreOptimizerRequest | None,
    bucket_bytes: int,
    synchronize: Callable[[], None],
) -> Attached:
    """Creates the optimizer where the daemon has none of its name; ``synchronize``: as for `Backend.map`."""
    subject.backend.check(subject)
    casts_on_gpu = subject.backend.choose_cast(subject.hosted, bucket_bytes)

    def drop(found: _Found) -> None:
        if found.made:
            optimizers.delete(subject.connection, subject.name)

    def find() -> _Found:
        return _find(subject, sync, given, restore, bucket_bytes, casts_on_gpu)

    found = run.all_or_none(subject.group, "have its optimizer", find, drop)
    attachment, live = run.all_or_none(
        subject.group, "attach", lambda: subject.backend.map(subject, found.request, synchronize)
    )
    try:
        if found.existing is not None:
            optimizers.update_policies(subject.connection, subject.name, found.existing.policies, given)
        if found.request.sync == optimizer_pb2.SYNC_PUSH:
            live.push_first()
        live.move_in()
    except BaseException:
        attachment.give_values_back()
        raise
    created = found.made or found.restored  # nothing of what was there before goes on
    return Attached(created, attachment, live)


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
        optimizers.check_algorithm(existing, subject.algorithm.daemon_name, name_of)
        stored.check_same_seed(existing, subject.seed)
        parameters.check_same(subject.hosted, subject.in_float32(), existing, subject.backend.casts_gradients)
    if restore is not None and (existing is None or existing.state == optimizer_pb2.OPTIMIZER_STATE_INCOMPLETE):
        try:
            subject.restore(restore)
        except Error:
            if created:
                optimizers.delete(subject.connection, subject.name)
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
                optimizers.delete(subject.connection, subject.name)
            raise
    return _Found(made, created and not made, existing, request)


def _check_values(subject: Subject) -> None:
    """Raises Error for a parameter on meta without weights."""
    for parameter in subject.hosted:
        if parameter.tensor.device.type == "meta" and parameter.name not in (subject.backend.weights or {}):
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"parameter {parameter.name} is on meta and has no value; pass model.named_parameters() and a state "
                "dict of the same names (GpuOptions(weights=...)), or let the daemon's parameters win (restore=, or "
                "sync='pull_params')",
            )


def _values(subject: Subject) -> Iterator[torch.Tensor]:
    """The values of the parameters, in order."""
    _check_values(subject)
    for parameter in subject.hosted:
        value = meta.value_of(parameter, subject.backend.weights)
        assert value is not None, "that is checked"
        yield value


def _create(subject: Subject, given: optimizer_pb2.Policies, bucket_bytes: int, casts_on_gpu: bool) -> bool:
    """Returns False when the optimizer exists already."""
    request = optimizer_pb2.CreateOptimizerRequest(
        anonymous=subject.anonymous,
        name=subject.name,
        algorithm=subject.algorithm.daemon_name,
        policies=given,
        bucket_bytes=bucket_bytes,
        seed=subject.seed or 0,
        groups=[groups.to_proto(subject.algorithm, group) for group in subject.param_groups],
    )
    if subject.member is not None:
        subject.member.mark(request)

    def create(memory: GradientMemory) -> bool:
        casts, request.gradient_slots, request.logged_buckets, request.log_slots, request.in_place = memory
        gradient_dtype = torch.float32 if casts else None
        del request.parameters[:]
        given = subject.hosted, subject.in_float32(), gradient_dtype, not subject.backend.streams
        request.parameters.extend(parameters.specification(*given))
        return optimizers.create(subject.connection, request)

    memories = subject.backend.gradient_memories(subject, bucket_bytes, casts_on_gpu)
    return create_with_first(memories, create)
