"""Parameters that a JAX loop changes between steps are found where it passes them, before anything is committed."""

import functools

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import jax_model
from tests.support.jax_model import init_params, same_bits

import superoffload.jax
from superoffload import Error

CHANGED = r"changed by somebody else .* nothing was committed; call push_params\(params\).*pull_params\(\)"


@pytest.fixture
def build():
    built = []

    def make(params=None, **options):
        optimizer = superoffload.jax.adamw(1e-2, bucket_bytes=4096, **options)
        built.append(optimizer)
        return optimizer, optimizer.init(init_params() if params is None else params)

    yield make
    for optimizer in built:
        optimizer.close()


def ones(params):
    return jax.tree.map(jnp.ones_like, params)


def clipped(params):
    return {**params, "head": jnp.clip(params["head"], -0.05, 0.05)}


def refused(step):
    with pytest.raises(Error, match=CHANGED) as caught:
        step()
    assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
    return str(caught.value)


def test_changed_parameters_are_an_error_and_can_be_pushed_or_pulled(build):
    optimizer, params = build()
    gradients = ones(params)
    params, _ = optimizer.step(gradients, params=params)
    changed = clipped(params)
    assert "parameter head was changed" in refused(lambda: optimizer.step(gradients, params=changed))
    assert optimizer.committed_steps == 1
    assert same_bits(optimizer.pull_params(), params)
    optimizer.push_params(changed)
    after, _ = optimizer.step(gradients, params=changed)
    assert "and 5 more were" in refused(lambda: optimizer.step(gradients, params=changed)), "of a step before"
    assert optimizer.step(gradients, params=after)[1].committed_steps == 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_bit_is_enough(build, dtype):
    optimizer, params = build(init_params(dtype))
    bits = np.array(params["embedding"])
    bits.view(np.uint8)[-1, -1] ^= 1
    refused(lambda: optimizer.step(ones(params), params={**params, "embedding": jnp.asarray(bits)}))
    zeros = {"zeros": jnp.zeros(3, dtype)}
    negative, _ = build(zeros)
    refused(lambda: negative.step(ones(zeros), params={"zeros": -zeros["zeros"]}))


def test_equal_parameters_are_taken_whoever_made_them(build):
    optimizer, params = build()
    for make in (functools.partial(jax.tree.map, jnp.copy), jax.jit(lambda params: params), jax.device_get):
        params, report = optimizer.step(ones(params), params=make(params))
    params["embedding"] = params["embedding"].at[0, 0].set(jnp.nan)
    optimizer.push_params(params)
    optimizer.step(ones(params), params=jax.tree.map(jnp.copy, params))
    assert optimizer.committed_steps == report.committed_steps + 1 == 4


def test_a_skipped_step_leaves_them_as_they_were(build):
    optimizer, params = build()
    before = params
    params, report = optimizer.step(jax.tree.map(lambda leaf: leaf * jnp.nan, params), params=params)
    assert report.kind.skipped
    optimizer.step(ones(params), params=before)
    refused(lambda: optimizer.step(ones(params), params=before))


def test_memory_of_numpy_that_the_loop_writes_is_looked_at(build):
    params = {"w": np.ones(300, np.float32)}
    optimizer, same = build(params)
    assert same is params
    params["w"][7] = 2
    refused(lambda: optimizer.step(ones(params), params=params))


def test_another_dtype_and_a_leaf_that_is_gone_are_changes(build):
    optimizer, params = build()
    cast = {**params, "head": params["head"].astype(jnp.bfloat16)}
    for changed in (cast, {**params, "head": None}):
        assert "parameter head was changed" in refused(
            lambda changed=changed: optimizer.step(ones(params), params=changed)
        )


def test_after_steps_inside_of_jit(build):
    optimizer, params = build()
    after, _ = jax.jit(optimizer.step)(ones(params))
    refused(lambda: optimizer.step(ones(params), params=params))
    assert optimizer.step(ones(params), params=after)[1].committed_steps == 2


def test_inside_of_jit(build):
    optimizer, params = build()
    gradients = ones(params)

    def step(params):
        params, report = optimizer.step(gradients, params=params)
        return params, report.committed_steps

    run = jax.jit(lambda params: jax.lax.scan(lambda params, _: step(params), params, length=3))
    params, committed = run(params)
    assert committed.tolist() == [1, 2, 3]
    with pytest.raises(jax.errors.JaxRuntimeError, match="parameter head was " + CHANGED):
        jax.block_until_ready(run(clipped(params)))
    assert optimizer.committed_steps == 3
    optimizer.push_params(clipped(params))
    assert run(clipped(params))[1].tolist() == [4, 5, 6]


def test_after_a_restored_checkpoint(build, tmp_path):
    optimizer, params = build()
    handle = optimizer.save(tmp_path / "state")
    later, _ = optimizer.step(ones(params))
    restored = optimizer.restore(handle)
    refused(lambda: optimizer.step(ones(params), params=later))
    assert optimizer.step(ones(params), params=restored)[1].committed_steps == 1


def test_beside_offloaded_layers_whose_step_the_daemon_has_begun(build):
    optimizer, params = build(speculation="always")
    backward = jax_model.offloaded_backward(optimizer)
    for number, batch in enumerate(jax_model.batches(4)):
        if number == 2:
            rest = backward(params, batch)[1]
            changed = clipped(params)
            refused(lambda rest=rest, changed=changed: optimizer.finish(rest, params=changed))
        rest = backward(params, batch)[1]
        same = jax.tree.map(jnp.copy, params) if number % 2 else params
        params, report = optimizer.finish(rest, params=same)
    assert report.committed_steps == 4
    undisturbed, first = build(speculation="never")
    assert same_bits(jax_model.train_plain(undisturbed, first, 4)[0], params)
