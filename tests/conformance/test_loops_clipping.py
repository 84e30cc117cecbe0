"""Loops that clip by torch.nn.utils.clip_grad_norm_ and go on with their gradients: equal to torch.optim, or told."""

import contextlib
import ctypes

import numpy as np
import pytest
import torch
from tests.conformance.test_loops_gradients import agree_or_be_told
from tests.support.loops import assert_agree, batch, loop_daemon, net, ours, ours_on_gpu, ours_on_host, recorded, told  # noqa: F401

import superoffload.torch

STEPS = 9
MAX_NORM = 0.05
USED = "used between clip_grad_norm_ and step"


def clip(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def test_backward_after_clipping(ours):  # noqa: F811
    """It adds to gradients that are scaled."""

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        norms = []
        for step in range(STEPS):
            for micro_batch in range(3):
                model(batch(3 * step + micro_batch)).square().mean().backward()
                if micro_batch != 1:
                    norms.append(clip(model))
            optimizer.step()
            optimizer.zero_grad()
        return [*norms, *model.parameters()]

    agree_or_be_told(loop, ours)


def test_another_optimizer_goes_on_with_clipped_gradients(ours):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        model(batch(0)).square().mean().backward()
        clip(model)
        optimizer.step()
        getattr(optimizer, "close", lambda: None)()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return model.parameters()

    assert_agree(loop, ours)


def test_a_step_that_is_skipped_after_clipping(ours):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            if step % 3 == 2:
                clip(model)
            else:
                optimizer.step()
            model.zero_grad()
        return model.parameters()

    agree_or_be_told(loop, ours)


def add_noise(model):
    for p in model.parameters():
        p.grad.add_(0.01)


def replace_with_noise(model):
    for p in model.parameters():
        p.grad = p.grad + 0.01


def mask(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.mul_(p.grad.sign() > 0)


def drop_one(model):
    next(model.parameters()).grad = None


def train(make, after_clip):
    """``after_clip(step, optimizer, model)``."""
    model = net()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        clip(model)
        after_clip(step, optimizer, model)
        optimizer.step()
        optimizer.zero_grad()
    return model.parameters()


@pytest.mark.parametrize("edit", [add_noise, replace_with_noise, mask, drop_one])
def test_edits_after_clipping(ours, edit):  # noqa: F811
    agree_or_be_told(lambda make: train(make, lambda step, optimizer, model: edit(model)), ours)


def test_edits_after_clipping_that_begin_late(ours):  # noqa: F811
    """When gradients are submitted early."""

    def mask_late(step, optimizer, model):
        if step > 5:
            mask(model)

    agree_or_be_told(lambda make: train(make, mask_late), ours)


def read_state(optimizer, model, directory):
    optimizer.state[next(model.parameters())]["exp_avg"].sum()


def save_state(optimizer, model, directory):
    torch.save(optimizer.state_dict(), directory / "state.pt")


def push(optimizer, model, directory):
    getattr(optimizer, "push_params", lambda: None)()


def checkpoint(optimizer, model, directory):
    if hasattr(optimizer, "save_checkpoint"):
        optimizer.save_checkpoint(directory / optimizer.name)


@pytest.mark.parametrize("edit", [None, mask])
@pytest.mark.parametrize("between", [read_state, save_state, push, checkpoint])
def test_clipped_gradients_while_the_optimizer_is_looked_at(ours, between, edit, tmp_path):  # noqa: F811
    def look_once(step, optimizer, model):
        if step == 6:
            between(optimizer, model, tmp_path)
            if edit is not None:
                edit(model)

    agree_or_be_told(lambda make: train(make, look_once), ours)


def clones(model, taken):
    return [p.grad.clone() for p in model.parameters()]


def arrays(model, taken):
    return [torch.from_numpy(p.grad.numpy().copy()) for p in model.parameters()]


def flat(model, taken):
    return [torch.cat([p.grad.flatten() for p in model.parameters()])]


def taken_before(model, taken):
    return [gradient.clone() for gradient in taken]


def taken_lists(model, taken):
    return torch._foreach_add(taken, 0.0)


@pytest.mark.parametrize("when", ["before the step", "after the step"])
@pytest.mark.parametrize("read", [clones, arrays, flat, taken_before, taken_lists])
def test_reads_of_clipped_gradients(ours_on_host, read, when):  # noqa: F811
    """They are what torch.nn.utils has made of them, and overlap goes on."""

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        seen = []
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            taken = [p.grad for p in model.parameters()]
            clip(model)
            if when == "before the step":
                seen += read(model, taken)
            optimizer.step()
            if when == "after the step":
                seen += read(model, taken)
            optimizer.zero_grad()
        return [*seen, *model.parameters()]

    caught = assert_agree(loop, ours_on_host)
    assert not told(caught, "from now on")


def views(model):
    return [p.grad.view(-1) for p in model.parameters()]


def parts(model):
    return [part for p in model.parameters() for part in p.grad.unbind()]


def datas(model):
    return [p.grad.data for p in model.parameters()]


def numpy_arrays(model):
    return [p.grad.numpy()[:2] for p in model.parameters()]


def storages(model):
    return [p.grad.untyped_storage() for p in model.parameters()]


def typed(memory):
    if isinstance(memory, torch.UntypedStorage):
        return torch.empty(0).set_(memory, 0, (memory.nbytes() // 4,))
    return torch.as_tensor(memory)


@pytest.mark.parametrize("take", [views, parts, datas, numpy_arrays, storages])
def test_reads_through_memory_that_was_taken_before_the_clip(ours_on_host, take):  # noqa: F811
    """In every second step, and overlap goes on."""

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        seen = []
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            taken = take(model) if step % 2 else []
            clip(model)
            seen += [typed(memory).clone() for memory in taken]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *model.parameters()]

    caught = assert_agree(loop, ours_on_host)
    assert not told(caught, "from now on")


def test_reads_of_one_buffer_of_all_gradients_after_the_clip(ours_on_host):  # noqa: F811
    """Each is a view of it, from the first step on."""

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
        seen = []
        for step in range(STEPS):
            parts = buffer.zero_().split([p.numel() for p in model.parameters()])
            for p, part in zip(model.parameters(), parts, strict=True):
                p.grad = part.view_as(p)
            del part, parts, p
            model(batch(step)).square().mean().backward()
            clip(model)
            seen.append(buffer.clone())
            optimizer.step()
        return [*seen, *model.parameters()]

    assert_agree(loop, ours_on_host)


def test_gradients_whose_memory_nobody_has_stay_until_they_are_used(ours_on_host):  # noqa: F811
    """Those of parameters that are put together are parts of one tensor."""
    if ours_on_host.form == "off":
        pytest.skip("torch clips")
    weights = [torch.nn.Parameter(torch.full((2, 8), float(i))) for i in range(3)]
    ours_on_host(weights)
    (batch(0) @ torch.cat(weights).T).square().mean().backward()
    addresses = [p.grad.data_ptr() for p in weights]
    assert addresses == [addresses[0] + 64 * i for i in range(3)]
    before = torch.cat([p.grad.flatten() for p in weights]).tolist()
    torch.nn.utils.clip_grad_norm_(weights, MAX_NORM)
    array = np.ctypeslib.as_array((ctypes.c_float * len(before)).from_address(addresses[0]))
    assert array.tolist() == before
    weights[0].grad.sum()
    assert array.tolist() != before


def test_reads_of_clipped_gradients_on_a_gpu(ours_on_gpu):
    """Those that have left it are NaN, which is told; from then on they stay."""

    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        norms = []
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            clip(model)
            norms.append(sum(p.grad.square().sum() for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        return [*norms[2:], *model.parameters()]

    caught = assert_agree(loop, ours_on_gpu)
    assert told(caught, USED) == 1


@contextlib.contextmanager
def default_device():
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "context", [lambda: torch.device("cpu"), default_device, torch.overrides.BaseTorchFunctionMode]
)
@pytest.mark.parametrize("around", ["the clip", "the step"])
def test_reads_beside_other_modes_of_torch(ours_on_host, context, around):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        seen = []
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            with context() if around == "the clip" else contextlib.nullcontext():
                clip(model)
                seen += clones(model, None) if step % 2 else []
            with context() if around == "the step" else contextlib.nullcontext():
                seen += clones(model, None)
                optimizer.step()
            optimizer.zero_grad()
        return [*seen, *model.parameters()]

    assert_agree(loop, ours_on_host)


def test_reads_of_two_optimizers(ours_on_host):  # noqa: F811
    def loop(make):
        models = net(1), net(2)
        optimizers = [make(model.parameters()) for model in models]
        seen = []
        for step in range(STEPS):
            sum(model(batch(step)).square().mean() for model in models).backward()
            for model in models:
                clip(model)
            for model in models:
                seen += clones(model, None)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [*seen, *(p for model in models for p in model.parameters())]

    assert_agree(loop, ours_on_host)


def test_writes_to_clipped_gradients_that_nobody_sees(ours_on_host):  # noqa: F811
    """Through memory that was taken before: an error, until gradients are computed anew."""
    if ours_on_host.form == "off":
        pytest.skip("torch clips")
    model = net()
    optimizer = ours_on_host(model.parameters())
    model(batch(0)).square().mean().backward()
    gradient = model[0].weight.grad
    array = np.ctypeslib.as_array((ctypes.c_float * gradient.numel()).from_address(gradient.data_ptr()))
    del gradient
    clip(model)
    array *= 0.5
    for _ in range(2):
        with pytest.raises(superoffload.Error, match="clip after the last change"):
            optimizer.step()
        assert optimizer.last_result is None, "nothing was committed"
    optimizer.zero_grad()
    model(batch(0)).square().mean().backward()
    clip(model)
    optimizer.step()
    assert optimizer.last_result.committed_steps == 1


@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_after_the_step_of_a_grad_scaler(ours_on_host, unscales):  # noqa: F811
    def loop(make):
        model = net()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen = []
        for step in range(STEPS):
            scaler.scale(model(batch(step)).square().mean()).backward()
            if unscales:
                scaler.unscale_(optimizer)
                clip(model)
            scaler.step(optimizer)
            scaler.update()
            seen += clones(model, None)
            optimizer.zero_grad()
        return [*seen, *model.parameters()]

    assert_agree(loop, ours_on_host)
