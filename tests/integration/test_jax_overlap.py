"""Layers that hand their gradients over inside of compiled programs: nothing is lost, doubled or late, and no bit
differs from the plain way."""

import contextlib
import functools
import re
import time

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import jax_model
from tests.support.jax_model import LAYERS, WIDTH, init_params, layer_fn, same_bits

import superoffload.jax
from superoffload import Error

STEPS = 4
RATE = 1e-2


def build(dtype=jnp.float32, **options):
    optimizer = superoffload.jax.adamw(RATE, max_norm=0.3, bucket_bytes=4096, **options)
    return optimizer, optimizer.init(init_params(dtype))


def trained(train, dtype=jnp.float32, **options):
    """Parameters and state."""
    optimizer, params = build(dtype, **options)
    params, _ = train(optimizer, params, STEPS)
    state = optimizer.state_tensors()
    optimizer.close()
    return params, state


@functools.cache
def expected(dtype=jnp.float32):
    return trained(jax_model.train_plain, dtype)


@pytest.mark.parametrize(("speculation", "dtype"), [("always", jnp.float32), ("never", jnp.bfloat16)])
def test_overlapped_training_has_the_bits_of_plain_training(speculation, dtype):
    assert same_bits(trained(jax_model.train_overlapped, dtype, speculation=speculation), expected(dtype))


@pytest.mark.parametrize(
    "wraps",
    [{"wrap_layer": jax.checkpoint}, {"wrap_fn": jax.checkpoint}],
    ids=["checkpoint around", "checkpoint inside"],
)
def test_transformed_layers_hand_over_once(wraps):
    params, _ = trained(functools.partial(jax_model.train_overlapped, **wraps))
    np.testing.assert_allclose(params["layers"][0]["w"], expected()[0]["layers"][0]["w"], atol=1e-5)


def test_scanned_and_recomputed_layers_hand_over_slices_of_stacked_parameters():
    def train(overlapped):
        optimizer = superoffload.jax.adamw(RATE, bucket_bytes=4096)
        try:
            return jax_model.train_scanned(lambda params: (optimizer, optimizer.init(params)), overlapped, STEPS)
        finally:
            optimizer.close()

    plain, overlapped = train(False), train(True)
    assert overlapped[1].committed_steps == STEPS
    assert same_bits(plain[0], overlapped[0])


def test_the_daemon_has_a_layer_done_while_backward_of_those_below_still_runs():
    optimizer, params = build(speculation="always")
    seen = []
    head_of_last = params["layers"][-1]["w"]
    place = [leaf.name for leaf in optimizer.hosted_tree.hosted].index(f"layers.{LAYERS - 1}.w")
    attachment = optimizer._attachment
    placement = attachment.optimizer.layout.placements[place]
    published = np.frombuffer(attachment.parameters(placement.parameters_offset, head_of_last.nbytes), np.float32)
    before = published.copy()

    def wait_for_daemon(cotangent):
        deadline = time.monotonic() + 60
        while np.array_equal(published, before) and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(not np.array_equal(published, before))
        return cotangent

    @jax.custom_vjp
    def held(x):
        return x

    def hold(_, cotangent):
        shape = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
        return (jax.pure_callback(wait_for_daemon, shape, cotangent),)

    held.defvjp(lambda x: (x, None), hold)
    layers = [superoffload.jax.offloaded(layer_fn, optimizer, f"layers.{index}") for index in range(LAYERS)]
    loss_fn = jax_model.make_loss([lambda own, x: layers[0](own, held(x)), *layers[1:]])

    @jax.jit
    def backward(params, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        return loss, optimizer.remaining(gradients)

    _, rest = backward(params, jax_model.batches(1)[0])
    _, report = optimizer.finish(rest)
    optimizer.close()
    assert seen == [True]
    assert report.speculated_buckets > 0


def test_in_the_optimized_program_a_layer_comes_after_the_hand_over_of_the_one_above():
    optimizer, params = build()
    backward = jax_model.offloaded_backward(optimizer)
    program = backward.lower(params, jax_model.batches(1)[0]).compile().as_text()
    optimizer.close()
    operands = {}
    for name, rest in re.findall(r"^ *(?:ROOT )?%?([\w.-]+) = (.*)$", program, re.MULTILINE):
        operands[name] = re.findall(r"%([\w.-]+)", rest)
    calls = re.findall(r"%?([\w.-]+) = [^\n]*custom_call_target=\"superoffload_hand_over\"", program)

    def needed(name, seen):
        for operand in operands.get(name, []):
            if operand not in seen:
                seen.add(operand)
                needed(operand, seen)
        return seen

    assert len(calls) == LAYERS
    ranks = sorted(len(needed(call, set()) & set(calls)) for call in calls)
    assert ranks == list(range(LAYERS))  # each but the last layer's needs those above


def swapped(params):
    return {**params, "layers": params["layers"][::-1]}


@pytest.mark.parametrize(
    "change", [swapped, lambda params: jax.tree.map(lambda leaf: leaf * 2, params)], ids=["names", "values"]
)
def test_a_layer_that_is_called_with_other_parameters_than_its_own_is_found(change):
    optimizer, params = build()
    backward = offloaded = jax_model.offloaded_backward(optimizer)
    mistaken = jax.jit(lambda params, batch: offloaded(change(params), batch))
    batch = jax_model.batches(1)[0]
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # of the program, whose error finish() has with the remedy
        jax.block_until_ready(mistaken(params, batch))
    with pytest.raises(
        Error, match=r"layer of layers.[01].w was called with other values.* offloaded\(layer_fn, optimizer, name\)"
    ):
        optimizer.finish()
    assert optimizer.committed_steps == 0
    assert optimizer.finish(backward(params, batch)[1])[1].committed_steps == 1
    optimizer.close()


def test_in_a_scan_a_layer_that_is_called_with_another_slice_is_found():
    optimizer = superoffload.jax.adamw(RATE, bucket_bytes=4096)
    params = optimizer.init({"w": jnp.stack([jnp.full((8, 8), 0.1), jnp.full((8, 8), 0.2)])})
    layer = superoffload.jax.offloaded(lambda own, x: jnp.tanh(x @ own["w"]), optimizer)

    def loss(params, numbers):
        body = lambda x, inputs: (layer(inputs[0], x, index=inputs[1]), None)  # noqa: E731
        return jax.lax.scan(body, jnp.ones((2, 8)), (params, numbers))[0].sum()

    backward = jax.jit(lambda params, numbers: jax.value_and_grad(loss)(params, numbers)[0])
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.block_until_ready(backward(params, jnp.arange(2)[::-1]))
    with pytest.raises(Error, match="layer of w was called with other values"):
        optimizer.finish()
    backward(params, jnp.arange(2))
    assert optimizer.finish()[1].committed_steps == 1
    optimizer.close()


def test_gradients_that_xla_could_drop_arrive():
    """The layer has no input to differentiate, and nobody uses what autodiff makes of its parameters."""
    optimizer = superoffload.jax.adamw(RATE)
    params = optimizer.init({"w": jnp.full((8, 8), 0.5)})
    layer = superoffload.jax.offloaded(lambda own, x: x @ own["w"], optimizer)
    loss = jax.jit(lambda own, x: jax.value_and_grad(lambda own: jnp.square(layer(own, x)).sum())(own)[0])
    loss(params, jnp.ones((2, 8), jnp.float32))
    after, report = optimizer.finish()
    optimizer.close()
    assert report.committed_steps == 1
    assert not np.array_equal(after["w"], params["w"])


def test_a_schedule_goes_on_from_steps_inside_of_jit():
    def train(inside):
        optimizer = superoffload.jax.adamw(lambda count: 1e-2 / (count + 1), bucket_bytes=4096)
        params = optimizer.init(init_params())
        ones = jax.tree.map(jnp.ones_like, params)
        for _ in range(2):
            params, _ = jax.jit(optimizer.step)(ones) if inside else optimizer.step(ones)
        params, _ = jax_model.train_overlapped(optimizer, params, 2)
        optimizer.close()
        return params

    assert same_bits(train(True), train(False))


def test_inference_hands_nothing_over():
    optimizer, params = build()
    layer = superoffload.jax.offloaded(layer_fn, optimizer, "layers.0")
    out = jax.jit(layer)(params["layers"][0], jnp.ones((2, WIDTH)))
    np.testing.assert_array_equal(out, jax.jit(layer_fn)(params["layers"][0], jnp.ones((2, WIDTH))))
    assert optimizer._attachment.arrived() == [0] * (2 * LAYERS + 2)
    optimizer.close()


@pytest.fixture(scope="module")
def trainer():
    optimizer, params = build()
    backward = jax_model.offloaded_backward(optimizer)
    yield optimizer, params, backward
    optimizer.close()


def check_commits(trainer):
    """The optimizer is none the worse."""
    optimizer, params, backward = trainer
    before = optimizer.committed_steps
    _, rest = backward(params, jax_model.batches(1)[0])
    assert optimizer.finish(rest)[1].committed_steps == before + 1
    optimizer.push_params(params)  # with which the next test begins


def test_two_backward_passes_in_a_step(trainer):
    optimizer, params, backward = trainer
    batch = jax_model.batches(1)[0]
    backward(params, batch)
    with pytest.raises(Exception, match="came twice in one step"):
        jax.block_until_ready(backward(params, batch))
    with pytest.raises(Error, match="came twice in one step") as caught:
        optimizer.finish()
    assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
    check_commits(trainer)


def test_a_layer_that_did_not_run(trainer):
    optimizer, _, _ = trainer
    with pytest.raises(Error, match=r"no gradient of embedding came since the last step: pass finish\(gradients\)"):
        optimizer.finish()
    with pytest.raises(Error, match=r"no gradient of layers.0.b came since .* did not run"):
        optimizer.finish(optimizer.remaining(init_params()))
    check_commits(trainer)


def test_what_was_handed_over_can_be_dropped(trainer):
    optimizer, params, backward = trainer
    backward(params, jax_model.batches(1)[0])
    optimizer.abandon()
    check_commits(trainer)


@pytest.mark.parametrize(
    ("name", "own", "index", "sentence"),
    [
        ("layers.7", {"w": jnp.ones((WIDTH, WIDTH))}, None, "init.. had none of that name; it had embedding"),
        ("layers.0", {"w": jnp.ones(WIDTH), "b": jnp.ones(WIDTH)}, None, "pass index="),
        ("layers.0", {"w": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones(WIDTH)}, 0, "index= is for layers of a stack"),
    ],
    ids=["unknown", "a slice without its number", "a number without a stack"],
)
def test_parameters_that_are_not_the_layers(trainer, name, own, index, sentence):
    optimizer, _, _ = trainer
    layer = superoffload.jax.offloaded(lambda own, x: x, optimizer, name)
    try:
        with pytest.raises(Error, match=sentence):
            layer(own, jnp.ones(WIDTH), index=index)
    finally:
        optimizer.hosted_tree._claimed.pop()


def test_a_closed_optimizer():
    optimizer, params = build()
    backward = jax_model.offloaded_backward(optimizer)
    backward(params, jax_model.batches(1)[0])
    optimizer.close()
    with pytest.raises(Exception, match="is closed"):
        jax.block_until_ready(backward(params, jax_model.batches(1)[0]))
    with pytest.raises(Error, match="is closed"):
        optimizer.finish()
    other, params = build()  # JAX keeps the program's error
    assert other.step(params)[1].committed_steps == 1
    other.close()


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["", "jit"])
def test_a_mapped_layer_is_refused_with_what_to_do_instead(wrap):
    optimizer = superoffload.jax.adamw(RATE)
    params = optimizer.init({"w": jnp.ones(4)})
    layer = superoffload.jax.offloaded(lambda own, x: x * own["w"], optimizer)
    gradient = wrap(jax.grad(lambda own, x: layer(own, x).sum()))
    with pytest.raises(Error, match="mapped by jax.vmap.*map inside of layer_fn instead") as error:
        jax.vmap(gradient, (None, 0))(params, jnp.ones((3, 4)))
    assert error.value.code == grpc.StatusCode.UNIMPLEMENTED
    mapped = superoffload.jax.offloaded(lambda own, x: jax.vmap(lambda row: row * own["w"])(x), optimizer)
    jax.jit(jax.grad(lambda own, x: mapped(own, x).sum()))(params, jnp.ones((3, 4)))
    after, _ = optimizer.finish()
    np.testing.assert_allclose(after["w"], 1 - RATE, rtol=1e-4)
    optimizer.close()


def test_leaves_of_a_layer_that_are_none_are_passed_over():
    optimizer = superoffload.jax.adamw(RATE)
    params = optimizer.init({"a": None, "w": jnp.ones(4)})
    layer = superoffload.jax.offloaded(lambda own, x: x * own["w"], optimizer)
    jax.jit(jax.grad(lambda own: layer(own, jnp.ones(4)).sum()))(params)
    after, _ = optimizer.finish()
    assert after["a"] is None
    np.testing.assert_allclose(after["w"], 1 - RATE, rtol=1e-4)
    optimizer.close()


def test_a_layer_in_shard_map_hands_shards_over_and_names_the_option_that_it_needs():
    mesh = jax.make_mesh((1,), ("x",))
    optimizer = superoffload.jax.adamw(RATE)
    params = optimizer.init({"w": jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("x")))})
    layer = superoffload.jax.offloaded(lambda own, x: x * jax.lax.all_gather(own["w"], "x", tiled=True), optimizer)

    def backward(**options):
        body = jax.grad(lambda own: layer(own, jnp.ones(4)).sum())
        jax.jit(jax.shard_map(body, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), **options))(params)

    with pytest.raises(Error, match="check_vma=False"):
        backward()
    backward(check_vma=False)
    after, _ = optimizer.finish()
    np.testing.assert_allclose(after["w"], 1 - RATE, rtol=1e-4)
    optimizer.close()
