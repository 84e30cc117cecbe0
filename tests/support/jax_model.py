"""A small language model in plain JAX, and the ways to train it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import superoffload.jax

VOCABULARY, WIDTH, LAYERS = 48, 32, 2


def init_params(dtype=jnp.float32):
    random = np.random.default_rng(5)

    def normal(*shape):
        return jnp.asarray(random.normal(0, 0.1, shape), dtype)

    layers = [{"w": normal(WIDTH, WIDTH), "b": jnp.zeros(WIDTH, dtype)} for _ in range(LAYERS)]
    return {"embedding": normal(VOCABULARY, WIDTH), "layers": layers, "head": normal(WIDTH, VOCABULARY)}


def batches(steps):
    random = np.random.default_rng(6)
    return [jnp.asarray(random.integers(0, VOCABULARY, (4, 9)), jnp.int32) for _ in range(steps)]


def layer_fn(params, x):
    return x + jnp.tanh(x @ params["w"] + params["b"])


def make_loss(layers):
    def loss(params, batch):
        x = params["embedding"][batch[:, :-1]]
        for layer, own in zip(layers, params["layers"], strict=True):
            x = layer(own, x)
        logits = (x @ params["head"]).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1).mean()

    return loss


def train_plain(optimizer, params, steps):
    """Parameters and loss after ``steps``; the optimizer stays open."""
    backward = jax.jit(jax.value_and_grad(make_loss([layer_fn] * LAYERS)))
    for batch in batches(steps):
        loss, gradients = backward(params, batch)
        params, _ = optimizer.step(gradients)
    return params, loss


def offloaded_backward(optimizer, wrap_layer=lambda layer: layer, wrap_fn=lambda fn: fn):
    layers = [
        wrap_layer(superoffload.jax.offloaded(wrap_fn(layer_fn), optimizer, f"layers.{index}"))
        for index in range(LAYERS)
    ]
    loss_fn = make_loss(layers)

    @jax.jit
    def backward(params, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        return loss, optimizer.remaining(gradients)

    return backward


def train_overlapped(optimizer, params, steps, **wraps):
    backward = offloaded_backward(optimizer, **wraps)
    for batch in batches(steps):
        loss, rest = backward(params, batch)
        params, _ = optimizer.finish(rest)
    return params, loss


def train_scanned(make, overlapped, steps):
    """As a scan over stacked and recomputed layers; ``make(params)`` builds the optimizer. Parameters and report."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *init_params()["layers"])
    optimizer, params = make(stacked)
    layer = superoffload.jax.offloaded(layer_fn, optimizer) if overlapped else None

    def body(x, inputs):
        own, index = inputs
        return (layer(own, x, index=index) if overlapped else layer_fn(own, x)), None

    def loss_fn(params, x):
        x, _ = jax.lax.scan(jax.checkpoint(body), x, (params, jnp.arange(LAYERS)))
        return jnp.square(x).mean()

    @jax.jit
    def backward(params, x):
        gradients = jax.grad(loss_fn)(params, x)
        return optimizer.remaining(gradients) if overlapped else gradients

    for step in range(steps):
        gradients = backward(params, jnp.full((2, WIDTH), 0.1 * (step + 1)))
        params, report = optimizer.finish(gradients)
    return params, report


def scan_steps(optimizer, all_gradients, params):
    """Steps inside one jit, with gradients that are stacked by step. Parameters and the steps' reports."""
    run = jax.jit(lambda params: jax.lax.scan(lambda params, own: optimizer.step(own), params, all_gradients))
    return run(params)


def lose_a_step_inside_of_jit(optimizer, params, kill):
    """``kill``: ends the daemon, which has a successor that knows the optimizer."""
    ones = jax.tree.map(jnp.ones_like, params)
    step = jax.jit(optimizer.step)
    params, _ = jax.block_until_ready(step(ones))
    kill()
    for _ in range(2):  # also when it is called again
        with pytest.raises(Exception, match="pull_params"):
            jax.block_until_ready(step(ones))
    assert same_bits(optimizer.pull_params(), params)
    jax.block_until_ready(step(ones))
    assert optimizer.committed_steps == 2


def same_bits(a, b):
    ours, theirs = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(ours) == len(theirs) and all(
        x.dtype == y.dtype and np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
        for x, y in zip(ours, theirs, strict=True)
    )
