"""weights="auto": blocks stay on the GPU as far as the loop leaves room, and train the same bits."""

import functools
import gc
import json

import pytest
import torch
from tests.conftest import Daemon
from tests.integration.test_ctl import ctl
from tests.integration.test_torch_streams import BLOCKS, build, evaluate, loss_of, optimizer_of, same, train, weights_of
from tests.support.daemon_deaths import train_through_a_death
from tests.support.fake_torch_gpu import driver_count, fake_gpu, gpu_daemon  # noqa: F401

import superoffload.torch
from superoffload.torch import GpuOptions, cuda

SLOT = 2 << 20  # of blocks as small as these
STEPS = 12


class Room:
    """Of the fake GPU, for so many slots beside what is in use without any."""

    def __init__(self, patch):
        self.slots, self._others = 0, 0
        patch.setattr(cuda, "total_bytes", lambda device: self._others + self.slots * SLOT)

    def begin(self, shared):
        """``shared``: slots that there are."""
        gc.collect()  # what tests before have left is in use no more
        self._others = driver_count("fakeCudaUsedBytes") - shared * SLOT


@pytest.fixture
def room(gpu_daemon, monkeypatch):  # noqa: F811
    monkeypatch.setattr(superoffload.torch.gpu.staying, "_SLACK", 0)
    return Room(monkeypatch)


def adapting(model, daemon, slots=2, **options):
    gpu = GpuOptions(stream_slots=slots, mover="trainer", resident_share=1)
    return optimizer_of(model, daemon, weights="auto", gpu=gpu, **options)


@pytest.fixture(scope="module")
def expected():
    """Losses of a model whose blocks stay, and its weights after each step."""
    return {}


def resident_run(expected, daemon):
    if not expected:
        model = build()
        optimizer = optimizer_of(model, daemon)
        for step in range(STEPS):
            losses = train(model, optimizer, steps=1, first=step)
            optimizer.synchronize()
            expected[step] = losses, weights_of(model)
        optimizer.close()
    return expected


def staying(optimizer):
    return len(optimizer._hosting.attachment.staying)


def with_all_staying(daemon, room):
    """A model, and its optimizer after some steps."""
    model = build()
    optimizer = adapting(model, daemon)
    room.begin(2)
    room.slots = 9
    train(model, optimizer, steps=6)
    assert staying(optimizer) == BLOCKS
    return model, optimizer


# Room for so many slots in each step.
@pytest.mark.parametrize(
    ("slots", "rooms", "counts"),
    [
        (2, [0] * 6 + [4] * 2 + [3] * 2 + [9] * 2, [0] * 6 + [2] * 2 + [1] * 2 + [6] * 2),
        (1, [9] * 8 + [1] * 2 + [7] * 2, [0] * 4 + [6] * 4 + [0] * 2 + [6] * 2),
        (3, [5] * 6 + [6] * 3 + [3] * 3, [0] * 4 + [2] * 2 + [6] * 3 + [0] * 3),
    ],
)
def test_blocks_stay_where_there_is_room_and_leave_again(gpu_daemon, room, expected, slots, rooms, counts):  # noqa: F811
    runs = resident_run(expected, gpu_daemon)
    model = build()
    optimizer = adapting(model, gpu_daemon, slots, name="run")
    room.begin(slots)
    seen = []
    for step in range(STEPS):
        room.slots = rooms[step]
        losses = train(model, optimizer, steps=1, first=step)
        assert losses == runs[step][0], step
        same(weights_of(model), runs[step][1])
        seen.append(staying(optimizer))
    assert seen == counts
    gpu = json.loads(ctl(gpu_daemon, "describe", "run", "--json"))["gpu"]
    assert gpu.get("streamed_units", 0) == BLOCKS - counts[-1]
    assert f"{counts[-1]} of {BLOCKS} blocks stay on the GPU" in gpu["notes"]
    assert optimizer.gpu_report.weights in gpu["notes"]
    optimizer.close()
    same(weights_of(model), runs[STEPS - 1][1])


# The daemon publishes a block that stays ahead of the verdict; what the step has not committed yet is not to be seen.
# With as many slots as blocks all stay from the beginning.
@pytest.mark.parametrize("ends", ["commit", "abandon"])
@pytest.mark.parametrize("slots", [2, 8])
def test_what_is_read_inside_of_a_step_is_the_last_ones(gpu_daemon, room, slots, ends):  # noqa: F811
    model, others = build(), build()
    optimizer, resident = adapting(model, gpu_daemon, slots), optimizer_of(others, gpu_daemon)
    room.begin(min(slots, BLOCKS))
    room.slots = 5
    for step in range(8):
        loss_of(model, step).backward()
        loss_of(others, step).backward()
        if step >= 6:
            assert staying(optimizer) == (3 if slots == 2 else 0)
            resident.synchronize()
            same(weights_of(model), weights_of(others))
            assert evaluate(model, 40) == evaluate(others, 40)
        if step == 6 and ends == "abandon":
            optimizer.zero_grad()
            resident.zero_grad()
            continue
        optimizer.step()
        resident.step()
        optimizer.zero_grad()
        resident.zero_grad()
    resident.synchronize()
    same(weights_of(model), weights_of(others))
    optimizer.close()
    resident.close()


def test_without_memory_fewer_blocks_stay_and_no_more_are_tried(gpu_daemon, room, expected, monkeypatch):  # noqa: F811
    runs = resident_run(expected, gpu_daemon)
    model = build()
    optimizer = adapting(model, gpu_daemon)
    room.begin(2)
    room.slots = 9
    seen = []
    for step in range(STEPS):
        if step == 4:
            monkeypatch.setenv("FAKE_CUDA_OOM", "1")
        assert train(model, optimizer, steps=1, first=step) == runs[step][0]
        monkeypatch.delenv("FAKE_CUDA_OOM", raising=False)
        seen.append(staying(optimizer))
    assert seen == [0] * 4 + [3] * (STEPS - 4)
    optimizer.close()


def test_an_allocation_that_fails_takes_blocks_away(gpu_daemon, room):  # noqa: F811
    model, optimizer = with_all_staying(gpu_daemon, room)
    cuda.on_failed_allocation(0, 5 * SLOT, 0, 0)
    loss_of(model, 1).backward()
    optimizer.zero_grad()
    assert staying(optimizer) == 2
    train(model, optimizer, steps=1)
    assert staying(optimizer) == 2, "the loop may need that again"
    optimizer.close()


@pytest.mark.parametrize(("dies_in", "micro_batch"), [(6, 0), (7, 1)])
def test_blocks_stay_over_the_death_of_a_daemon(gpu_daemon, room, expected, dies_in, micro_batch):  # noqa: F811
    runs = resident_run(expected, gpu_daemon)
    kept = Daemon("--keeper", "--metrics_address=off")
    model = build()
    optimizer = adapting(model, kept, name="kept")
    room.begin(2)
    room.slots = 6
    batch = functools.partial(loss_of, model)
    for _ in train_through_a_death(kept, optimizer, batch, range(9), (dies_in, micro_batch)):
        pass
    assert staying(optimizer) == BLOCKS
    same(weights_of(model), runs[8][1])
    optimizer.close()
    kept.stop()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gpu": GpuOptions(resident_buckets=1)}, "weights do not stream with resident_buckets"),
        ({"gpu": GpuOptions(gradient_slots="in_place")}, "weights do not stream with gradient_slots='in_place'"),
    ],
)
def test_what_cannot_stream_stays(gpu_daemon, options, why):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, weights="auto", **options)
    assert why in optimizer.gpu_report.weights
    train(model, optimizer, steps=2)
    optimizer.close()


def test_a_model_without_blocks_stays(gpu_daemon):  # noqa: F811
    model = torch.nn.Linear(4, 4)
    optimizer = superoffload.torch.AdamW(model.named_parameters(), weights="auto", endpoint=gpu_daemon.endpoint)
    assert "no blocks are found" in optimizer.gpu_report.weights
    optimizer.close()


def test_an_optimizer_that_was_created_for_weights_that_stay_keeps_them(gpu_daemon):  # noqa: F811
    model = build()
    optimizer_of(model, gpu_daemon, name="resident").close()
    optimizer = optimizer_of(model, gpu_daemon, name="resident", weights="auto")
    assert "created for weights that stay" in optimizer.gpu_report.weights
    train(model, optimizer, steps=1)
    optimizer.close()


def test_memory_goes_with_the_optimizer(gpu_daemon, room):  # noqa: F811
    before = driver_count("fakeCudaUsedBytes")
    model, optimizer = with_all_staying(gpu_daemon, room)
    optimizer.close()
    stays = sum(p.nbytes for p in model.parameters()) // (8 << 20) + 1
    assert driver_count("fakeCudaUsedBytes") <= before + stays * (8 << 20), "only what stays is on the GPU"
