"""superoffload.jax against Optax, whose optimizers it takes the place of, in fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import superoffload.jax

STEPS = 200


def init_params():
    random = np.random.default_rng(1)
    return {"w": jnp.asarray(random.normal(0, 0.5, (96, 48)), jnp.float32), "b": jnp.zeros(48)}


def gradients():
    """Of all steps; their sizes differ as those of a training run do."""
    random = np.random.default_rng(2)
    sizes = 10.0 ** random.uniform(-4, 0, (STEPS, 1, 1))
    return {
        "w": jnp.asarray(random.normal(0, 1, (STEPS, 96, 48)) * sizes, jnp.float32),
        "b": jnp.asarray(random.normal(0, 1, (STEPS, 48)) * sizes[:, 0], jnp.float32),
    }


def train_optax(optimizer):
    def step(carry, own):
        params, state = carry
        updates, state = optimizer.update(own, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = init_params()
    return jax.jit(lambda carry: jax.lax.scan(step, carry, gradients())[0])((params, optimizer.init(params)))[0]


def train_ours(optimizer):
    params = optimizer.init(init_params())
    params, _ = jax.jit(lambda params: jax.lax.scan(lambda _, own: optimizer.step(own), params, gradients()))(params)
    optimizer.close()
    return params


def ulps(ours, theirs):
    """The largest difference, in units of the last place of the largest weight of the leaf."""
    return max(
        float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max() / np.spacing(np.abs(b).max()))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    )


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, STEPS, 1e-4)
MASK = {"w": True, "b": False}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            superoffload.jax.adamw(SCHEDULE, b2=0.95, weight_decay=0.1, mask=MASK),
            optax.adamw(SCHEDULE, b2=0.95, weight_decay=0.1, mask=MASK),
        ),
        (superoffload.jax.adam(1e-3), optax.adam(1e-3)),
        (superoffload.jax.lion(SCHEDULE, weight_decay=0.1), optax.lion(SCHEDULE, weight_decay=0.1)),
        (
            superoffload.jax.adamw(
                1e-3, labels={"w": "w", "b": "b"}, groups={"w": {}, "b": {"learning_rate": 1e-2}}, weight_decay=0.0
            ),
            optax.multi_transform({"w": optax.adam(1e-3), "b": optax.adam(1e-2)}, {"w": "w", "b": "b"}),
        ),
    ],
    ids=["adamw", "adam", "lion", "groups"],
)
def test_agrees_with_optax_in_fp32(ours, theirs):
    """Most of the difference is Optax's own: the test below."""
    difference = ulps(train_ours(ours), train_optax(theirs))
    print(difference, "ulps")
    assert difference <= 100


def test_is_nearer_to_exact_arithmetic_than_optax():
    rate, b1, b2 = 1e-3, 0.9, 0.999
    exact = {}
    for name, weights in init_params().items():
        p = np.asarray(weights, np.float64)
        m, v = np.zeros_like(p), np.zeros_like(p)
        for t, own in enumerate(np.asarray(gradients()[name], np.float64), 1):
            m, v = b1 * m + (1 - b1) * own, b2 * v + (1 - b2) * own**2
            p = p - rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
        exact[name] = p.astype(np.float32)
    ours = ulps(train_ours(superoffload.jax.adam(rate)), exact)
    theirs = ulps(train_optax(optax.adam(rate)), exact)
    print(ours, theirs, "ulps")
    assert ours <= 16 and ours < theirs
