"""superoffload.jax with parameters on a GPU, which is a fake one: every bit is that of a trainer on the CPU."""

import contextlib
import gc
import re

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.conftest import Daemon
from tests.support import fake_jax_gpu, jax_model
from tests.support.jax_model import LAYERS, init_params, same_bits

import superoffload.jax
from superoffload import Error
from superoffload._core import optimizers
from superoffload.jax import GpuOptions, VerdictKind, cuda, ffi

STEPS = 4
RATE = 1e-2


@contextlib.contextmanager
def on_gpu():
    with pytest.MonkeyPatch.context() as patch:
        fake_jax_gpu.install(patch)
        yield


@pytest.fixture(scope="module")
def daemon():
    """On the fake GPU's machine."""
    with on_gpu():
        started = Daemon("--metrics_address=off")
    yield started
    assert started.stop() == 0, started.log


@pytest.fixture
def build(daemon):
    """Builds optimizers, which are closed at the end."""
    built = []

    def build(params=None, **options):
        options = {"max_norm": 0.3, "bucket_bytes": 4096, "endpoint": daemon.endpoint} | options
        optimizer = superoffload.jax.adamw(RATE, **options)
        built.append(optimizer)
        return optimizer, optimizer.init(init_params() if params is None else params)

    yield build
    for optimizer in built:
        optimizer.close()


@pytest.fixture
def gpu(build):
    with on_gpu():
        probe = superoffload.jax.adamw(RATE)
        try:
            probe.init({"w": jnp.ones(8)})
        except Error as error:
            if error.code == grpc.StatusCode.UNIMPLEMENTED:
                pytest.skip(f"built without nvcc or jaxlib: {error}")
            raise
        probe.close()
        yield build


def trained(build, train, dtype=jnp.float32, **options):
    """Parameters and state."""
    optimizer, params = build(init_params(dtype), **options)
    params, _ = train(optimizer, params, STEPS)
    return params, optimizer.state_tensors()


@pytest.fixture(scope="module")
def expected(daemon):
    """Of training on the CPU."""
    results = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        optimizer = superoffload.jax.adamw(RATE, max_norm=0.3, bucket_bytes=4096, endpoint=daemon.endpoint)
        params, _ = jax_model.train_plain(optimizer, optimizer.init(init_params(dtype)), STEPS)
        results[dtype] = params, optimizer.state_tensors()
        optimizer.close()
    return results


OPTIONS = [
    None,
    GpuOptions(resident_buckets=3, resident_steps=1),
    GpuOptions(resident_buckets=3),
    GpuOptions(resident_buckets=2, gradient_slots=1),
    GpuOptions(gradient_slots="in_place"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize(
    ("train", "dtype"),
    [(jax_model.train_plain, jnp.bfloat16), (jax_model.train_overlapped, jnp.float32)],
    ids=["plain", "overlapped"],
)
def test_training_has_the_bits_of_training_on_the_cpu(gpu, expected, train, dtype, options):
    assert same_bits(trained(gpu, train, dtype, gpu=options), expected[dtype])


def test_the_options_are_honoured(gpu):
    def made(**options):
        optimizer, params = gpu(gpu=GpuOptions(**options))
        optimizer.push_params(params)
        attachment = optimizer._attachment
        return attachment.resident_buckets, attachment.report.gradient_slots, attachment.optimizer.layout

    resident, slots, layout = made()
    assert (resident, slots, layout.in_place) == (0, 2, False)
    resident, slots, layout = made(resident_buckets=2, resident_steps=5, gradient_slots=1)
    assert (resident, slots) == (2, 1)
    assert [bucket.log_slots for bucket in layout.buckets[-3:]] == [0, 6, 6]
    resident, slots, layout = made(gradient_slots="in_place")
    assert (resident, slots, layout.in_place) == (0, 1, True)


@pytest.mark.parametrize("fitting", [1, 0])
def test_gradients_have_the_room_that_the_daemon_has_memory_for(gpu, expected, monkeypatch, fitting):
    """``fitting``: slots; none: the one that parameters are published into."""
    create = optimizers.create

    def create_if_it_fits(connection, request):
        if not request.in_place and request.gradient_slots > fitting:
            raise Error(grpc.StatusCode.RESOURCE_EXHAUSTED, "the budget is used up")
        return create(connection, request)

    monkeypatch.setattr(optimizers, "create", create_if_it_fits)
    optimizer, params = gpu()
    assert (optimizer._attachment.report.gradient_slots, optimizer._attachment.report.in_place) == (1, fitting == 0)
    params, _ = jax_model.train_plain(optimizer, params, STEPS)
    assert same_bits((params, optimizer.state_tensors()), expected[jnp.float32])
    for options in ({"gpu": GpuOptions(gradient_slots=2)}, {"weights": "streamed"}):
        if fitting == 0:
            with pytest.raises(Error, match="the budget is used up"):
                gpu(**options)


def test_options_that_cannot_be_are_refused(gpu):
    with pytest.raises(ValueError, match="resident_buckets is -1 but must be 0 or more"):
        GpuOptions(resident_buckets=-1)
    with pytest.raises(ValueError, match="gradient_slots is 3 but must be 'auto', 1, 2 or 'in_place'"):
        GpuOptions(gradient_slots=3)
    with pytest.raises(ValueError, match="resident_steps is 32 but must be 1 to 31"):
        GpuOptions(resident_steps=32)
    with pytest.raises(Error, match=r"100 resident buckets, but there are \d+ \[INVALID_ARGUMENT"):
        gpu(gpu=GpuOptions(resident_buckets=100, resident_steps=1))
    with pytest.raises(Error, match="weights do not stream with resident_buckets.*leave one of the two out"):
        gpu(weights="streamed", gpu=GpuOptions(resident_buckets=1))


def test_scanned_layers_hand_over_slices_of_stacked_parameters(gpu):
    (overlapped, report), (plain, _) = (jax_model.train_scanned(gpu, way, STEPS) for way in (True, False))
    assert report.committed_steps == STEPS
    assert same_bits(overlapped, plain)


def gradients_of(steps, skipped):
    """By step, stacked; those of one step are not finite."""

    def draw(leaf):
        values = np.random.default_rng(leaf.size).normal(0, 0.1, (steps, *leaf.shape)).astype(leaf.dtype)
        values[skipped].flat[0] = np.inf
        return jnp.asarray(values)

    return jax.tree.map(draw, init_params())


@pytest.mark.parametrize("options", OPTIONS[:3], ids=repr)
def test_steps_inside_of_jit_have_the_bits_of_steps_outside_and_on_the_cpu(gpu, daemon, options):
    """In a scan, with a schedule that the program computes, and a step that is skipped."""
    rate = lambda count: 1e-2 / (1.0 + count)  # noqa: E731
    given = gradients_of(STEPS, skipped=2)
    common = {"max_norm": 3.0, "bucket_bytes": 4096, "endpoint": daemon.endpoint, "gpu": options}
    build = lambda: superoffload.jax.adamw(rate, **common)  # noqa: E731
    with contextlib.ExitStack() as ending:
        inside, outside = (ending.enter_context(contextlib.closing(build())) for _ in range(2))
        params, reports = jax_model.scan_steps(inside, given, inside.init(init_params()))
        others = outside.init(init_params())
        for step in range(STEPS):
            own = jax.tree.map(lambda leaf, step=step: leaf[step], given)
            others, report = outside.step(own)
        assert same_bits(params, others)
        assert reports.kind.tolist() == [VerdictKind.CLIP] * 2 + [VerdictKind.SKIP_NON_FINITE] + [VerdictKind.CLIP]
        assert reports.committed_steps.tolist() == [1, 2, 2, 3]
        assert reports.global_norm[-1] == np.float32(report.global_norm)
        assert inside.last_result == report and inside.skipped_steps == outside.skipped_steps
        assert same_bits(*(optimizer.step(params)[0] for optimizer in (inside, outside)))  # it goes on outside
        assert same_bits(*(optimizer.state_tensors() for optimizer in (inside, outside)))
    with pytest.MonkeyPatch.context() as patch:
        fake_jax_gpu.uninstall(patch)
        with contextlib.closing(build()) as on_cpu:
            expected, _ = jax_model.scan_steps(on_cpu, given, on_cpu.init(init_params()))
            assert on_cpu.hosted_tree.gpu is None
    assert same_bits(params, expected)


def test_a_step_inside_of_jit_takes_no_memory_for_gradients(gpu, monkeypatch):
    """XLA's are packed from where they are."""
    monkeypatch.setenv("FAKE_CUDA_REGISTER_COST", "0")  # page tables of the step's pinned memory are another matter
    optimizer, params = gpu()
    gc.collect()  # what tests before have left goes at any time
    before = fake_jax_gpu.used_bytes()
    whole_step = jax.jit(lambda params: optimizer.step(jax.tree.map(lambda leaf: 2 * leaf, params)), donate_argnums=0)
    after, _ = jax.block_until_ready(whole_step(params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params)) and not after["head"].is_deleted()
    assert fake_jax_gpu.used_bytes() == before


def test_a_parameter_without_a_gradient_and_a_skipped_step_leave_parameters_alone(gpu):
    optimizer, params = gpu({"a": jnp.ones(2000), "b": jnp.ones(3)})
    after, report = optimizer.step({"a": jnp.ones(2000), "b": None})
    assert report.kind == VerdictKind.CLIP
    assert same_bits(after["b"], params["b"]) and not same_bits(after["a"], params["a"])
    skipped, report = optimizer.step({"a": jnp.full(2000, jnp.inf), "b": jnp.ones(3)})
    assert report.kind == VerdictKind.SKIP_NON_FINITE and optimizer.skipped_steps[VerdictKind.SKIP_NON_FINITE] == 1
    assert same_bits(skipped, after)
    assert same_bits(params, {"a": jnp.ones(2000), "b": jnp.ones(3)})  # what a trainer keeps does not change


def test_changed_parameters_are_an_error_and_equal_ones_are_taken(gpu, expected):
    """Also while the daemon has gradients of the step already."""
    optimizer, params = gpu(speculation="always")
    backward = jax_model.offloaded_backward(optimizer)
    for number, batch in enumerate(jax_model.batches(STEPS)):
        if number == 2:
            changed = {**params, "head": params["head"] + 1}
            with pytest.raises(Error, match="parameter head was changed.*push_params"):
                optimizer.finish(backward(params, batch)[1], params=changed)
        rest = backward(params, batch)[1]
        params, _ = optimizer.finish(rest, params=jax.tree.map(jnp.copy, params) if number % 2 else params)
    assert same_bits((params, optimizer.state_tensors()), expected[jnp.float32])


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_state_leaves_and_comes_back(gpu, tmp_path, options):
    """By a checkpoint, by another trainer under the same name, and by parameters of the trainer's own."""
    name = f"kept{OPTIONS.index(options)}"
    optimizer, params = gpu(name=name, gpu=options)
    gradients = jax.tree.map(jnp.ones_like, params)
    first, _ = optimizer.step(gradients)
    handle = optimizer.save(tmp_path / "checkpoint")
    second, _ = optimizer.step(gradients)
    assert same_bits(optimizer.pull_params(), second)
    assert same_bits(optimizer.restore(handle), first)
    assert same_bits(optimizer.step(gradients)[0], second)
    optimizer.close()
    other, found = gpu(name=name, sync="pull_params", gpu=options)
    assert same_bits(found, second)
    other.push_params(params)
    assert same_bits(other.pull_params(), params)
    assert not same_bits(other.step(gradients)[0], params)


def test_gpu_memory_is_given_back_at_the_end(gpu):
    gc.collect()  # what tests before have left goes at any time
    before = fake_jax_gpu.used_bytes()
    optimizer, params = gpu()
    jax_model.train_overlapped(optimizer, params, 1)
    assert fake_jax_gpu.used_bytes() > before
    optimizer.close()
    assert fake_jax_gpu.used_bytes() == before


def test_after_an_error_no_step_is_open(gpu):
    optimizer, params = gpu()
    backward = jax_model.offloaded_backward(optimizer)
    batch = jax_model.batches(1)[0]
    backward(params, batch)
    with pytest.raises(Exception, match="came twice in one step"):
        jax.block_until_ready(backward(params, batch))
    with pytest.raises(Error, match="came twice in one step") as caught:
        optimizer.finish()
    assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(Error, match="no gradient of embedding"):
        optimizer.finish()
    _, rest = backward(params, batch)
    optimizer.abandon()
    _, rest = backward(params, batch)
    assert optimizer.finish(rest)[1].committed_steps == 1


def test_what_a_gpu_cannot_do_is_refused_with_the_remedy(gpu, monkeypatch):
    monkeypatch.setattr(cuda, "is_on_gpu", lambda sharding: sharding.memory_kind == "pinned_host")
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    mixed = {"a": jnp.ones(3), "b": jax.device_put(jnp.ones(3), host)}  # to Space.Host JAX 0.10.0 would not move it
    with pytest.raises(Error, match="parameters a and b are on different devices") as caught:
        gpu(mixed)
    assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED


def test_a_program_for_a_gpu_has_the_calls_in_the_order_of_backward(build, monkeypatch):
    """Lowered where there is no GPU: each layer's call takes what comes out of the call of the layer above."""
    optimizer, params = build()
    monkeypatch.setattr(optimizer.hosted_tree, "gpu", jax.devices()[0])  # whose parameters are not compared
    ffi._register()
    program = jax_model.offloaded_backward(optimizer).trace(params, jax_model.batches(1)[0])
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @superoffload_hand_over\(.*?parameters = dense<\[?([\d, ]+)\]?>", text)
    names = [leaf.name for leaf in optimizer.hosted_tree.hosted]
    layers = [names[int(call.split(",")[0])].rsplit(".", 1)[0] for call in calls]
    assert layers == [f"layers.{index}" for index in reversed(range(LAYERS))]
    assert text.count("has_side_effect = true") == LAYERS and "whole = 1" in text


def test_a_program_for_a_gpu_steps_once_after_its_count_in_the_memory_of_the_gradients(build):
    optimizer, params = build()
    ffi._register()
    text = jax.jit(optimizer.step).trace(params).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"(%\d+)(?::\d+)? = stablehlo.custom_call @superoffload_(\w+)\(([^)]*)\) (.*)", text)
    assert [name for _, name, _, _ in calls] == ["count", "step"]
    assert calls[1][2].split(", ")[0] == calls[0][0]
    leaves = len(jax.tree.leaves(params))
    for _, name, operands, rest in calls:
        assert "has_side_effect = true" in rest
        aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", rest)
        expected = [(2 + leaf, 3 + leaf) for leaf in range(leaves)] if name == "step" else []
        assert [(int(result), int(operand)) for result, operand in aliases] == expected
        assert len(operands.split(", ")) == (3 + leaves if name == "step" else 1)
