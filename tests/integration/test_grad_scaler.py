"""A GradScaler's step that raises, and the steps after it."""

import pytest
import torch

import superoffload.torch

STEPS = 3


def build(daemon):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = superoffload.torch.AdamW(model.named_parameters(), lr=1e-2, endpoint=daemon.endpoint)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0)


def backward(model, scaler, seed):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    scaler.scale(model(x).square().mean()).backward()


def write(model):
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def finish(model, optimizer, scaler):
    """Steps after the one that is compared."""
    scaler.update()
    optimizer.zero_grad()
    for seed in range(1, STEPS):
        backward(model, scaler, seed)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.close()
    return weights


@pytest.fixture
def expected(daemon):
    model, optimizer, scaler = build(daemon)
    backward(model, scaler, 0)
    write(model)
    optimizer.push_params()
    scaler.step(optimizer)
    return finish(model, optimizer, scaler)


def fails(model, optimizer, scaler):
    """Up to the error of a step whose parameters somebody has written, and its remedy."""
    backward(model, scaler, 0)
    write(model)
    with pytest.raises(superoffload.Error, match="changed by somebody else"):
        scaler.step(optimizer)
    optimizer.push_params()


@pytest.mark.parametrize("unscales", [False, True])
def test_the_scaler_steps_again(daemon, expected, unscales):
    model, optimizer, scaler = build(daemon)
    fails(model, optimizer, scaler)
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert all(map(torch.equal, finish(model, optimizer, scaler), expected))


def test_a_step_without_the_scaler_is_refused(daemon, expected):
    model, optimizer, scaler = build(daemon)
    fails(model, optimizer, scaler)
    for _ in range(2):
        with pytest.raises(superoffload.Error, match="still scaled.*scaler.step"):
            optimizer.step()
    scaler.step(optimizer)
    assert all(map(torch.equal, finish(model, optimizer, scaler), expected))


@pytest.mark.parametrize("set_to_none", [False, True])
def test_after_zero_grad_a_step_needs_no_scaler(daemon, set_to_none):
    model, optimizer, scaler = build(daemon)
    fails(model, optimizer, scaler)
    optimizer.zero_grad(set_to_none=set_to_none)
    model(torch.ones(8, 16)).square().mean().backward()
    optimizer.step()
    assert optimizer.last_result.committed_steps == 1
    optimizer.close()
