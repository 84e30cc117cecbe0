"""A JAX training step with superoffload against the same step with optax.adamw inside of jit, on the same CPU.

All train the same fp32 layers on random inputs, step by step in turn, in one process. Prints medians, and the ratio of
each way to Optax's: gradients to step() outside of jit, step() inside of it, and layers that hand over in backward.

    python client/bench/jax_step_bench.py [--width 1024] [--layers 6] [--rows 256] [--steps 15]
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import superoffload.jax

RATE, WARM_UP = 1e-4, 3


def layer_fn(params, x):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def make_params(width, layers):
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(0, shape[0] ** -0.5, shape), jnp.float32)

    return [{"up": normal(width, 4 * width), "down": normal(4 * width, width)} for _ in range(layers)]


def make_loss(layers):
    def loss_fn(params, x):
        for layer, own in zip(layers, params, strict=True):
            x = layer(own, x)
        return jnp.square(x).mean()

    return loss_fn


def with_optax(params):
    optimizer = optax.adamw(RATE)
    state = optimizer.init(params)
    loss_fn = make_loss([layer_fn] * len(params))

    def step(params, state, x):
        loss, gradients = jax.value_and_grad(loss_fn)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return loss, optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))

    def run(x):
        nonlocal params, state
        loss, params, state = step(params, state, x)
        return loss, params

    return run


def outside(params):
    optimizer = superoffload.jax.adamw(RATE)
    params = optimizer.init(params)
    backward = jax.jit(jax.value_and_grad(make_loss([layer_fn] * len(params))))

    def run(x):
        nonlocal params
        loss, gradients = backward(params, x)
        params, _ = optimizer.step(gradients)
        return loss, params

    return run


def inside(params):
    optimizer = superoffload.jax.adamw(RATE)
    params = optimizer.init(params)
    loss_fn = make_loss([layer_fn] * len(params))

    @jax.jit
    def step(params, x):
        loss, gradients = jax.value_and_grad(loss_fn)(params, x)
        return loss, optimizer.step(gradients)[0]

    def run(x):
        nonlocal params
        loss, params = step(params, x)
        return loss, params

    return run


def overlapped(params):
    optimizer = superoffload.jax.adamw(RATE)
    params = optimizer.init(params)
    layers = [superoffload.jax.offloaded(layer_fn, optimizer, str(index)) for index in range(len(params))]
    loss_fn = make_loss(layers)
    backward = jax.jit(lambda params, x: jax.value_and_grad(loss_fn)(params, x)[0])

    def run(x):
        nonlocal params
        loss = backward(params, x)
        params, _ = optimizer.finish()
        return loss, params

    return run


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"width": 1024, "layers": 6, "rows": 256, "steps": 15}.items():
        arguments.add_argument(f"--{name}", type=int, default=value)
    options = arguments.parse_args()

    ways = {"optax": with_optax, "outside jit": outside, "inside jit": inside, "overlapped": overlapped}
    runs = {name: make(make_params(options.width, options.layers)) for name, make in ways.items()}
    seconds = {name: [] for name in runs}
    for step in range(WARM_UP + options.steps):
        x = jnp.full((options.rows, options.width), 0.01 * (step % 7 + 1))
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(x))
            if step >= WARM_UP:
                seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{8 * options.width**2 * options.layers / 1e6:.0f} M parameters, {options.rows} rows")
    for name, median in medians.items():
        print(f"{name:12s} {1000 * median:8.1f} ms  {median / medians['optax']:.2f} of Optax's")


if __name__ == "__main__":
    main()
