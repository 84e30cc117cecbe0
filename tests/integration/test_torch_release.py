"""release() gives a GPU's memory to others and resume() takes it back: the same bits, whatever is done in between."""

import gc
import time

import grpc
import pytest
import torch
from tests.conftest import Daemon
from tests.integration import test_torch_streams
from tests.integration.test_torch_streams import build, evaluate, loss_of, same, train, weights_of
from tests.support.daemon_deaths import kill
from tests.support.fake_torch_gpu import driver_count, fake_gpu, gpu_daemon  # noqa: F401

import superoffload.torch
from superoffload.torch import GpuOptions

SMALL = 4096  # bytes of events
WAYS = {
    "resident": {},
    "streamed": {"weights": "streamed", "gpu": GpuOptions(stream_slots=2, mover="trainer")},
    "all of what streams stays": {"weights": "streamed", "gpu": GpuOptions(stream_slots=8, mover="trainer")},
    "auto": {"weights": "auto", "gpu": GpuOptions(stream_slots=2, mover="trainer")},
    "resident buckets": {"gpu": GpuOptions(mover="trainer", resident_buckets=3, resident_steps=4)},
    "one slot": {"gpu": GpuOptions(mover="direct", gradient_slots=1)},
    "in place": {"gpu": GpuOptions(mover="trainer", gradient_slots="in_place")},
}


def optimizer_of(model, daemon, **options):
    options = {"bucket_bytes": 16384, "gpu": GpuOptions(mover="trainer")} | options
    return test_torch_streams.optimizer_of(model, daemon, **options)


def trained(daemon, way):
    model = build()
    optimizer = optimizer_of(model, daemon, **WAYS[way])
    train(model, optimizer, steps=2)
    optimizer.synchronize()
    return model, optimizer, weights_of(model)


def used():
    gc.collect()
    return driver_count("fakeCudaUsedBytes")


@pytest.fixture(scope="module")
def expected():
    return {}


def undisturbed(expected, daemon):
    if not expected:
        model = build()
        optimizer = optimizer_of(model, daemon)
        expected["losses"] = [train(model, optimizer, steps=2, first=first) for first in (0, 2, 4)]
        expected["weights"] = weights_of(model)
        optimizer.close()
    return expected


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_with_the_memory_gone_in_between(gpu_daemon, expected, way):  # noqa: F811
    losses = undisturbed(expected, gpu_daemon)["losses"]
    before = used()
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, **WAYS[way])
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    seen = []
    for first in (0, 2, 4):
        seen.append(train(model, optimizer, steps=2, first=first))
        optimizer.synchronize()
        weights, taken, report = weights_of(model), used(), optimizer.gpu_report
        assert report.gpu_bytes > 0
        optimizer.release()
        assert used() - before < SMALL < taken - before
        assert optimizer.gpu_report.gpu_bytes == 0
        optimizer.release() if first else None
        same(weights_of(model), weights)
        optimizer.resume()
        optimizer.resume()
        assert optimizer.gpu_report.gpu_bytes == report.gpu_bytes
        assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
        same(weights_of(model), weights)
    assert seen == losses
    same(weights_of(model), expected["weights"])
    optimizer.close()


@pytest.mark.parametrize("way", ["resident", "streamed"])
def test_whoever_uses_a_parameter_is_told(gpu_daemon, way):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, **WAYS[way])
    train(model, optimizer, steps=4)
    loss = loss_of(model, 0)
    optimizer.release()
    uses = [
        lambda: evaluate(model, 0),
        lambda: model.layers[1].up(torch.ones(32, dtype=torch.bfloat16)),
        lambda: torch.stack([parameter.norm() for parameter in model.parameters()]),
        lambda: model.head.weight.data.add_(1),
        lambda: loss.backward(),
        lambda: model.load_state_dict(weights_of(model)),
        optimizer.step,
        optimizer.push_params,
        optimizer.pull_params,
        optimizer.state_dict,
        optimizer.torch_state_dict,
        lambda: optimizer.save_checkpoint("/nowhere"),
        lambda: optimizer.clip_grad_norm_(1.0),
    ]
    for use in uses:
        with pytest.raises(superoffload.Error, match=r"resume\(\)") as error:
            use()
        assert error.value.code == grpc.StatusCode.FAILED_PRECONDITION
    optimizer.zero_grad()
    assert optimizer.committed_steps == 4
    optimizer.resume()
    train(model, optimizer, steps=1, first=4)
    optimizer.close()


@pytest.mark.parametrize("way", ["resident", "streamed", "in place"])
def test_closing_leaves_parameters_on_the_cpu(gpu_daemon, way):  # noqa: F811
    before = used()
    model, optimizer, weights = trained(gpu_daemon, way)
    optimizer.release()
    optimizer.close()
    assert used() - before < SMALL
    same(weights_of(model), weights)
    evaluate(model, 0)
    again = optimizer_of(model, gpu_daemon)
    train(model, again, steps=1)
    again.close()


def test_an_optimizer_that_nobody_closes(gpu_daemon):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    train(model, optimizer, steps=1)
    weights = weights_of(model)
    optimizer.release()
    del optimizer
    gc.collect()
    same(weights_of(model), weights)
    evaluate(model, 0)


@pytest.mark.parametrize("way", ["resident", "streamed"])
def test_without_memory_it_is_released_as_before(gpu_daemon, way, monkeypatch):  # noqa: F811
    before = used()
    model, optimizer, weights = trained(gpu_daemon, way)
    optimizer.release()
    for allocation in ("1", "2") if way == "streamed" else ("1",):
        monkeypatch.setenv("FAKE_CUDA_OOM", allocation)
        with pytest.raises(superoffload.Error) as error:
            optimizer.resume()
        assert error.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        monkeypatch.delenv("FAKE_CUDA_OOM")
        assert used() - before < SMALL
        with pytest.raises(superoffload.Error, match=r"resume\(\)"):
            evaluate(model, 0)
        same(weights_of(model), weights)
    optimizer.resume()
    same(weights_of(model), weights)
    optimizer.close()


@pytest.mark.parametrize("way", ["resident", "streamed"])
def test_a_daemon_that_dies_meanwhile(gpu_daemon, expected, way):  # noqa: F811
    losses = undisturbed(expected, gpu_daemon)["losses"]
    kept = Daemon("--keeper", "--metrics_address=off")
    try:
        model = build()
        optimizer = optimizer_of(model, kept, **WAYS[way])
        seen = [train(model, optimizer, steps=2, first=0)]
        optimizer.release()
        kill(kept)
        time.sleep(0.05)
        optimizer.resume()
        seen += [train(model, optimizer, steps=2, first=first) for first in (2, 4)]
        assert seen == losses
        same(weights_of(model), expected["weights"])
        optimizer.close()
    finally:
        kept.stop()


def test_what_would_be_lost_is_refused(gpu_daemon):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    loss_of(model, 0).backward()
    with pytest.raises(superoffload.Error, match="there are gradients"):
        optimizer.release()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.norm.weight.add_(1)
    with pytest.raises(superoffload.Error, match=r"norm\.weight.*push_params"):
        optimizer.release()
    optimizer.push_params()
    weights = weights_of(model)
    optimizer.release()
    optimizer.resume()
    same(weights_of(model), weights)
    optimizer.close()


def test_a_daemon_that_copies_has_the_memory(gpu_daemon):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(mover="daemon", resident_buckets=2))
    train(model, optimizer, steps=1)
    with pytest.raises(superoffload.Error, match="mover") as error:
        optimizer.release()
    assert error.value.code == grpc.StatusCode.FAILED_PRECONDITION
    train(model, optimizer, steps=1, first=1)
    optimizer.close()


def test_on_the_cpu_there_is_nothing_to_give(daemon):
    model = build()
    optimizer = superoffload.torch.AdamW(model.named_parameters(), endpoint=daemon.endpoint)
    optimizer.release()
    train(model, optimizer, steps=1)
    optimizer.resume()
    optimizer.close()
    with pytest.raises(superoffload.Error, match="closed"):
        optimizer.resume()
