"""How many buckets become resident on a GPU: while the trainer waits, as many as the loop leaves memory for."""

import types

import pytest
import torch

from superoffload.torch import cuda
from superoffload.torch.gpu.residents import ResidentRoom, ResidentTuner
from superoffload.v1 import optimizer_pb2


class FakeRoom:
    """Of a GPU whose loop needs ``loop`` of the memory for ``buckets`` buckets."""

    def __init__(self, buckets, loop=0):
        self.buckets, self.loop = buckets, loop

    def fitting(self, spare=0.0):
        return max(0, int(self.buckets * (1 - spare)) - self.loop)


def counts_of(tuner, room, needed, steps):
    counts = []
    for _ in range(steps):
        stalls = tuner.count < needed
        tuner.after_step(stall_seconds=0.5 if stalls else 0.001, step_seconds=1.0, room=room)
        counts.append(tuner.count)
    return counts


@pytest.mark.parametrize(("needed", "expected_counts"), [(0, [0]), (5, [0, 8]), (500, [0, 8, 16, 32, 64, 98])])
def test_buckets_become_resident_while_the_trainer_waits(needed, expected_counts):
    counts = counts_of(ResidentTuner(), FakeRoom(100), needed, steps=200)
    assert sorted(set(counts)) == expected_counts == list(dict.fromkeys(counts))


def test_what_the_loop_needs_is_given_back_and_not_taken_again_at_once():
    room, tuner = FakeRoom(100), ResidentTuner()
    counts_of(tuner, room, 500, steps=30)
    room.loop = 30
    assert set(counts_of(tuner, room, 500, steps=50)) == {68}, "two more than it needs"
    room.loop = 31
    assert set(counts_of(tuner, room, 500, steps=50)) == {68}
    room.loop = 200
    assert counts_of(tuner, room, 500, steps=1) == [0]


def test_residents_that_find_no_memory_are_not_tried_again():
    tuner = ResidentTuner()
    counts_of(tuner, FakeRoom(100), 500, steps=4)
    tuner.refuse()
    assert set(counts_of(tuner, FakeRoom(100), 500, steps=20)) == {7}


class FakeMemory:
    """Of a GPU with 1000 bytes, and of torch's allocator."""

    def __init__(self, patch):
        self.used, self.reserved, self.peak = 100, 50, 50
        patch.setattr(cuda, "ordinal", lambda device: 3)
        patch.setattr(cuda, "total_bytes", lambda device: 1000)
        patch.setattr(cuda, "used_bytes", lambda device: self.used)
        patch.setattr(cuda, "reserved_bytes", lambda device: self.reserved)
        patch.setattr(cuda, "peak_reserved_bytes", lambda device: self.peak)


@pytest.fixture
def memory(monkeypatch):
    return FakeMemory(monkeypatch)


@pytest.fixture
def attachment():
    """Of ten buckets that take 14 bytes each, four of them resident."""
    bucket = optimizer_pb2.Bucket(elements=1, gradient_dtype=optimizer_pb2.DATA_TYPE_BFLOAT16)
    arrays = [optimizer_pb2.StateArray(dtype=optimizer_pb2.DATA_TYPE_FLOAT32) for _ in range(3)]
    layout = optimizer_pb2.Layout(buckets=[bucket] * 10, arrays=arrays)
    return types.SimpleNamespace(optimizer=optimizer_pb2.Optimizer(layout=layout), resident_buckets=4)


def room_of(attachment, share):
    return ResidentRoom(attachment, torch.device("cpu"), share)


def test_residents_fill_what_others_leave_of_the_share(memory, attachment):
    others = memory.used - 4 * 14
    assert room_of(attachment, share=0.1).fitting() == (100 - others) // 14
    assert room_of(attachment, share=0.1).fitting(spare=0.02) == (80 - others) // 14
    assert room_of(attachment, share=0.01).fitting() == 0
    assert room_of(attachment, share=1).fitting() == 10


def test_what_the_loop_has_needed_once_stays_free(memory, attachment):
    room = room_of(attachment, share=0.2)
    before = room.fitting()
    memory.used, memory.reserved, memory.peak = 200, 150, 150
    at_its_peak = room.fitting()
    memory.used, memory.reserved = 100, 50
    assert before == 10 and room.fitting() == at_its_peak == (200 - (200 - 4 * 14)) // 14


def test_memory_that_the_model_had_before_the_attach_is_not_the_loops(memory, attachment):
    memory.peak = 900
    assert room_of(attachment, share=0.2).fitting() == 10


def test_an_allocation_that_found_no_memory_counts(memory, attachment):
    room = room_of(attachment, share=0.2)
    cuda.on_failed_allocation(2, 150, 0, 0)
    assert not room.was_lacking(), "of another GPU"
    cuda.on_failed_allocation(3, 100, 0, 0)
    assert room.was_lacking()
    assert room.fitting() == (200 - (200 - 4 * 14)) // 14
    assert not room.was_lacking()
