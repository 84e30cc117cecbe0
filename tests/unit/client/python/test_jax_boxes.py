"""Which elements a process has and which of them it hosts."""

import math
import random

import numpy as np
import pytest

from superoffload.jax import boxes
from superoffload.jax.boxes import Box


class Device:
    def __init__(self, process):
        self.process_index = process


class Sharding:
    """``own``: of each device, its process and its slices."""

    def __init__(self, *own):
        self.own = own

    def devices_indices_map(self, shape):
        return {Device(process): index for process, *index in self.own}


def test_an_intersection_has_what_both_boxes_have():
    a, b = Box((0, 2), (4, 4)), Box((2, 0), (4, 3))
    assert a.intersection(b) == Box((2, 2), (2, 1))
    assert a.intersection(Box((4, 0), (1, 9))) is None
    assert a.intersection(b).slices_in(a) == (slice(2, 4), slice(0, 1))
    assert Box((), ()).intersection(Box((), ())) == Box((), ())


def test_the_place_of_a_contiguous_part_is_that_in_memory():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(300):
        outer = Box(*zip(*[(source.randrange(3), source.randrange(1, 5)) for _ in range(3)], strict=True))
        begins = [source.randrange(size) for size in outer.shape]
        shape = [source.randrange(1, size - begin + 1) for begin, size in zip(begins, outer.shape, strict=True)]
        part = Box(tuple(map(sum, zip(outer.offset, begins, strict=True))), tuple(shape))
        numbers = np.arange(outer.elements).reshape(outer.shape)[part.slices_in(outer)].reshape(-1)
        contiguous = numbers[-1] - numbers[0] + 1 == numbers.size
        assert part.first_in(outer) == (numbers[0] if contiguous else None)


def test_processes_that_have_a_box_share_its_rows():
    local = {0: Box((0, 0), (5, 2)), 1: Box((0, 0), (5, 2)), 2: Box((5, 0), (5, 2))}
    parts = boxes.divide(local, 0)
    assert parts == {0: Box((0, 0), (2, 2)), 1: Box((2, 0), (3, 2)), 2: Box((5, 0), (5, 2))}
    for position in range(2):  # fewer rows than processes
        assert boxes.divide({0: Box((), ()), 1: Box((), ())}, position) == {position: Box((), ())}


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_each_element_is_hosted_once(processes):
    for shape in [(), (1,), (3,), (7, 2), (16, 1, 3)]:
        parts = boxes.divide(dict.fromkeys(range(processes), boxes.whole(shape)), 5)
        seen = np.zeros(shape, int)
        for part in parts.values():
            seen[part.slices_in(boxes.whole(shape))] += 1
        assert np.all(seen == 1)
        assert sum(part.elements for part in parts.values()) == math.prod(shape)


def test_shards_that_make_up_no_box_are_found():
    rows = [slice(begin, begin + 2) for begin in (0, 2, 4, 6)]
    together = Sharding((0, rows[0]), (0, rows[1]), (1, rows[2]), (1, rows[3]))
    assert boxes.of_processes(together, (8,)) == {0: Box((0,), (4,)), 1: Box((4,), (4,))}
    apart = Sharding((0, rows[0]), (1, rows[1]), (0, rows[2]), (1, rows[3]))
    assert boxes.of_processes(apart, (8,)) == {0: None, 1: None}
    replicated = Sharding((0, slice(None)), (0, slice(None)), (1, slice(None)))
    assert boxes.of_processes(replicated, (8,)) == {0: Box((0,), (8,)), 1: Box((0,), (8,))}
