"""A daemon that dies while a JAX trainer trains: its weights are those of an undisturbed run, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.conftest import Daemon
from tests.fault.test_keeper import OFF
from tests.fault.test_recovered_optimizer import kill_daemon
from tests.support import jax_model
from tests.support.jax_model import same_bits

import superoffload.jax
from superoffload import Error

STEPS = 6


@pytest.fixture(scope="module")
def kept():
    started = Daemon("--keeper", OFF)
    yield started
    assert started.stop() == 0, started.log


def build(kept, **options):
    optimizer = superoffload.jax.adamw(1e-2, endpoint=kept.endpoint, max_norm=0.3, bucket_bytes=4096, **options)
    return optimizer, optimizer.init(jax_model.init_params())


@pytest.fixture(scope="module")
def undisturbed(kept):
    optimizer, params = build(kept)
    params, _ = jax_model.train_plain(optimizer, params, STEPS)
    optimizer.close()
    return params


@pytest.mark.parametrize("where", ["after backward", "in backward"])
def test_overlapped_training_goes_on_with_the_same_bits(kept, undisturbed, where):
    optimizer, params = build(kept)
    kills = []

    def kill(cotangent):
        if len(kills) == 0 and optimizer.last_result is not None:
            kill_daemon(kept)
            kills.append(where)
        return cotangent

    @jax.custom_vjp
    def fatal(x):
        return x

    def backward_of_fatal(_, cotangent):
        return (jax.pure_callback(kill, jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype), cotangent),)

    fatal.defvjp(lambda x: (x, None), backward_of_fatal)

    def deadly(layer):
        return lambda own, x: layer(own, fatal(x)) if where == "in backward" else layer(own, x)

    backward = jax_model.offloaded_backward(optimizer, wrap_layer=deadly)
    for batch in jax_model.batches(STEPS):
        _, rest = backward(params, batch)
        jax.block_until_ready(rest)
        if where == "after backward":
            kill(None)
        params, _ = optimizer.finish(rest)
    optimizer.close()
    assert kills
    assert same_bits(params, undisturbed)


def test_plain_training_goes_on_with_the_same_bits(kept, undisturbed):
    optimizer, params = build(kept)
    backward = jax.jit(jax.value_and_grad(jax_model.make_loss([jax_model.layer_fn] * jax_model.LAYERS)))
    for step, batch in enumerate(jax_model.batches(STEPS)):
        if step == 1:
            kill_daemon(kept)
        _, gradients = backward(params, batch)
        if step in (0, 3):
            kill_daemon(kept)
        params, _ = optimizer.step(gradients)
    optimizer.close()
    assert same_bits(params, undisturbed)


def test_a_step_inside_of_jit_fails_and_the_parameters_can_be_pulled(kept):
    optimizer, params = build(kept)
    jax_model.lose_a_step_inside_of_jit(optimizer, params, lambda: kill_daemon(kept))
    optimizer.close()


def test_the_death_of_a_private_daemon_is_told_with_the_remedy(monkeypatch):
    from superoffload._core import daemon

    monkeypatch.delenv("SUPEROFFLOAD_ENDPOINT", raising=False)
    optimizer = superoffload.jax.adamw(1e-2)
    params = optimizer.init({"w": jnp.ones(4)})
    process = daemon._private._process
    process.kill()
    process.wait()
    with pytest.raises(Error, match="private superoffloadd of this process is dead.*build another"):
        optimizer.step({"w": np.ones(4, np.float32)})
    assert same_bits(params, {"w": jnp.ones(4)})
    optimizer.close()
