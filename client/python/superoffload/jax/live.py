"""The parameters that the loop has. They change in a step and nowhere else, and what the loop has changed is found.

JAX's arrays cannot be written, so those that the loop was given last need no look. Others are compared bit for bit: a
loop may pass parameters through a program, which returns other arrays. On the CPU digests stand for the bits, because
the daemon writes to the published parameters as soon as gradients have come.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import jax
import numpy as np

from superoffload._core import memory
from superoffload._core.attachment import Attachment
from superoffload._core.error import Error
from superoffload.jax import arrays
from superoffload.jax.tree import HostedLeaf


class LiveParameters:
    """``published_on_gpu``: the parameters of the last step; None: they are on the CPU."""

    def __init__(
        self,
        attachment: Attachment,
        hosted: Sequence[HostedLeaf],
        published_on_gpu: Callable[[], list[Any]] | None,
    ) -> None:
        self._attachment = attachment
        self._hosted = hosted
        self._published_on_gpu = published_on_gpu
        self._given: list[weakref.ref[jax.Array] | None] = [None] * len(hosted)
        self._given_at = -1  # committed steps
        self._digests: list[int] = []
        self._digests_at = -1

    def published(self) -> list[np.ndarray]:
        """Copies of what this process hosts of the parameters of the last step, on the CPU. No step is open."""
        targets = [arrays.empty(leaf.part.shape, leaf.dtype) for leaf in self._hosted]
        self._take_digests(targets)
        return targets

    def keep(self, leaves: Sequence[Any]) -> None:
        """The loop has these, which are the published ones. No step is open."""
        self._given = [weakref.ref(leaf) if isinstance(leaf, jax.Array) else None for leaf in leaves]
        self._given_at = self._attachment.committed_steps
        if self._published_on_gpu is None and self._digests_at != self._given_at:
            self._take_digests()

    def forget(self) -> None:
        """Others than steps have changed what is published."""
        self._digests_at = -1

    def check(self, leaves: Sequence[Any]) -> None:
        """Raises Error for parameters that the loop has changed. No step has ended since they were published."""
        latest = self._given_at == self._attachment.committed_steps  # else programs of XLA have made steps since
        others = {
            place: leaf
            for place, (leaf, given) in enumerate(zip(leaves, self._given, strict=True))
            if not latest or given is None or given() is not leaf
        }
        changed = self._changed(others) if others else []
        if changed:
            more = f" and {len(changed) - 1} more were" if len(changed) > 1 else " was"
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"parameter {changed[0]}{more} changed by somebody else than the optimizer, and nothing was committed; "
                "call push_params(params) to make these the masters, or params = pull_params() to undo the change, and "
                "then do the step again",
            )

    def _changed(self, leaves: dict[int, Any]) -> list[str]:
        hosted = {place: self._hosted[place] for place in leaves}
        alike = {
            place: leaf
            for place, leaf in leaves.items()
            if leaf is not None and leaf.dtype == hosted[place].dtype and not (hosted[place].streams and leaf.size)
        }
        changed = leaves.keys() - alike.keys()
        if self._published_on_gpu is not None:
            published = self._published_on_gpu()
            changed |= {place for place, leaf in alike.items() if not _same_bits(leaf, published[place])}
        elif self._knows_digests():
            parts = [arrays.part_of(leaf, hosted[place].dtype, hosted[place].part) for place, leaf in alike.items()]
            now = _digests([(part.ctypes.data, None, part.nbytes) for part in parts])
            changed |= {place for place, digest in zip(alike, now, strict=True) if digest != self._digests[place]}
        return [self._hosted[place].name for place in sorted(changed)]

    def _knows_digests(self) -> bool:
        if self._digests_at == self._attachment.committed_steps:
            return True
        if any(self._attachment.arrived()):  # after a step inside of jit, whose parameters the daemon may be changing
            return False
        self._take_digests()
        return True

    def _take_digests(self, targets: Sequence[np.ndarray] | None = None) -> None:
        places = self._attachment.optimizer.layout.placements
        views = [
            np.frombuffer(self._attachment.parameters(place.parameters_offset, leaf.nbytes), np.uint8)
            for leaf, place in zip(self._hosted, places, strict=True)
        ]
        to = [None] * len(views) if targets is None else [target.ctypes.data for target in targets]
        self._digests = _digests(
            [(view.ctypes.data, address, view.nbytes) for view, address in zip(views, to, strict=True)]
        )
        self._digests_at = self._attachment.committed_steps


def _digests(ranges: Sequence[memory.Range]) -> list[int]:
    return memory.copy_and_digest(ranges, len(os.sched_getaffinity(0)))


def _same_bits(ours: Any, theirs: jax.Array) -> bool:
    bits = np.dtype(f"uint{8 * theirs.dtype.itemsize}")
    return bool((jax.device_put(ours, theirs.sharding).view(bits) == theirs.view(bits)).all())
