"""What JAX loops put around an optimizer: Optax's and Flax's containers, schedules in Python, Orbax."""

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

RATE = 1e-2


def tree():
    return {"a": jnp.ones((300,)), "b": {"w": jnp.full((8, 4), -1.0)}}


def gradients(step):
    random = np.random.default_rng(step)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), tree())


def trained(steps, rate=RATE, **options):
    optimizer = superoffload.jax.adamw(rate, **options)
    params = optimizer.init(tree())
    for step in range(steps):
        params, _ = optimizer.step(gradients(step))
    optimizer.close()
    return params


def in_chain(optimizer):
    import optax

    optax.chain(optax.clip(1.0), optimizer).init(tree())


def in_multi_steps(optimizer):
    import optax

    optax.MultiSteps(optimizer, 2).init(tree())


def in_train_state(optimizer):
    from flax.training.train_state import TrainState

    TrainState.create(apply_fn=None, params=tree(), tx=optimizer)


def in_nnx_optimizer(optimizer):
    from flax import nnx

    nnx.Optimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), optimizer, wrt=nnx.Param)


@pytest.mark.parametrize(
    "use",
    [
        in_chain,
        in_multi_steps,
        in_train_state,
        in_nnx_optimizer,
        lambda optimizer: optimizer.update(gradients(0), None, tree()),
    ],
    ids=["chain", "MultiSteps", "TrainState", "nnx.Optimizer", "update"],
)
def test_what_takes_it_for_a_transformation_says_what_to_do(use):
    optimizer = superoffload.jax.adamw(RATE)
    with pytest.raises(Error, match=r"params, report = optimizer.step\(gradients, params=params\) in place") as caught:
        use(optimizer)
    assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED


def test_transformations_and_containers_around_a_step():
    """The lines of superoffload/jax/README.md."""
    import optax
    from flax.training.train_state import TrainState

    chain = optax.chain(optax.clip(0.5), optax.scale(2.0))
    optimizer = superoffload.jax.adamw(RATE)
    params = optimizer.init(tree())
    state = TrainState.create(apply_fn=None, params=params, tx=chain)
    for step in range(3):
        updates, chain_state = chain.update(gradients(step), state.opt_state, state.params)
        params, _ = optimizer.step(updates, params=state.params)
        state = state.replace(step=state.step + 1, params=params, opt_state=chain_state)
    assert (optimizer.committed_steps, state.step) == (3, 3)
    optimizer.close()

    theirs = optax.chain(chain, optax.adamw(RATE))
    expected, expected_state = tree(), theirs.init(tree())
    for step in range(3):
        updates, expected_state = theirs.update(gradients(step), expected_state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda ours, wanted: np.testing.assert_allclose(ours, wanted, rtol=1e-6), state.params, expected)


def test_a_step_of_an_nnx_model():
    """The lines of superoffload/jax/README.md."""
    from flax import nnx

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = superoffload.jax.adamw(RATE)
    optimizer.init(nnx.state(model, nnx.Param))
    gradients = nnx.grad(lambda model: jnp.square(model(jnp.ones((1, 2)))).sum())
    for _ in range(2):
        kernel = model.kernel[...]
        params, _ = optimizer.step(gradients(model), params=nnx.state(model, nnx.Param))
        nnx.update(model, params)
        assert not same_bits(model.kernel[...], kernel)
    model.kernel[...] = model.kernel[...] + 1
    with pytest.raises(Error, match="parameter kernel was changed"):
        optimizer.step(gradients(model), params=nnx.state(model, nnx.Param))
    optimizer.close()


def test_a_schedule_may_branch_in_python():
    rates = {0: 1e-2, 1: 5e-3}
    in_python = trained(4, lambda count: rates[int(count)] if count < 2 else 1e-3)
    assert same_bits(in_python, trained(4, lambda count: jnp.asarray([1e-2, 5e-3, 1e-3, 1e-3])[count]))


def test_a_schedule_may_read_what_the_loop_changes():
    """As a rate that is halved when the loss stays, after steps that have gone out with the old one."""
    rate = [RATE]
    optimizer = superoffload.jax.adamw(lambda count: rate[0])
    params = optimizer.init(tree())
    for step in range(4):
        rate[0] = RATE if step < 2 else RATE / 2
        params, _ = optimizer.step(gradients(step))
    optimizer.close()
    assert same_bits(params, trained(4, lambda count: jnp.where(count < 2, RATE, RATE / 2)))


def test_a_schedule_is_run_once_for_all_groups_when_a_step_is_prepared_and_when_it_ends():
    """Once more is to see what the loop has changed in between; compiled, it is run once for each count."""
    looked, compiled = [], []

    def schedule(count):
        if not isinstance(count, jax.core.Tracer):
            looked.append(int(count))
        else:
            jax.debug.callback(lambda count: compiled.append(int(count)), count)
        return RATE / (1 + count)

    optimizer = superoffload.jax.adamw(schedule, mask=jax.tree.map(lambda leaf: leaf.ndim > 1, tree()))
    optimizer.init(tree())
    assert len(optimizer._groups) == 2
    looked.clear()
    for step in range(3):
        optimizer.step(gradients(step))
    assert looked == [0, 1, 1, 2, 2, 3]
    optimizer.close()
    jax.effects_barrier()
    assert compiled == [0, 1, 2, 3]


def test_a_program_on_more_devices_than_init_had_is_refused_before_it_runs():
    code = """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, jax.numpy as jnp, superoffload.jax
        from superoffload import Error
        from superoffload.jax import offloaded
        optimizer = superoffload.jax.adamw(1e-2)
        params = optimizer.init({"a": jnp.ones(8)})
        layer = jax.jit(jax.grad(offloaded(lambda own, x: (x * own["a"]).sum(), optimizer)))
        for axis in jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit:
            mesh = jax.make_mesh((2,), ("x",), axis_types=(axis,))
            for spec in jax.P("x"), jax.P():
                spread = jax.device_put(params, jax.NamedSharding(mesh, spec))
                for program in jax.jit(optimizer.step), lambda own: layer(own, jnp.ones(8)):
                    try:
                        program(spread)
                    except Error as error:
                        assert "runs on 2 devices, but inside of jit" in str(error), error
                        assert error.code.name == "UNIMPLEMENTED"
                    else:
                        raise AssertionError
        params, report = jax.jit(optimizer.step)(params)
        assert report.committed_steps == 1
        layer(params, jnp.ones(8))
        assert optimizer.finish()[1].committed_steps == 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def composite(checkpoint, directory, handle):
    with checkpoint.CheckpointManager(directory) as manager:
        manager.save(7, args=checkpoint.args.Composite(optimizer=checkpoint.args.JsonSave(handle)))
        manager.wait_until_finished()
        restore = checkpoint.args.Composite(optimizer=checkpoint.args.JsonRestore())
        return manager.restore(7, args=restore)["optimizer"]


def pytree(checkpoint, directory, handle):
    with checkpoint.PyTreeCheckpointer() as saver:
        saver.save(directory, {"epoch": 3, "optimizer": handle})
        return saver.restore(directory)["optimizer"]


@pytest.mark.parametrize("through", [composite, pytree])
def test_orbax_saves_the_handle(tmp_path, through):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    optimizer = superoffload.jax.adamw(RATE)
    optimizer.init(tree())
    params, _ = optimizer.step(gradients(0))
    handle = through(checkpoint, tmp_path / "orbax", optimizer.save(tmp_path / "state"))
    optimizer.step(gradients(1))
    assert same_bits(optimizer.restore(handle), params)
    optimizer.close()


def test_orbax_refuses_the_handle_as_a_standard_item(tmp_path):
    """Which is why superoffload/jax/README.md names others."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    handle = {"directory": "/a/checkpoint", "committed_steps": 1}
    with checkpoint.StandardCheckpointer() as saver, pytest.raises(ValueError, match="[Uu]nsupported"):
        saver.save(tmp_path / "orbax", handle)
        saver.wait_until_finished()
