"""Parameters that several processes have: each hosts a part of them, and gets the others' new ones here."""

from collections.abc import Sequence

import jax
import numpy as np

from superoffload.jax import processes
from superoffload.jax.tree import HostedLeaf


def exchange(leaves: Sequence[HostedLeaf], memories: Sequence[np.ndarray]) -> None:
    """Fills in what other processes host. All processes call it.

    ``memories``: of each leaf, what this process has of it, with the part that it hosts filled in.
    """
    shared = [(leaf, memory) for leaf, memory in zip(leaves, memories, strict=True) if leaf.placement.divided]
    if not shared:
        return
    own: np.ndarray = np.zeros(max(_size(shared, process) for process in range(jax.process_count())), np.uint8)
    at = 0
    for leaf, memory in shared:
        if leaf.placement.part is None:
            continue
        bytes_ = np.ascontiguousarray(memory[leaf.part.slices_in(leaf.placement.local)]).reshape(-1).view(np.uint8)
        own[at : at + bytes_.size] = bytes_
        at += bytes_.size
    for process, theirs in enumerate(processes.gather_bytes(own)):
        if process != jax.process_index():
            _fill_in(shared, process, theirs)


def _size(shared: Sequence[tuple[HostedLeaf, np.ndarray]], process: int) -> int:
    """Bytes that the process hosts."""
    parts = [(leaf.placement.parts.get(process), leaf.dtype) for leaf, _ in shared]
    return sum(part.elements * dtype.itemsize for part, dtype in parts if part is not None)


def _fill_in(shared: Sequence[tuple[HostedLeaf, np.ndarray]], process: int, theirs: np.ndarray) -> None:
    at = 0
    for leaf, memory in shared:
        part = leaf.placement.parts.get(process)
        if part is None:
            continue
        end = at + part.elements * leaf.dtype.itemsize
        if part.intersection(leaf.placement.local) is not None:  # else it is of a box that this process does not have
            values = np.ascontiguousarray(theirs[at:end]).view(leaf.dtype).reshape(part.shape)
            memory[part.slices_in(leaf.placement.local)] = values
        at = end
