"""How a pytree's leaves become an optimizer in the daemon: created or found, filled, attached to."""

import dataclasses
import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from superoffload._core import optimizers, policies, run, stored
from superoffload._core.attachment import Attachment
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment
from superoffload._core.gradient_memory import GradientMemory, create_with_first
from superoffload.jax import arrays, cuda, streams
from superoffload.jax.algorithm import Algorithm
from superoffload.jax.gpu_options import GpuOptions
from superoffload.jax.groups import Groups
from superoffload.jax.tree import HostedLeaf
from superoffload.v1 import optimizer_pb2


@dataclasses.dataclass
class Subject:
    """What is to be optimized."""

    connection: Connection
    name: str
    anonymous: bool
    algorithm: Algorithm
    groups: Groups
    hosted: list[HostedLeaf]
    policies: optimizer_pb2.Policies
    bucket_bytes: int
    seed: int | None  # of stochastic rounding; None: 0, or the one that the optimizer has
    member: run.Member | None  # None: it trains alone
    gpu: Any | None  # the JAX device that the parameters are on, unless they stream to it; None: the CPU
    gpu_options: GpuOptions

    def restore(self, source: optimizer_pb2.RestoreOptimizerRequest) -> None:
        """Nobody is attached."""
        optimizers.restore(self.connection, self.name, source, 0 if self.member is None else self.member.lineage)


def attach(
    subject: Subject,
    leaves: Sequence[Any],
    sync: policies.Sync,
    restore: optimizer_pb2.RestoreOptimizerRequest | None,
) -> tuple[Attachment, bool]:
    """Creates the optimizer where the daemon has none of its name. Returns whether the daemon's parameters are others.

    ``leaves``: the parameters, in the order of ``subject.hosted``.
    """
    specification = [leaf.to_proto(subject.groups.in_float32(leaf)) for leaf in subject.hosted]
    create = optimizer_pb2.CreateOptimizerRequest(
        anonymous=subject.anonymous,
        name=subject.name,
        algorithm=subject.algorithm.daemon_name,
        parameters=specification,
        policies=subject.policies,
        bucket_bytes=subject.bucket_bytes,
        seed=subject.seed or 0,
        groups=subject.groups.to_proto(0),
    )
    if subject.member is not None:
        subject.member.mark(create)
    streamed = streams.of(subject.hosted)

    def create_with(memory: GradientMemory) -> bool:
        _, create.gradient_slots, create.logged_buckets, create.log_slots, create.in_place = memory
        return optimizers.create(subject.connection, create)

    memories = (
        [GradientMemory()] if subject.gpu is None else subject.gpu_options.gradient_memories(bool(streamed.units))
    )
    created = create_with_first(memories, create_with)
    existing = None if created else subject.connection.get_whole(subject.name)
    if existing is not None:
        optimizers.check_algorithm(existing, subject.algorithm.daemon_name)
        stored.check_same_seed(existing, subject.seed)
        optimizers.check_same(specification, existing)
    request = optimizer_pb2.AttachOptimizerRequest(
        name=subject.name, sync=optimizer_pb2.SYNC_PUSH if created else policies.SYNC[sync]
    )
    if restore is not None and (existing is None or existing.state == optimizer_pb2.OPTIMIZER_STATE_INCOMPLETE):
        _restore(subject, restore, created)
        request.sync = optimizer_pb2.SYNC_PULL
    if request.sync == optimizer_pb2.SYNC_CHECK:
        request.parameter_crc32.extend(
            _checksum(leaf, hosted) for leaf, hosted in zip(leaves, subject.hosted, strict=True)
        )
    if subject.gpu is None:
        attachment = Attachment(subject.connection, request, threads=len(os.sched_getaffinity(0)))
    else:
        # The parameters in its GPU memory are the daemon's; XLA's arrays are copies of them. JAX does not tell which
        # streams it uses, and close_trainer() waits for all of them.
        attachment = GpuAttachment(
            subject.connection,
            request,
            cuda.ordinal(subject.gpu),
            "auto",
            device_slots=0,
            move_in=None,
            current_stream=lambda: 0,
            again="compute the gradients of this step again, from the parameters that this process has",
            streamed=streamed,
        )
        if error := attachment.why_none_streams():
            attachment.end()
            attachment.leave_memory()
            raise error
    if existing is not None:
        optimizers.update_policies(subject.connection, subject.name, existing.policies, subject.policies)
    if request.sync == optimizer_pb2.SYNC_PUSH:
        push(attachment, subject.hosted, leaves)
    return attachment, request.sync == optimizer_pb2.SYNC_PULL


def _restore(subject: Subject, source: optimizer_pb2.RestoreOptimizerRequest, created: bool) -> None:
    try:
        subject.restore(source)
    except Error:
        if created:
            optimizers.delete(subject.connection, subject.name)
        raise


def _pieces(leaf: Any, hosted: HostedLeaf) -> list[tuple[int, np.ndarray]]:
    """Bytes of what is hosted here, each piece with the place of its first one; in order."""
    pieces = arrays.pieces_of(leaf, hosted.dtype, hosted.part)
    size = hosted.dtype.itemsize
    return sorted(((first * size, piece.reshape(-1).view(np.uint8)) for first, piece in pieces), key=lambda p: p[0])


def _checksum(leaf: Any, hosted: HostedLeaf) -> int:
    checksum = 0
    for _, piece in _pieces(leaf, hosted):
        checksum = zlib.crc32(piece.data, checksum)
    return checksum


def push(attachment: Attachment, hosted: Sequence[HostedLeaf], leaves: Sequence[Any]) -> None:
    """The trainer wins, of what streams where it has values. No step is open."""
    views = []
    for leaf, spec, place in zip(leaves, hosted, attachment.optimizer.layout.placements, strict=True):
        if streams.has_no_value(leaf, spec):
            continue
        view = np.frombuffer(attachment.parameters(place.parameters_offset, spec.nbytes), np.uint8)
        for first, piece in _pieces(leaf, spec):
            view[first : first + piece.size] = piece
        views.append(view)
    attachment.masters_from_published()
    refresh(attachment)


def refresh(attachment: Attachment) -> None:
    """The daemon has published parameters that no step has brought: the GPU gets them, if there is one."""
    if isinstance(attachment, GpuAttachment):
        attachment.pull()
