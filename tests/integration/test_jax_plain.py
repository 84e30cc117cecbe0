"""superoffload.jax outside of programs and inside of them: steps, groups, reports, state, and what it refuses."""

import pickle
import subprocess
import sys
import textwrap

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.jax_model import same_bits

import superoffload.jax
from superoffload import Error
from superoffload.jax import VerdictKind


def tree(value=1.0, dtype=jnp.float32):
    return {"a": jnp.full((300,), value, dtype), "b": {"w": jnp.full((8, 4), -value, dtype)}}


def gradients(step=0, dtype=jnp.float32):
    random = np.random.default_rng(step)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), dtype), tree())


@pytest.fixture
def build(request):
    built = []

    def make(*arguments, params=None, make=superoffload.jax.adamw, **options):
        optimizer = make(*(arguments or (1e-2,)), **options)
        built.append(optimizer)
        return optimizer, optimizer.init(tree() if params is None else params)

    yield make
    for optimizer in built:
        optimizer.close()


@pytest.fixture(autouse=True, scope="module")
def own_daemon():
    """A private daemon for all tests: the last optimizer of a process does not end it."""
    optimizer = superoffload.jax.adamw(1e-2)
    optimizer.init(tree())
    yield
    optimizer.close()


def test_new_parameters_come_and_old_ones_stay(build):
    optimizer, params = build()
    after, report = optimizer.step(gradients())
    assert isinstance(after["a"], jax.Array) and after["b"]["w"].shape == (8, 4)
    assert same_bits(params, tree())
    assert (report.kind, report.step, report.committed_steps) == (VerdictKind.COMMIT, 1, 1)
    np.testing.assert_allclose(report.global_norm, np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients()))))
    kept = jax.tree.map(np.array, after)
    optimizer.step(gradients(1))
    assert same_bits(after, kept)  # memory of its own


def test_steps_inside_of_jit_have_the_bits_of_steps_outside(build):
    def schedule(count):
        return 1e-2 / (1.0 + count)

    outside, params = build(schedule, max_norm=3.0)
    for step in range(5):
        params, report = outside.step(gradients(step))
    inside, in_jit = build(schedule, max_norm=3.0)
    all_gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(gradients, range(5)))

    @jax.jit
    def run(params):
        return jax.lax.scan(lambda params, own: inside.step(own), params, all_gradients)

    in_jit, reports = run(in_jit)
    assert same_bits(params, in_jit)
    assert reports.committed_steps.tolist() == [1, 2, 3, 4, 5]
    assert reports.kind.tolist() == [VerdictKind.CLIP] * 5
    assert inside.last_result == report
    assert inside.committed_steps == 5
    assert same_bits(*(optimizer.step(gradients(7))[0] for optimizer in (outside, inside)))


def test_inside_of_jit_absent_and_frozen_leaves_stay(build):
    params = {**tree(), "c": jnp.ones(3), "step": 7}
    optimizer, _ = build(params=params, trainable={"a": True, "b": True, "c": True, "step": False})

    @jax.jit
    def run(params):
        return optimizer.step({**gradients(), "c": None, "step": None}, params=params)

    after, _ = run(params)
    assert int(after["step"]) == 7
    assert same_bits(after["c"], params["c"])
    assert not same_bits(after["a"], params["a"])
    with pytest.raises(Error, match="some leaves are frozen"):
        jax.jit(lambda: optimizer.step({**gradients(), "c": jnp.ones(3), "step": jnp.ones(())}))()


def test_a_parameter_without_a_gradient_is_left_alone(build):
    optimizer, params = build(weight_decay=0.1)
    after, _ = optimizer.step({**gradients(), "a": None})
    assert same_bits(after["a"], params["a"])
    assert not same_bits(after["b"], params["b"])


def test_groups_by_labels_and_the_mask_of_the_decay(build):
    labels = {"a": "slow", "b": "fast"}
    groups = {"slow": {"learning_rate": 0.0}, "fast": {"learning_rate": lambda count: 0.1 * (count + 1)}}
    optimizer, params = build(labels=lambda params: labels, groups=groups, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    after, _ = optimizer.step(zeros)
    assert same_bits(after["a"], params["a"])
    np.testing.assert_allclose(after["b"]["w"], -0.95)
    after, _ = optimizer.step(zeros)
    np.testing.assert_allclose(after["b"]["w"], -0.95 * 0.9, rtol=1e-6)

    masked, params = build(1.0, weight_decay=0.5, mask={"a": True, "b": False})
    after, _ = masked.step(zeros)
    np.testing.assert_array_equal(after["a"], 0.5)
    assert same_bits(after["b"], params["b"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_leaves_have_fp32_masters(build, dtype):
    optimizer, params = build(1e-4, params=tree(dtype=dtype), weight_decay=0.0)
    for _ in range(3):
        params, _ = optimizer.step(jax.tree.map(jnp.ones_like, params))
    assert params["a"].dtype == dtype
    master = optimizer.state_tensors()["a"]["master"]
    np.testing.assert_allclose(master, 1 - 3e-4, rtol=1e-6)
    assert same_bits(params["a"], jnp.asarray(master).astype(dtype))


def test_infinite_gradients_skip_the_step_and_are_counted(build):
    optimizer, params = build()
    bad = {**gradients(), "a": jnp.full((300,), jnp.nan)}
    after, report = optimizer.step(bad)
    assert report.kind == VerdictKind.SKIP_NON_FINITE
    assert same_bits(after, params)
    _, report = jax.jit(optimizer.step)(bad)
    assert report.kind == VerdictKind.SKIP_NON_FINITE
    assert optimizer.skipped_steps[VerdictKind.SKIP_NON_FINITE] == 2
    assert optimizer.committed_steps == 0


def test_a_loss_scale_is_taken_out_of_the_gradients(build):
    plain, _ = build(max_norm=2.0)
    scaled, _ = build(max_norm=2.0)
    wanted, _ = plain.step(gradients())
    after, report = scaled.step(jax.tree.map(lambda leaf: 1024 * leaf, gradients()), gradient_scale=1 / 1024)
    assert same_bits(after, wanted)
    assert report.kind == VerdictKind.CLIP


def test_other_algorithms(build):
    lion, params = build(0.5, make=superoffload.jax.lion, weight_decay=0.0)
    after, _ = lion.step(jax.tree.map(jnp.ones_like, params))
    np.testing.assert_array_equal(after["a"], 0.5)
    adam, _ = build(0.5, make=superoffload.jax.adam)
    after, _ = adam.step(jax.tree.map(jnp.ones_like, params))
    np.testing.assert_allclose(after["a"], 0.5, rtol=1e-6)


def test_saved_state_restores_in_a_fresh_process(build, tmp_path):
    optimizer, params = build()
    params, _ = optimizer.step(gradients(0))
    handle = optimizer.save(tmp_path / "state")
    (tmp_path / "handle").write_bytes(pickle.dumps(handle))
    expected, _ = optimizer.step(gradients(1))
    restored = optimizer.restore(handle)
    assert same_bits(restored, params)
    assert optimizer.committed_steps == 1
    assert same_bits(optimizer.step(gradients(1))[0], expected)
    np.savez(tmp_path / "expected", a=expected["a"], w=expected["b"]["w"])
    code = """
        import pickle, sys, numpy, superoffload.jax
        from tests.integration.test_jax_plain import gradients, same_bits, tree
        optimizer = superoffload.jax.adamw(1e-2, restore=pickle.load(open(sys.argv[1] + "/handle", "rb"))["directory"])
        optimizer.init(tree(5.0))
        params, report = optimizer.step(gradients(1))
        expected = numpy.load(sys.argv[1] + "/expected.npz")
        assert same_bits((params["a"], params["b"]["w"]), (expected["a"], expected["w"]))
        assert report.committed_steps == 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=True)


def test_a_name_is_attached_to_again(build, recwarn):
    first, _ = build(name="jax-run")
    params, _ = first.step(gradients())
    first.close()
    again, same = build(name="jax-run", params=params)
    assert again.committed_steps == 1 and same_bits(same, params)
    again.close()
    with pytest.raises(Error, match="push_params.*pull_params") as caught:
        build(name="jax-run", params=tree(3.0))
    assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
    pulled, found = build(name="jax-run", params=tree(3.0), sync="pull_params")
    assert same_bits(found, params)
    pulled.close()
    with pytest.raises(Error, match="made for another model"):
        build(name="jax-run", params={"a": jnp.ones(3)})
    with pytest.raises(Error, match="is adamw, but this is lion"):
        build(name="jax-run", params=params, make=superoffload.jax.lion)


def test_push_and_pull(build):
    optimizer, params = build()
    optimizer.step(gradients())
    optimizer.push_params(tree(2.0))
    assert same_bits(optimizer.pull_params(), tree(2.0))
    np.testing.assert_array_equal(optimizer.state_tensors()["a"]["master"], 2.0)


@pytest.mark.parametrize(
    ("params", "options", "sentence"),
    [
        ({"x": jnp.arange(3)}, {}, "leaf x is int32.*trainable="),
        ({"x": np.ones(3)}, {}, "leaf x is float64.*cast it"),
        ({"x": jnp.ones((0, 2))}, {}, "leaf x is float32.0, 2.*that have elements"),
        ({"x": 1.5}, {}, "leaf x is a float"),
        ({"x": jnp.ones(3)}, {"trainable": False}, "nothing to optimize"),
        ({1: jnp.ones(3), "1": jnp.ones(3)}, {}, None),
    ],
    ids=["integers", "float64", "no elements", "a number", "nothing", "keys that do not sort"],
)
def test_leaves_that_cannot_be_hosted_are_named(build, params, options, sentence):
    with pytest.raises(Error if sentence else ValueError, match=sentence):
        build(params=params, **options)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"a": jnp.ones(300)}, "it has no b.w"),
        ({**gradients(), "c": jnp.ones(3)}, "c is new"),
        ({**gradients(), "a": jnp.ones(301)}, r"a is \[301\] in gradients, but was \[300\]"),
    ],
    ids=["a leaf less", "a leaf more", "another shape"],
)
@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit], ids=["outside", "inside"])
def test_a_pytree_that_changed_is_refused(build, own, sentence, wrap):
    optimizer, _ = build()
    with pytest.raises(Error, match=sentence) as caught:
        wrap(optimizer.step)(own)
    assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
    assert optimizer.step(gradients())[1].committed_steps == 1


def test_misuse_is_refused(build):
    optimizer = superoffload.jax.adamw(1e-2)
    with pytest.raises(Error, match="call init"):
        optimizer.step(gradients())
    with pytest.raises(Error, match="init.. outside of jit"):
        jax.jit(optimizer.init)(tree())
    with pytest.raises(ValueError, match="only learning_rate may be one"):
        superoffload.jax.adamw(1e-2, b1=lambda count: 0.9)
    with pytest.raises(ValueError, match="the label c, but groups= has"):
        build(labels={"a": "c", "b": "c"}, groups={"d": {}})
    with pytest.raises(ValueError, match="has rate, but a group may have learning_rate"):
        superoffload.jax.adamw(1e-2, labels={}, groups={"d": {"rate": 1}})
    used, _ = build()
    with pytest.raises(Error, match="init.. was called before"):
        used.init(tree())
    used.close()
    with pytest.raises(Error, match="is closed"):
        used.step(gradients())


def test_two_steps_that_xla_may_swap_are_refused(build):
    optimizer, _ = build()

    @jax.jit
    def run(own):
        first, _ = optimizer.step(own)
        second, _ = optimizer.step(jax.tree.map(lambda leaf: leaf + 1, own))
        return first, second

    try:
        jax.block_until_ready(run(gradients()))
    except Exception as error:
        assert "in another order" in str(error)  # never silently
    assert optimizer.committed_steps in (1, 2)


def test_arrays_of_one_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        Error, match="parameter a is this process's own, but there are 2 processes: make it an array of"
    ):
        superoffload.jax.adamw(1e-2).init(tree())


def test_sharded_arrays_of_one_process_stay_sharded_and_have_the_same_bits(build, tmp_path):
    optimizer, params = build()
    for step in range(2):
        params, _ = optimizer.step(gradients(step))
    np.save(tmp_path / "a", params["a"])
    code = """
        import os, sys
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, jax.numpy as jnp, numpy, superoffload.jax
        from superoffload import Error
        from tests.integration.test_jax_plain import gradients, tree
        mesh = jax.make_mesh((2,), ("x",))
        sharding = jax.NamedSharding(mesh, jax.P("x"))
        optimizer = superoffload.jax.adamw(1e-2)
        params = optimizer.init(jax.device_put(tree(), sharding))
        sharded = jax.jit(jax.shard_map(lambda own: jax.tree.map(lambda leaf: 1.0 * leaf, own), mesh=mesh,
                                        in_specs=jax.P("x"), out_specs=jax.P("x")))
        for step in range(2):
            params, _ = optimizer.step(sharded(jax.device_put(gradients(step), sharding)))
        assert params["a"].sharding == sharding
        assert numpy.array_equal(params["a"], numpy.load(sys.argv[1]))
        layer = superoffload.jax.offloaded(lambda own, x: x * own["a"], optimizer)
        for use in (lambda: jax.jit(optimizer.step)(gradients()), lambda: layer({"a": params["a"]}, 1.0)):
            try:
                use()
            except Error as error:
                assert "a is spread over 2 devices" in str(error) and error.code.name == "UNIMPLEMENTED"
            else:
                raise AssertionError
        superoffload.jax.cuda.is_on_gpu = lambda sharding: True
        try:
            superoffload.jax.adamw(1e-2).init(params)
        except Error as error:
            assert "parameter a is spread over GPUs, but an optimizer hosts" in str(error)
            assert "jax.device_put(params, jax.devices()[0])" in str(error) and error.code.name == "UNIMPLEMENTED"
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "a.npy")], check=True)
