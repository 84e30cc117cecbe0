"""Parameters exist once in GPU memory, while an optimizer is built and when it is closed. The fake driver counts."""

import ctypes
import json

import grpc
import pytest
import torch
from tests.integration.test_ctl import ctl
from tests.integration.test_torch_gpu import build, expected, optimizer_of, train, weights  # noqa: F401
from tests.integration.test_torch_gpu import same as same_weights
from tests.support.fake_torch_gpu import DRIVER, TorchAllocator, driver_count, fake_gpu, gpu_daemon  # noqa: F401

import superoffload.torch
from superoffload.torch import GpuOptions, cuda

MIB = 1 << 20
PIECE = 8 * MIB
LAYERS, WIDTH = 24, 1024  # 2 MiB each, in bfloat16
PARAMETERS = LAYERS * WIDTH * WIDTH * 2
BUCKET = MIB
GPU = {"device_slots": 2, "mover": "trainer", "cast": "fused"}
SLOTS = 2 * (BUCKET + 4096 + 4096)  # with sums and tables


def large():
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).bfloat16()


def large_optimizer(model, daemon, **gpu):
    return optimizer_of(model, daemon, bucket_bytes=BUCKET, gpu=GpuOptions(**{**GPU, **gpu}))


def peak():
    return driver_count("fakeCudaPeakBytes")


def used():
    return driver_count("fakeCudaUsedBytes")


@pytest.fixture
def allocator(gpu_daemon, monkeypatch):
    made = TorchAllocator()
    monkeypatch.setattr(cuda, "release_cached", made.release_cached)
    yield made
    made.release_cached()


def test_parameters_exist_once_on_the_gpu_while_the_optimizer_is_built(gpu_daemon, allocator):
    model = large()
    before = weights(model)
    allocator.take_in(model)
    elsewhere = used() - PARAMETERS
    driver_count("fakeCudaResetPeak")
    optimizer = large_optimizer(model, gpu_daemon)
    largest = WIDTH * WIDTH * 2
    assert peak() - elsewhere <= PARAMETERS + max(PIECE + largest, SLOTS + PIECE)
    assert optimizer.gpu_report.attach_peak_bytes <= peak()
    assert optimizer.gpu_report.attach_peak_bytes - elsewhere >= PARAMETERS
    assert same_weights(weights(model), before)
    allocator.release_cached()
    assert used() - elsewhere <= PARAMETERS + SLOTS + PIECE, "the originals are gone"
    optimizer.close()


@pytest.mark.parametrize("mover", ["trainer", "daemon"])
def test_closing_leaves_parameters_where_they_are_and_gives_the_rest_back(gpu_daemon, mover):
    model = large()
    elsewhere = used()
    optimizer = large_optimizer(model, gpu_daemon, device="cuda:0", mover=mover)
    values, places = weights(model), [parameter.data_ptr() for parameter in model.parameters()]
    driver_count("fakeCudaResetPeak")
    before = used()
    optimizer.close()
    assert peak() == before, "nothing exists twice"
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert same_weights(weights(model), values)
    assert used() - elsewhere < PARAMETERS + PIECE
    for parameter in list(model.parameters())[: LAYERS // 2]:
        parameter.data = torch.zeros(1)
    assert used() - elsewhere <= PARAMETERS / 2 + PIECE, "what parameters have left is given back"
    for parameter in model.parameters():
        parameter.data = torch.zeros(1)
    assert used() <= elsewhere


def test_the_next_optimizer_takes_parameters_over_piece_by_piece(gpu_daemon):
    model = large()
    elsewhere = used()
    first = large_optimizer(model, gpu_daemon, device="cuda:0")
    values = weights(model)
    first.close()
    driver_count("fakeCudaResetPeak")
    second = large_optimizer(model, gpu_daemon)
    assert peak() - elsewhere <= PARAMETERS + SLOTS + 2 * PIECE
    assert same_weights(weights(model), values)
    second.close()


def test_what_a_graph_still_reads_keeps_its_memory(gpu_daemon):
    model = large()
    optimizer = large_optimizer(model, gpu_daemon, device="cuda:0")
    torch.manual_seed(5)
    given = torch.randn(4, WIDTH).bfloat16().requires_grad_()
    (hosted,) = torch.autograd.grad(model(given).sum(), given)
    output = model(given)
    optimizer.close()
    for parameter in model.parameters():
        parameter.data = torch.zeros(1)
    (gradient,) = torch.autograd.grad(output.sum(), given)
    assert torch.equal(gradient, hosted)


def test_what_goes_during_a_capture_gives_its_memory_back_afterwards(gpu_daemon, allocator, monkeypatch):
    current = [0]
    monkeypatch.setattr(cuda, "stream_of", lambda device: current[0])
    model = large()
    elsewhere = used()
    optimizer = large_optimizer(model, gpu_daemon, device="cuda:0")
    optimizer.close()
    driver = ctypes.CDLL(DRIVER)
    allocator.release_cached()  # in its context
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
    assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
    first, *others = model.parameters()
    current[0] = stream.value
    for parameter in others:
        parameter.data = torch.zeros(1)
    current[0] = 0
    assert used() - elsewhere > PARAMETERS / 2, "the graph may use it"
    assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
    first.data = torch.zeros(1)
    assert used() <= elsewhere
    assert driver.cuStreamDestroy_v2(stream) == 0


def test_a_gpu_without_room_to_measure_casts_takes_the_one_that_needs_the_least(gpu_daemon, monkeypatch):
    model = large()
    monkeypatch.setenv("FAKE_CUDA_OOM", "1")
    optimizer = large_optimizer(model, gpu_daemon, device="cuda:0", cast="auto")
    monkeypatch.delenv("FAKE_CUDA_OOM")
    described = json.loads(ctl(gpu_daemon, "describe", optimizer.name, "--json"))
    assert described["gpu"].get("cast_timings", []) == []
    optimizer.close()


@pytest.mark.parametrize("origin", ["cpu", "meta"])
def test_parameters_that_come_from_elsewhere_need_no_more_than_their_place(gpu_daemon, allocator, origin):
    model = large()
    values = weights(model)
    elsewhere = used()
    given = {"device": "cuda:0"}
    if origin == "meta":
        with torch.device("meta"):
            model = large()
        given["weights"] = values
    driver_count("fakeCudaResetPeak")
    optimizer = large_optimizer(model, gpu_daemon, **given)
    assert peak() - elsewhere <= PARAMETERS + SLOTS + PIECE
    assert same_weights(weights(model), values)
    optimizer.close()


@pytest.mark.parametrize("origin", ["cpu", "meta"])
def test_a_model_that_moved_to_the_gpu_trains_as_on_the_host(gpu_daemon, expected, origin):
    model = build()
    values = weights(model)
    if origin == "meta":
        with torch.device("meta"):
            model = build()
        model.head.weight = model.embedding.weight
    tied = model.embedding.weight
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(device="cuda:0", weights=values))
    assert model.head.weight is tied, "parameters stay the objects that they were"
    train(model, optimizer)
    assert same_weights(weights(model), expected[0])
    optimizer.close()


def test_a_parameter_without_a_value_is_named_and_nothing_stays_behind(gpu_daemon):
    with torch.device("meta"):
        model = build()
    values = {name: value for name, value in weights(build()).items() if "gain" not in name}
    for given in (None, values):
        with pytest.raises(superoffload.Error) as raised:
            optimizer_of(model, gpu_daemon, name="later", gpu=GpuOptions(device="cuda:0", weights=given))
        assert raised.value.code == grpc.StatusCode.INVALID_ARGUMENT
        assert "gain" in str(raised.value) or given is None
    optimizer = optimizer_of(model, gpu_daemon, name="later", gpu=GpuOptions(device="cuda:0", weights=weights(build())))
    assert same_weights(weights(model), weights(build()))
    optimizer.close()


def test_memory_that_runs_out_half_way_leaves_the_model_as_it_was(gpu_daemon, allocator, monkeypatch):
    model = large()
    before = weights(model)
    allocator.take_in(model)
    monkeypatch.setenv("FAKE_CUDA_OOM", "3")
    with pytest.raises(superoffload.Error) as raised:
        large_optimizer(model, gpu_daemon)
    assert raised.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    monkeypatch.delenv("FAKE_CUDA_OOM")
    assert same_weights(weights(model), before)
    optimizer = large_optimizer(model, gpu_daemon)
    assert same_weights(weights(model), before)
    optimizer.close()
