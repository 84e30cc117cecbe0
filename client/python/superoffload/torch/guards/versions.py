"""Tells by torch's counters whether gradients on a GPU were written since they were taken."""

from collections.abc import Iterator

import torch


class Versions:
    """Addresses and versions of gradients, by index.

    What is written to a DTensor counts on the DTensor, and what is written to the part of this rank on that part.
    FSDP's gradients of one unit are views of one tensor and share its counter. So what FSDP accumulates into one of
    them must not look like an edit of those that were taken just before.
    """

    def __init__(self) -> None:
        self._taken: dict[int, tuple[int, int, int]] = {}
        self._sharers: dict[int, list[int]] = {}  # by storage

    def __contains__(self, index: int) -> bool:
        return index in self._taken

    def __iter__(self) -> Iterator[int]:
        return iter(self._taken)

    def take(self, index: int, gradient: torch.Tensor, whole: torch.Tensor) -> None:
        """It is as it should be. ``whole``: the DTensor that it is a part of, or itself."""
        sharers = self._sharers.setdefault(gradient.untyped_storage()._cdata, [])
        self._taken[index] = gradient.data_ptr(), gradient._version, whole._version
        if index not in sharers:
            sharers.append(index)

    def on_accumulated(self, gradient: torch.Tensor) -> None:
        """It has just been added to. Of those that share its counter this was one write, and no edit."""
        for index in self._sharers.get(gradient.untyped_storage()._cdata, ()):
            address, version, of_whole = self._taken[index]
            if version == gradient._version - 1:
                self._taken[index] = address, gradient._version, of_whole

    def is_same(self, index: int, gradient: torch.Tensor, whole: torch.Tensor, tolerated_writes: int) -> bool:
        """Whether nobody has written to it or replaced it, but for so many writes."""
        address, version, of_whole = self._taken[index]
        writes = max(gradient._version - version, whole._version - of_whole)
        return gradient.data_ptr() == address and writes in (0, tolerated_writes)
