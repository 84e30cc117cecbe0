"""Gradients of several passes that leave one by one (accumulate="daemon"): the bits of sums in .grad."""

import functools
import gc

import pytest
import torch
from tests.conftest import Daemon
from tests.integration.test_torch_streams import Model, same, weights_of
from tests.support.daemon_deaths import kill
from tests.support.fake_torch_gpu import fake_gpu, gpu_daemon, late_gpu  # noqa: F401

import superoffload.torch
from superoffload.torch import GpuOptions

PASSES = 3
STEPS = 4


def build(dtype=torch.bfloat16, reentrant=None):
    torch.manual_seed(0)
    return Model(reentrant).to(dtype)


def optimizer_of(model, daemon, accumulate, overlap="auto", weights="resident", **options):
    return superoffload.torch.AdamW(
        model.named_parameters(),
        lr=1e-2,
        max_grad_norm=0.5,
        endpoint=daemon.endpoint,
        bucket_bytes=4096,
        overlap=overlap,
        weights=weights,
        gpu=GpuOptions(accumulate=accumulate, **options),
    )


def train(model, optimizer, steps=STEPS, passes=PASSES):
    losses = []
    for step in range(steps):
        for part in range(passes):
            tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(10 * step + part))
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            (loss / passes).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def both(gpu_daemon, run, make=build, **options):  # noqa: F811
    """What `run(model, optimizer)` returns, and the weights then, of the GPU's sums and of the daemon's."""
    for accumulate in ("gpu", "daemon"):
        model = make()
        optimizer = optimizer_of(model, gpu_daemon, accumulate, cast="fused", **options)
        found = run(model, optimizer)
        optimizer.synchronize()
        yield found, weights_of(model)
        optimizer.close()


def expect_same(gpu_daemon, run, make=build, **options):  # noqa: F811
    (found, weights), (found_of_daemon, weights_of_daemon) = both(gpu_daemon, run, make, **options)
    assert found == found_of_daemon
    same(weights_of_daemon, weights)


@pytest.mark.parametrize("overlap", ["auto", False])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits(gpu_daemon, dtype, slots, overlap):  # noqa: F811
    expect_same(gpu_daemon, train, functools.partial(build, dtype), overlap=overlap, gradient_slots=slots)


def test_copies_that_are_late(gpu_daemon, late_gpu):  # noqa: F811
    expect_same(gpu_daemon, train)


def test_between_passes_no_gradient_is_on_the_gpu(gpu_daemon, fake_gpu):  # noqa: F811
    model = build(torch.bfloat16)
    optimizer = optimizer_of(model, gpu_daemon, "daemon", cast="fused")
    for step in range(2):
        for part in range(PASSES):
            tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(10 * step + part))
            model(tokens).float().sum().backward()
            assert all(bool(parameter.grad.isnan().all()) for parameter in model.parameters()), (step, part)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def test_the_number_of_passes_may_shrink_and_what_is_more_is_refused(gpu_daemon):  # noqa: F811
    model = build(torch.bfloat16)
    optimizer = optimizer_of(model, gpu_daemon, "daemon", cast="fused")
    train(model, optimizer, steps=3, passes=2)
    with pytest.raises(superoffload.Error, match="this step runs more backward passes than those before"):
        train(model, optimizer, steps=1, passes=3)
    optimizer.zero_grad()
    train(model, optimizer, steps=2, passes=1)
    optimizer.close()


def test_parameters_that_only_some_passes_use(gpu_daemon):  # noqa: F811
    def run(model, optimizer):
        losses = []
        for step in range(STEPS):
            for part in range(PASSES):
                model.order = [index for index in range(6) if (index + part) % 3 or part == step % 3]
                tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(10 * step + part))
                loss = model(tokens).float().square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    expect_same(gpu_daemon, run, overlap=False)


def test_the_loop_clips(gpu_daemon):  # noqa: F811
    def run(model, optimizer):
        norms = []
        for step in range(STEPS):
            for part in range(PASSES):
                tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(10 * step + part))
                model(tokens).float().square().mean().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    (norms, weights), (norms_of_daemon, weights_of_daemon) = both(gpu_daemon, run)
    assert norms_of_daemon == pytest.approx(norms)
    same(weights_of_daemon, weights)


def test_a_step_that_is_given_up_leaves_no_sum(gpu_daemon):  # noqa: F811
    def run(model, optimizer):
        losses = train(model, optimizer, steps=1)
        model(torch.zeros(2, 8, dtype=torch.int64)).float().sum().backward()
        optimizer.zero_grad()
        return losses + train(model, optimizer, steps=2)

    expect_same(gpu_daemon, run)


@pytest.mark.parametrize("change", ["set", "dropped"])
def test_a_gradient_that_the_loop_puts_there_is_refused(gpu_daemon, change):  # noqa: F811
    model = build(torch.bfloat16)
    optimizer = optimizer_of(model, gpu_daemon, "daemon", cast="fused")
    weights = weights_of(model)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model(tokens).float().sum().backward()
    model.head.weight.grad = torch.ones_like(model.head.weight) if change == "set" else None
    with pytest.raises(superoffload.Error, match="was set after that from backward had left the GPU"):
        model(tokens).float().sum().backward()
        optimizer.step()
    with pytest.raises(superoffload.Error, match="call zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    same(weights_of(model), weights)
    train(model, optimizer, steps=1, passes=1)
    optimizer.close()


def test_what_it_does_not_go_with_is_said(gpu_daemon):  # noqa: F811
    for wrong, sentence in (
        ({"accumulate": "cpu"}, "'gpu' or 'daemon'"),
        ({"accumulate": "daemon", "mover": "daemon"}, "the trainer copies"),
        ({"accumulate": "daemon", "gradient_slots": "in_place"}, "must not be 'in_place'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            GpuOptions(**wrong)


def test_a_grad_scaler_is_refused_before_anything_is_committed(gpu_daemon):  # noqa: F811
    model = build(torch.float32)
    optimizer = optimizer_of(model, gpu_daemon, "daemon", cast="fused")
    weights = weights_of(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.zeros(2, 8, dtype=torch.int64)).sum()).backward()
    with pytest.raises(RuntimeError, match="a single memory location"):  # torch's: it cannot unscale what has left
        scaler.step(optimizer)
    with pytest.raises(superoffload.Error, match="a GradScaler looks for gradients"):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        optimizer.step()
    optimizer.zero_grad()
    same(weights_of(model), weights)
    assert optimizer.last_result is None
    optimizer.close()


def test_sums_in_fp32_are_not_rounded_in_between(gpu_daemon):  # noqa: F811
    """Three passes of bf16 gradients: the first is so large that bf16 would lose the others."""
    parts = [256.0, 0.75, 0.75]
    moved = []
    for cast in ("fused", "gpu_fp32"):
        parameter = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
        optimizer = superoffload.torch.Lion(
            [("weight", parameter)],
            lr=1.0,
            betas=(0.0, 0.0),
            endpoint=gpu_daemon.endpoint,
            gpu=GpuOptions(accumulate="daemon", cast=cast),
        )
        for part in parts:
            parameter.backward(torch.full_like(parameter, part))
        optimizer.step()
        moved.append(optimizer.state_tensors()["weight"]["exp_avg"][0].item())
        optimizer.close()
    assert moved == [256.0, 257.5]


@pytest.mark.parametrize("weights", ["streamed", 0.5])
@pytest.mark.parametrize("reentrant", [False, True])
def test_with_weights_that_stream(gpu_daemon, weights, reentrant):  # noqa: F811
    expect_same(gpu_daemon, train, functools.partial(build, reentrant=reentrant), weights=weights, stream_slots=2)


def test_a_daemon_that_dies_between_passes_loses_the_step_and_says_so(fake_gpu):  # noqa: F811
    kept = Daemon("--keeper")
    try:
        model = build(torch.bfloat16)
        optimizer = optimizer_of(model, kept, "daemon", cast="fused")
        losses = train(model, optimizer, steps=2)
        model(torch.zeros(2, 8, dtype=torch.int64)).float().sum().backward()
        kill(kept)
        with pytest.raises(superoffload.Error, match="compute the gradients of this step again"):
            model(torch.zeros(2, 8, dtype=torch.int64)).float().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        losses += train(model, optimizer, steps=2)
        optimizer.synchronize()
        after_death = weights_of(model)
        optimizer.close()
    finally:
        kept.stop()
    alone = Daemon()
    try:
        model = build(torch.bfloat16)
        optimizer = optimizer_of(model, alone, "gpu", cast="fused")
        assert losses == [loss for _ in range(2) for loss in train(model, optimizer, steps=2)]
        optimizer.synchronize()
        same(after_death, weights_of(model))
        optimizer.close()
    finally:
        alone.stop()


def test_an_optimizer_that_nobody_closes_between_passes(gpu_daemon):  # noqa: F811
    for _ in range(3):
        model = build(torch.bfloat16)
        optimizer = optimizer_of(model, gpu_daemon, "daemon", cast="fused")
        train(model, optimizer, steps=1)
        model(torch.zeros(2, 8, dtype=torch.int64)).float().sum().backward()
        del model, optimizer
        gc.collect()
    model = build(torch.bfloat16)
    optimizer = optimizer_of(model, gpu_daemon, "daemon", cast="fused")
    train(model, optimizer, steps=1)
    optimizer.close()
