"""What the daemon is to do by itself: speculation, checkpoints, leases; and what attaching does to parameters."""

import dataclasses
import datetime
import os
from typing import Literal

from superoffload.v1 import optimizer_pb2

Sync = Literal["check", "push_params", "pull_params"]
Speculation = Literal["adaptive", "always", "never"]

SYNC = {
    "check": optimizer_pb2.SYNC_CHECK,
    "push_params": optimizer_pb2.SYNC_PUSH,
    "pull_params": optimizer_pb2.SYNC_PULL,
}
_SPECULATION = {
    "adaptive": optimizer_pb2.SPECULATION_ADAPTIVE,
    "always": optimizer_pb2.SPECULATION_ALWAYS,
    "never": optimizer_pb2.SPECULATION_NEVER,
}


@dataclasses.dataclass(frozen=True)
class CheckpointSchedule:
    """Checkpoints that the daemon takes by itself, while training goes on."""

    every_steps: int  # committed ones
    directory: str  # must exist on the daemon's machine; checkpoints become its step-00001000, ...
    keep: int = 2  # newest ones that stay; 0 keeps all


def check_sync(sync: Sync, restore: object) -> None:
    """``restore``: the constructor's; None for no checkpoint."""
    if sync not in SYNC:
        raise ValueError(f"sync is {sync!r} but must be one of {', '.join(map(repr, SYNC))}")
    if sync == "push_params" and restore is not None:
        # A constructor that died after the restore leaves an optimizer that exists, which the push of its successor's
        # fresh parameters would spoil.
        raise ValueError(
            "sync='push_params' and restore= contradict each other: a trainer that is started again would overwrite "
            "the restored parameters with its own; pass sync='pull_params' with restore= (the checkpoint begins, the "
            "daemon wins), or leave restore= out (the trainer's parameters win)"
        )


def check_max_grad_norm(argument: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{argument} is {value} but must be positive; None means no clipping")


def policies(
    speculation: Speculation, checkpoint: CheckpointSchedule | None, lease_seconds: float | None
) -> optimizer_pb2.Policies:
    if speculation not in _SPECULATION:
        raise ValueError(f"speculation is {speculation!r} but must be one of {', '.join(map(repr, _SPECULATION))}")
    result = optimizer_pb2.Policies(speculation=_SPECULATION[speculation])
    if checkpoint is not None:
        result.checkpoint.every_steps = checkpoint.every_steps
        result.checkpoint.directory = os.path.abspath(checkpoint.directory)
        result.checkpoint.keep = checkpoint.keep
    if lease_seconds is not None:
        result.lease.FromTimedelta(datetime.timedelta(seconds=lease_seconds))
    return result


def merged(present: optimizer_pb2.Policies, given: optimizer_pb2.Policies) -> optimizer_pb2.Policies:
    """Those that are not given stay as they are."""
    result = optimizer_pb2.Policies(speculation=given.speculation)
    for field in ("checkpoint", "lease"):
        source = given if given.HasField(field) else present
        if source.HasField(field):
            getattr(result, field).CopyFrom(getattr(source, field))
    return result
