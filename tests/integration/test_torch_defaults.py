"""A loop that has changed torch's default dtype or device trains as one that has not."""

import io

import pytest
import torch

import superoffload.torch

STEPS = 259  # in bfloat16, 260


@pytest.fixture(params=["bfloat16", "float64", "meta"])
def default(request):
    if request.param == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def build():
    return torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float32, device="cpu"))


def train(parameter, optimizer, steps):
    """Returns the gradients' norms."""
    norms = []
    for _ in range(steps):
        (parameter * parameter).sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_([parameter], 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.fixture(scope="module")
def expected():
    parameter = build()
    optimizer = superoffload.torch.AdamW([("p", parameter)], lr=1e-3)
    norms = train(parameter, optimizer, STEPS)
    train(parameter, optimizer, 2)
    optimizer.close()
    return parameter.detach(), norms


def test_defaults_change_nothing(expected, default):
    parameter = build()
    optimizer = superoffload.torch.AdamW([("p", parameter)], lr=1e-3)
    norms = train(parameter, optimizer, STEPS)
    assert all(norm.dtype == torch.float32 and norm.device.type == "cpu" for norm in norms)
    assert torch.equal(torch.stack(norms), torch.stack(expected[1]))
    step = optimizer.state[parameter]["step"]
    assert step.item() == STEPS and step.dtype == torch.float32
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    weights = parameter.detach().clone()
    optimizer.close()

    again = torch.nn.Parameter(weights)
    optimizer = superoffload.torch.AdamW([("p", again)], lr=1e-3)
    optimizer.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    train(again, optimizer, 2)
    assert torch.equal(again.detach(), expected[0])
    optimizer.close()
