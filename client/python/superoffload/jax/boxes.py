"""Boxes of a tensor's elements: which of them a process has, and which of those it hosts."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Box:
    """A contiguous range of indices in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: "Box") -> "Box | None":
        """None: they share no element."""
        begin = tuple(map(max, self.offset, other.offset))
        end = tuple(map(min, self._end(), other._end()))
        if any(low >= high for low, high in zip(begin, end, strict=True)):
            return None
        return Box(begin, tuple(high - low for low, high in zip(begin, end, strict=True)))

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Where this box lies in an array of the elements of ``outer``."""
        begins = [own - other for own, other in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.shape, strict=True))

    def first_in(self, outer: "Box") -> int | None:
        """The place of its first element in a row-major array of ``outer``; None where it is not contiguous there."""
        first, inner = 0, 1
        whole = True  # all later dimensions are those of ``outer``
        for own, size, offset, begin in reversed(
            list(zip(self.shape, outer.shape, self.offset, outer.offset, strict=True))
        ):
            if not whole and own != 1:
                return None
            first += (offset - begin) * inner
            inner *= size
            whole = whole and own == size
        return first

    def rows(self, part: int, parts: int) -> "Box":
        """One of ``parts`` parts, cut along the first dimension."""
        begin, end = (self.shape[0] * at // parts for at in (part, part + 1))
        return Box((self.offset[0] + begin, *self.offset[1:]), (end - begin, *self.shape[1:]))

    def _end(self) -> tuple[int, ...]:
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def of_index(index: Sequence[Any], shape: Sequence[int]) -> Box:
    """``index``: slices, as shards of JAX have them."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return Box(tuple(begin for begin, _ in ranges), tuple(end - begin for begin, end in ranges))


def _around(boxes: Iterable[Box]) -> Box | None:
    """The box that these, which share no element, make up; None: they make up none."""
    boxes = list(boxes)
    begin = tuple(map(min, *(box.offset for box in boxes))) if len(boxes) > 1 else boxes[0].offset
    end = tuple(map(max, *(box._end() for box in boxes))) if len(boxes) > 1 else boxes[0]._end()
    around = Box(begin, tuple(high - low for low, high in zip(begin, end, strict=True)))
    return around if around.elements == sum(box.elements for box in boxes) else None


def of_processes(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> dict[int, Box | None]:
    """What each process has; None: its elements make up no box."""
    shards: dict[int, set[Box]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        shards.setdefault(device.process_index, set()).add(of_index(index, shape))
    return {process: _around(own) for process, own in sorted(shards.items())}


def divide(local: Mapping[int, Box], position: int) -> dict[int, Box]:
    """What each process hosts of what it has, so that each element is hosted once.

    Processes that have the same box take some of its rows each. Where there are fewer rows than processes, one of them
    takes the box, by ``position``, a number of the tensor. Processes without a part are absent.
    """
    parts = {}
    for process, box in local.items():
        same = [other for other, theirs in local.items() if theirs == box]
        mine = same.index(process)
        if box.shape and box.shape[0] >= len(same):
            parts[process] = box.rows(mine, len(same))
        elif mine == position % len(same):
            parts[process] = box
    return parts
