"""superoffload.jax with weights that stream to a GPU, a fake one: the bits of weights that stay."""

import re

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.integration.test_jax_gpu import RATE, STEPS, build, daemon, expected, gpu  # noqa: F401
from tests.support import fake_jax_gpu, jax_model
from tests.support.jax_model import LAYERS, init_params, same_bits

import superoffload.jax
from superoffload import Error
from superoffload.jax import VerdictKind, ffi


def streamed(params):
    """Whether each of the model's layers is."""
    return [all(leaf.size == 0 for leaf in layer.values()) for layer in params["layers"]]


@pytest.mark.parametrize(
    ("dtype", "weights", "wraps", "speculation"),
    [
        (jnp.bfloat16, "streamed", {}, "always"),
        (jnp.float32, 1.0, {"wrap_layer": jax.checkpoint}, "adaptive"),
        (jnp.float32, 0.5, {"wrap_fn": jax.checkpoint}, "never"),
    ],
    ids=["all", "recomputed", "half"],
)
def test_training_has_the_bits_of_training_on_the_cpu(gpu, expected, dtype, weights, wraps, speculation):  # noqa: F811
    optimizer, params = gpu(init_params(dtype), weights=weights, speculation=speculation)
    assert sum(streamed(params)) == LAYERS * (0.5 if weights == 0.5 else 1)
    params, _ = jax_model.train_overlapped(optimizer, params, STEPS, **wraps)
    resident, state = expected[dtype]
    assert same_bits(optimizer.state_tensors(), state)
    assert same_bits([params["embedding"], params["head"]], [resident["embedding"], resident["head"]])


def test_evaluation_reads_what_the_last_step_left(gpu):  # noqa: F811
    """Also while a step is open, and after one that was skipped, or dropped."""
    (ours, params), (theirs, others) = gpu(weights="streamed", speculation="always"), gpu()
    losses = []
    for optimizer in (ours, theirs):
        layers = [superoffload.jax.offloaded(jax_model.layer_fn, optimizer, f"layers.{i}") for i in range(LAYERS)]
        losses.append(jax.jit(jax_model.make_loss(layers)))
    backwards = [jax_model.offloaded_backward(optimizer) for optimizer in (ours, theirs)]
    first, second, third = jax_model.batches(3)
    for batch in (first, second, third):
        rests = [backward(given, batch)[1] for backward, given in zip(backwards, (params, others), strict=True)]
        assert losses[0](params, third) == losses[1](others, third), "in an open step"
        if batch is second:
            for optimizer in (ours, theirs):
                optimizer.abandon()
            continue
        (params, _), (others, _) = ours.finish(rests[0]), theirs.finish(rests[1])
        assert losses[0](params, third) == losses[1](others, third)
    rest = {**backwards[0](params, first)[1], "head": jnp.full_like(params["head"], jnp.nan)}
    params, report = ours.finish(rest)
    assert report.kind == VerdictKind.SKIP_NON_FINITE
    assert losses[0](params, third) == losses[1](others, third)


def test_a_model_on_the_host_is_never_whole_in_the_gpus_memory(gpu):  # noqa: F811
    """Its blocks are arrays of NumPy; the GPU has slots for three."""
    blocks, width = 12, 512
    random = np.random.default_rng(0)
    params = {
        "layers": [{"w": random.normal(0, 0.1, (width, width)).astype(np.float32)} for _ in range(blocks)],
        "head": jnp.ones(width),
    }
    before = fake_jax_gpu.used_bytes()
    optimizer, params = gpu(params, weights="streamed", bucket_bytes=width * width * 4)
    slots = fake_jax_gpu.used_bytes() - before
    optimizer.close()
    resident = jax.tree.map(jnp.asarray, {"layers": [{"w": np.zeros((width, width), np.float32)}] * blocks})
    before = fake_jax_gpu.used_bytes()
    optimizer, _ = gpu(resident | {"head": jnp.ones(width)}, bucket_bytes=width * width * 4)
    whole = fake_jax_gpu.used_bytes() - before
    granule = 2 << 20
    assert whole - slots >= blocks * width * width * 4 - 4 * granule


def test_state_leaves_and_comes_back(gpu, tmp_path):  # noqa: F811
    """By a checkpoint, by another trainer under the same name, and by parameters of the trainer's own."""
    given = init_params()
    optimizer, params = gpu(given, name="streams", weights="streamed")
    params, _ = jax_model.train_overlapped(optimizer, params, 1)
    handle, state = optimizer.save(tmp_path / "checkpoint"), optimizer.state_tensors()
    jax_model.train_overlapped(optimizer, params, 1)
    assert not same_bits(optimizer.state_tensors(), state)
    assert streamed(optimizer.restore(handle)) == [True] * LAYERS
    assert same_bits(optimizer.state_tensors(), state)
    optimizer.close()
    other, found = gpu(given, name="streams", sync="pull_params", weights="streamed")
    assert streamed(found) == [True] * LAYERS
    other.push_params({**found, "head": given["head"]})
    masters = {name: tensors["master"] for name, tensors in other.state_tensors().items()}
    assert same_bits(masters["head"], np.asarray(given["head"]))
    assert same_bits(masters["layers.0.w"], state["layers.0.w"]["master"])
    other.push_params(given)
    assert same_bits(other.state_tensors()["layers.0.w"]["master"], np.asarray(given["layers"][0]["w"]))
    loss = jax_model.train_overlapped(other, other.pull_params(), 1)[1]
    assert loss == jax_model.train_plain(*gpu(given), 1)[1]


def test_changed_parameters_are_found(gpu):  # noqa: F811
    optimizer, params = gpu(weights="streamed")
    backward = jax_model.offloaded_backward(optimizer)
    batch = jax_model.batches(1)[0]
    given = {**params, "layers": init_params()["layers"]}
    for changed, name in [({**params, "head": params["head"] + 1}, "head"), (given, "layers.0.b")]:
        _, rest = backward(params, batch)
        with pytest.raises(Error, match=f"parameter {name}.* changed by somebody else"):
            optimizer.finish(rest, params=changed)
    _, rest = backward(params, batch)
    assert optimizer.finish(rest, params=params)[1].committed_steps == 1


def test_what_cannot_stream_is_refused_with_the_remedy(gpu):  # noqa: F811
    given = init_params()
    optimizer, params = gpu(given, weights="streamed")
    backward = jax_model.offloaded_backward(optimizer)
    batch = jax_model.batches(1)[0]
    with pytest.raises(Error, match=r"parameter layers.0.b streams.* pass what init\(\) and finish\(\) return"):
        backward(given, batch)
    with pytest.raises(Error, match=r"streams: inside of jit .*call finish\(\) outside") as caught:
        jax.jit(optimizer.step)(given)
    assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED
    layer = superoffload.jax.offloaded(jax_model.layer_fn, optimizer, "layers.0")
    with pytest.raises(Error, match="mapped by jax.vmap.*map inside of layer_fn instead"):
        jax.vmap(lambda x: layer(params["layers"][0], x))(jnp.ones((3, 4, jax_model.WIDTH)))
    with pytest.raises(Error, match="no blocks are found that could stream"):
        gpu({"stack": jnp.ones((4, 3)), "head": jnp.ones(3)}, weights="streamed")
    with pytest.raises(ValueError, match="weights is 'flowing' but must be 'resident', 'streamed' or the part"):
        superoffload.jax.adamw(RATE, weights="flowing")
    gpu(given, name="stays")[0].close()
    with pytest.raises(Error, match="stays was created for weights that stay on the GPU"):
        gpu(given, name="stays", weights="streamed")


def test_a_model_may_be_blocks_only(gpu):  # noqa: F811
    """Also where autodiff has no argument of its own for the first layer."""
    both = []
    for weights in ("resident", "streamed"):
        optimizer, params = gpu(init_params()["layers"], weights=weights)
        layers = [superoffload.jax.offloaded(jax_model.layer_fn, optimizer, str(index)) for index in range(LAYERS)]

        def loss(params, x, layers=layers):
            for layer, own in zip(layers, params, strict=True):
                x = layer(own, x)
            return jnp.square(x).mean()

        gradients = jax.jit(jax.grad(loss))(params, jnp.ones((3, jax_model.WIDTH)))
        params, report = optimizer.finish(optimizer.remaining(gradients), params=params)
        assert report.committed_steps == 1
        assert streamed({"layers": params}) == [weights == "streamed"] * LAYERS
        both.append(optimizer.state_tensors())
    assert same_bits(*both)


def test_on_the_cpu_nothing_streams(build):  # noqa: F811
    optimizer, params = build(weights="streamed")
    assert streamed(params) == [False] * LAYERS


def test_a_program_for_a_gpu_reads_each_layer_after_the_one_before(gpu):  # noqa: F811
    """In forward, and once more in backward, where each read takes what comes of the call that hands over above it."""
    optimizer, params = gpu(weights="streamed")
    ffi._register()
    with pytest.MonkeyPatch.context() as patch:
        fake_jax_gpu.uninstall(patch)
        program = jax_model.offloaded_backward(optimizer).trace(params, jax_model.batches(1)[0])
        text = program.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @superoffload_(\w+)\((.*?)\).*?parameters = dense<\[?([\d, ]+)\]?>", text)
    names = [leaf.name for leaf in optimizer.hosted_tree.hosted]
    seen = [(call, names[int(parameters.split(",")[0])].rsplit(".", 1)[0]) for call, _, parameters in calls]
    layers = [f"layers.{index}" for index in range(LAYERS)]
    backward = [(call, layer) for layer in reversed(layers) for call in ("read", "hand_over")]
    assert seen == [("read", layer) for layer in layers] + backward
    assert all(operands for _, operands, _ in calls), "a read comes after something"
    assert text.count("has_side_effect = true") == LAYERS
