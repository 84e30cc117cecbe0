"""superoffload.jax on a GPU against superoffload.jax on the host: every bit of every step, plain, overlapped, in jit,
and with weights that stream, which layers return as they read them.

The gradients of both are the same by construction: a loss is a sum of parameters times given numbers. In a dry run
JAX's CPU arrays and the fake driver stand for a GPU (tests/support/fake_jax_gpu.py).
"""

import os
from typing import Any

import numpy as np
from tests.device import machine

STEPS = 6 if machine.DRY_RUN else 12
SKIPPED_STEP = 3
SHAPES = [(257, 129), (3,), (512, 300), (), (1000, 77)]
STACK = (4, 65, 33)
WAYS = ("plain", "overlapped", "inside of jit", "streamed")


def _gpu() -> Any:
    """A JAX device; raises Unavailable where there is none."""
    import jax

    if machine.DRY_RUN:
        import pytest
        from tests.support import fake_jax_gpu

        fake_jax_gpu.install(pytest.MonkeyPatch())
        return jax.devices("cpu")[0]
    try:
        return jax.devices("cuda")[0]
    except RuntimeError as error:
        raise machine.Unavailable(f"JAX {jax.__version__} has no CUDA here: {error}") from None


def _layer(own: Any, x: Any, factors: Any) -> Any:
    import jax.numpy as jnp

    return x + (own["w"].astype(jnp.float32) * factors).sum()


def train(device: Any, way: str, dtype_name: str) -> list[np.ndarray]:
    """Parameters as each step leaves them."""
    import jax
    import jax.numpy as jnp

    import superoffload.jax

    dtype, random = jnp.dtype(dtype_name), np.random.default_rng(3)
    shapes = {"layers": [{"w": shape} for shape in SHAPES], "stack": {"w": STACK}}
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    weights: Any = "streamed" if way == "streamed" else "resident"
    optimizer = superoffload.jax.adamw(1e-2, max_norm=100.0, bucket_bytes=1 << 16, weights=weights)
    overlapped = way in ("overlapped", "streamed")
    with jax.default_device(device):
        draw = lambda scale: jax.tree.map(  # noqa: E731
            lambda shape: jnp.asarray(scale * random.standard_normal(shape)).astype(dtype), shapes, is_leaf=is_shape
        )
        params = optimizer.init(jax.device_put(draw(1.0), device))
        wrap = superoffload.jax.offloaded if overlapped else lambda layer, *_: layer
        seen = []

        def loss_fn(params: Any, factors: Any) -> Any:
            x = jnp.float32(0)
            for i, own in enumerate(params["layers"]):
                given = factors["layers"][i]["w"].astype(jnp.float32)
                x = wrap(_layer, optimizer, f"layers.{i}")(own, x, given)
            stacked = wrap(_layer, optimizer, "stack")

            def body(x: Any, inputs: Any) -> tuple[Any, None]:
                own, given, index = inputs
                options = {"index": index} if overlapped else {}
                return stacked(own, x, given["w"].astype(jnp.float32), **options), None

            return jax.lax.scan(body, x, (params["stack"], factors["stack"], jnp.arange(STACK[0])))[0]

        @jax.jit
        def read(params: Any) -> Any:
            layers = [wrap(lambda own: own, optimizer, f"layers.{i}") for i in range(len(SHAPES))]
            return {**params, "layers": [layer(own) for layer, own in zip(layers, params["layers"], strict=True)]}

        backward = jax.jit(jax.grad(loss_fn))
        whole_step = jax.jit(lambda params, factors: optimizer.step(jax.grad(loss_fn)(params, factors)))
        try:
            for step in range(STEPS):
                factors = draw(10.0 ** (step % 3 - 2))  # some steps are clipped
                if step == SKIPPED_STEP:
                    factors["layers"][0]["w"] = factors["layers"][0]["w"].at[0, 0].set(jnp.inf)
                factors = jax.device_put(factors, device)
                if way == "inside of jit":
                    params, _ = whole_step(params, factors)
                else:
                    gradients = backward(params, factors)
                    params, _ = optimizer.finish(None if overlapped else gradients)
                seen += [np.asarray(leaf) for leaf in jax.tree.leaves(read(params) if way == "streamed" else params)]
        finally:
            optimizer.close()
    return seen


def check(dtype_name: str) -> dict[str, int]:
    """A step of the session: raises for other bits."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the client's own memory is beside JAX's
    try:
        import jax
    except ImportError:
        raise machine.Unavailable("there is no JAX here") from None
    import superoffload

    with machine.daemon(1 << 30):
        expected = train(jax.devices("cpu")[0], "plain", dtype_name)
        device = _gpu()
        for way in WAYS:
            try:
                seen = train(device, way, dtype_name)
            except superoffload.Error as error:
                if error.code.name != "UNIMPLEMENTED":
                    raise
                raise machine.Unavailable(f"{way}: {error}") from error
            different = [i for i, (a, b) in enumerate(zip(expected, seen, strict=True)) if not np.array_equal(a, b)]
            if different:
                raise AssertionError(f"{way}: {len(different)} of {len(seen)} arrays have other bits than the host's")
            print(f"{dtype_name}, {way}: same bits")
    return {"ways": len(WAYS)}
