"""Both adapters of one library: the same bits, and in one process in whatever order."""

import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import superoffload.jax
import superoffload.torch

STEPS = 20
OPTIONS = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def recorded():
    """Gradients of a small model's training, in bfloat16; one step has an infinite one, one none for "b"."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 33).bfloat16()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    steps = []
    for step in range(STEPS):
        model.zero_grad()
        model(torch.randn(8, 64).bfloat16()).square().mean().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        if step == 7:
            gradients["weight"][0, 0] = float("inf")
        if step == 11:
            gradients["bias"] = None
        steps.append(gradients)
    return start, steps


def to_jax(tensor):
    return None if tensor is None else jnp.asarray(tensor.float().numpy()).astype(jnp.bfloat16)


def test_recorded_gradients_give_the_same_bits():
    start, steps = recorded()
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    ours = superoffload.torch.AdamW(
        list(parameters.items()), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.2, overlap=False
    )
    theirs = superoffload.jax.adamw(1e-2, max_norm=0.2, bucket_bytes=4096, **OPTIONS)
    params = theirs.init({name: to_jax(tensor) for name, tensor in start.items()})
    for gradients in steps:
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        ours.step()
        params, report = theirs.step({name: to_jax(tensor) for name, tensor in gradients.items()})
        assert report.kind == ours.last_result.kind
    for name, arrays in ours.state_tensors().items():
        for key, tensor in arrays.items():
            assert np.array_equal(tensor.numpy(), theirs.state_tensors()[name][key]), (name, key)
        assert np.array_equal(parameters[name].detach().float().numpy(), params[name].astype(jnp.float32))
    ours.close()
    theirs.close()


@pytest.mark.parametrize("order", [("torch", "jax", "grpc"), ("jax", "grpc", "torch"), ("grpc", "torch", "jax")])
def test_all_in_one_process_in_any_order(order):
    code = f"""
        import {order[0]}, {order[1]}, {order[2]}
        import superoffload.{"jax" if order.index("jax") < order.index("torch") else "torch"}
        import superoffload.jax, superoffload.torch
        import jax.numpy as jnp
        optimizer = superoffload.jax.adamw(0.5, weight_decay=0.0)
        params = optimizer.init({{"w": jnp.ones(3)}})
        params, _ = jax.jit(optimizer.step)({{"w": jnp.ones(3)}})
        parameter = torch.nn.Parameter(torch.ones(3))
        other = superoffload.torch.AdamW([parameter], lr=0.5, weight_decay=0.0)
        parameter.sum().backward()
        other.step()
        assert params["w"].tolist() == parameter.tolist()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
