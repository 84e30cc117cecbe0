"""superoffload.torch on a fake GPU where torch's work is late: who reads without waiting for it reads NaN."""

import contextlib
import gc

import pytest
import torch
from tests.integration.test_torch_gpu import (  # noqa: F401
    STEPS,
    build,
    expected,
    loss_of,
    optimizer_of,
    same,
    train,
    weights,
)
from tests.support.fake_torch_gpu import fake_gpu, gpu_daemon, late_gpu  # noqa: F401

from superoffload.torch import GpuOptions, cuda


@pytest.mark.parametrize("mover", ["daemon", "trainer", "direct"])
def test_weights_are_those_of_the_host(gpu_daemon, late_gpu, expected, mover):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(mover=mover, resident_buckets=2))
    train(model, optimizer)
    assert same(weights(model), expected[0])
    optimizer.close()


@pytest.mark.parametrize("mover", ["daemon", "trainer", "direct"])
def test_gradients_of_cuda_graph_trees_are_packed_before_their_memory_is_used_again(
    gpu_daemon,  # noqa: F811
    late_gpu,  # noqa: F811
    expected,  # noqa: F811
    mover,
):
    late_gpu.memory.of_graphs = True
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(mover=mover, cast="fused"))
    train(model, optimizer)
    assert same(weights(model), expected[0])
    optimizer.close()


def accumulate_beside(parameter, side, streams, late):
    """The parameter's gradient comes from another stream, as when a branch of the model runs there."""

    def enter(gradient):
        side.wait_stream(torch.cuda.current_stream())
        streams.enter_context(torch.cuda.stream(side))
        late.longer = 30
        streams.callback(setattr, late, "longer", 0)
        return gradient.clone()

    parameter.register_hook(enter)
    parameter.register_post_accumulate_grad_hook(lambda _: streams.close())


def test_a_bucket_waits_for_every_stream_that_its_gradients_came_from(gpu_daemon, late_gpu, expected):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon, gpu=GpuOptions(cast="fused"), bucket_bytes=16384)
    side, streams = torch.cuda.Stream(), contextlib.ExitStack()
    for parameter in (model.layers[1].weight, model.layers[2].bias):
        accumulate_beside(parameter, side, streams, late_gpu)
    for step in range(STEPS):
        for micro_batch in range(2):
            loss_of(model, 2 * step + micro_batch).backward()
            torch.cuda.current_stream().wait_stream(side)  # as autograd does when backward ends
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.95
    assert same(weights(model), expected[0])
    optimizer.close()


def test_parameters_that_are_pushed_are_those_that_were_written_before(gpu_daemon, late_gpu):  # noqa: F811
    model = build()
    optimizer = optimizer_of(model, gpu_daemon)
    written = {}
    for name, parameter in reversed(list(model.named_parameters())):
        optimizer.synchronize()
        late_gpu.longer = 30
        with torch.no_grad():
            parameter.mul_(0.5)
        late_gpu.longer = 0
        optimizer.push_params()
        written[name] = parameter.clone()
    masters = optimizer.state_tensors()
    for name, tensor in model.named_parameters():
        assert torch.equal(masters[name]["master"].bfloat16(), tensor), name
        assert not tensor.isnan().any()
    optimizer.close()


def test_what_is_done_beside_comes_after_what_was_given_before(late_gpu):  # noqa: F811
    late_gpu.longer = 50
    given = torch.full((8,), 2.0)
    with cuda.beside(given.device):
        assert given.sum().item() == 16


def test_memory_that_was_kept_for_packing_is_freed_after_the_optimizer(gpu_daemon, late_gpu):  # noqa: F811
    model = build()
    kept = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: kept.append(parameter.grad))
    optimizer = optimizer_of(model, gpu_daemon)
    train(model, optimizer)
    optimizer.close()
    del model, optimizer, parameter
    gc.collect()
    assert late_gpu.memory.recorded.keys() & {tensor.untyped_storage().data_ptr() for tensor in kept}
    kept.clear()
    assert not late_gpu.memory.recorded and not late_gpu.memory.failures
