"""Checkpoints of a run of several ranks: written and restored by all of them, or by none."""

import secrets
from collections.abc import Callable
from typing import Any

import grpc

from superoffload._core.error import Error
from superoffload._core.run import Group, Member, all_or_none


def restore(group: Group | None, member: Member | None, load: Callable[[], Any]) -> None:
    """Has all ranks, or the only one, ``load`` a checkpoint: it makes a lineage of its own."""
    if group is None or member is None:
        load()
        return
    member.lineage = group.gather_objects(secrets.randbits(63) | 1)[0]
    all_or_none(group, "restore its shard", load)


def save(group: Group, directory: str, committed_steps: int, write: Callable[[], Any]) -> None:
    """``write``: this rank's part of ``directory``, after so many steps; returns its CheckpointProgress.

    Afterwards ``directory`` is a whole checkpoint. ABORTED: another rank could not write its part.
    """
    own = directory, committed_steps
    for rank, theirs in enumerate(group.gather_objects(own)):
        if theirs != own:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"rank {rank} saves step {theirs[1]} to {theirs[0]}, rank {group.rank} step {own[1]} to {own[0]}; all "
                "ranks save the same step to the same directory",
            )
    what = f"write its part of {directory}"
    wrote = all_or_none(group, what, write)
    if any(group.gather_objects(wrote.run_whole)):
        return
    # A network file system may have shown the last rank an old listing.
    again = all_or_none(group, what, write)
    if not any(group.gather_objects(again.run_whole)):
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"every rank has written its part of {directory}, but none finds those of all; name a directory of a file "
            "system that all ranks share",
        )
