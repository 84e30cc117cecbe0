"""One process of a JAX run: python -m tests.support.jax_rank _ RANK RANKS OUT SCENARIO...

Each scenario is a JSON object of arguments of `train`, or "refusals"; OUT gets a list of what it returned for each.
$JAX_COORDINATOR_ADDRESS is where processes meet; with $XLA_FLAGS a process has several devices.
"""

import json
import os
import pickle
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import superoffload.jax
from superoffload.jax import VerdictKind

ROWS, WIDTH, LAYERS = 8, 8, 3


def init_params(dtype):
    """Sharded rows and columns; replicated: fewer rows than processes, uneven rows, and a scalar."""
    random = np.random.default_rng(3)

    def normal(*shape):
        return np.asarray(random.normal(0, 0.3, shape), dtype)

    layers = [{"w": normal(ROWS, WIDTH), "b": normal(WIDTH)} for _ in range(LAYERS)]
    return {"layers": layers, "columns": normal(WIDTH, ROWS), "uneven": normal(5, WIDTH), "scale": normal()}


def specs(replicated):
    p = jax.P
    sharded, columns = (p(), p()) if replicated else (p("x"), p(None, "x"))
    layers = [{"w": sharded, "b": sharded} for _ in range(LAYERS)]
    return {"layers": layers, "columns": columns, "uneven": p(), "scale": p()}


def loss_fn(params, x):
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    x = x * params["scale"] + (x @ params["columns"]) @ jnp.ones((ROWS, WIDTH), x.dtype)
    return jnp.square(x[:, None, :] - params["uneven"][None]).astype(jnp.float32).mean()


def sharded_backward(mesh, layout, layers):
    """Gradients of FSDP in jax.shard_map: weights gathered, gradients scattered. ``layers``: of shards."""

    def local_loss(params, x):
        for layer, own in zip(layers, params["layers"], strict=True):
            x = layer(own, x)
        x = x * params["scale"] + (x @ gathered(params["columns"], 1)) @ jnp.ones((ROWS, WIDTH), x.dtype)
        local = jnp.square(x[:, None, :] - params["uneven"][None]).astype(jnp.float32).mean()
        return local / jax.device_count()

    def backward(params, x):
        loss, gradients = jax.value_and_grad(local_loss)(params, x)
        for name in ("uneven", "scale"):
            gradients[name] = jax.lax.psum(gradients[name], "x")
        return jax.lax.psum(loss, "x"), gradients

    spec = jax.P("x")
    return jax.jit(
        jax.shard_map(backward, mesh=mesh, in_specs=(layout, spec), out_specs=(jax.P(), layout), check_vma=False)
    )


def gathered(shard, axis=0):
    return jax.lax.all_gather(shard, "x", axis=axis, tiled=True)


def layer_of_shards(own, x):
    return x + jnp.tanh(x @ gathered(own["w"]) + gathered(own["b"]))


def train(
    *,
    steps=5,
    dtype="float32",
    way="jit",
    replicated=False,
    nan_at=None,
    die_at=None,
    save=None,
    restore_at=None,
    restore_from=None,
    refuses_at=None,
    **options,
):
    """Trains to ``steps``, wherever it begins.

    ``way``: "jit", "shard_map", or "overlapped", which is in shard_map as well. ``die_at``: rank, step, and where in it
    the process kills itself. ``save``: a directory, which is saved to at step ``restore_at`` and restored from one step
    later, unless ``restore_from`` says from where each process does. ``refuses_at``: a step that process 1 cannot end
    at first.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    layout = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs(replicated))
    given = jax.tree.map(
        lambda leaf, place: jax.make_array_from_callback(leaf.shape, place, lambda index: leaf[index]),
        init_params(jnp.dtype(dtype)),
        layout,
    )
    optimizer = superoffload.jax.adamw(1e-2, max_norm=0.5, **options)
    params = optimizer.init(given)
    begun = optimizer.committed_steps
    layers = [layer_of_shards] * LAYERS
    if way == "overlapped":
        layers = [superoffload.jax.offloaded(layer_of_shards, optimizer, f"layers.{i}") for i in range(LAYERS)]
    if way == "jit":
        backward = jax.jit(jax.value_and_grad(loss_fn))  # XLA shards as it likes
    else:
        backward = sharded_backward(mesh, specs(replicated), layers)
    whole_norm = jax.jit(lambda tree: optax.global_norm(jax.tree.map(jnp.float32, tree)))
    norms, whole_norms, refusals, skips = [], [], [], 0
    while (step := optimizer.committed_steps) < steps:
        random = np.random.default_rng(step)
        whole = np.asarray(random.normal(size=(4, WIDTH)), jnp.dtype(dtype))
        if nan_at == step and not skips:
            whole[-1] = np.nan  # of the last device's batch
        batch = jax.make_array_from_callback(
            whole.shape, jax.NamedSharding(mesh, jax.P("x")), lambda index, whole=whole: whole[index]
        )
        _, gradients = backward(params, batch)
        if die_at is not None and die_at[:2] == [jax.process_index(), step]:
            die(die_at[2], optimizer)
        if way != "overlapped":  # whose gradients are with the daemon
            whole_norms.append(float(whole_norm(gradients)))
        if refuses_at == step:
            refusals += two_refusals(optimizer, gradients, params)
        params, report = optimizer.finish(gradients, params=params)
        norms.append(report.global_norm)
        skips += report.kind == VerdictKind.SKIP_NON_FINITE
        if save is not None and optimizer.committed_steps == restore_at:
            handle = optimizer.save(save)
            save = None
            optimizer.step(gradients)
            params = optimizer.restore(handle if restore_from is None else restore_from[jax.process_index()])
    whole = jax.jit(lambda tree: tree, out_shardings=jax.NamedSharding(mesh, jax.P()))(params)
    optimizer.close()
    return {
        "weights": {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(whole)},
        "norms": norms,
        "whole_norms": whole_norms,
        "skips": skips,
        "refusals": refusals,
        "begun": begun,
        "kept": all(
            leaf.sharding.is_equivalent_to(place, leaf.ndim)
            for leaf, place in zip(jax.tree.leaves(params), jax.tree.leaves(layout), strict=True)
        ),
    }


def two_refusals(optimizer, gradients, params):
    """What steps say for which process 1 has no gradients, or has changed parameters."""

    def doubled(leaf):
        shards = [2 * shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    right = gradients, params
    for wrong in ((None, params), (gradients, jax.tree.map(doubled, params))):
        own, present = right if jax.process_index() == 0 else wrong
        try:
            optimizer.finish(own, params=present)
        except superoffload.Error as error:
            yield str(error)


def refusals():
    """What init() and an offloaded layer say of arrays that cannot be hosted, or handed over inside of jit."""
    devices = np.asarray(jax.devices())
    mesh = jax.sharding.Mesh(devices, ("x",))
    mixed = jax.sharding.Mesh(devices.reshape(jax.process_count(), -1).T.reshape(-1), ("x",))

    def array(mesh, spec, shape):
        return jax.make_array_from_callback(
            shape, jax.NamedSharding(mesh, spec), lambda index: np.ones(shape, np.float32)[index]
        )

    for leaf in (jnp.ones(8), array(mesh, jax.P(), ()), array(mixed, jax.P("x"), (8,))):
        try:
            superoffload.jax.adamw(1e-2).init({"w": leaf})
        except superoffload.Error as error:
            yield str(error)
    optimizer = superoffload.jax.adamw(1e-2)
    params = optimizer.init({"w": array(mesh, jax.P("x"), (8,)), "r": array(mesh, jax.P(), (8,))})
    for name in params:
        try:
            superoffload.jax.offloaded(lambda own, x: x * own, optimizer, name)(params[name], 1.0)
        except superoffload.Error as error:
            yield str(error)
    optimizer.close()
    superoffload.jax.cuda.is_on_gpu = lambda sharding: True
    try:
        superoffload.jax.adamw(1e-2).init(params)
    except superoffload.Error as error:
        yield str(error)


def die(where, optimizer):
    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "before":
        kill()
    elif where == "prepared":  # and has not contributed
        optimizer._group.gather_doubles = kill
    elif where == "gathered":
        optimizer._attachment.end_prepared_step = kill


def main():
    _, rank, ranks, out, *scenarios = sys.argv[1:]
    jax.distributed.initialize(num_processes=int(ranks), process_id=int(rank))
    asked = [json.loads(scenario) for scenario in scenarios]
    results = [list(refusals()) if scenario == "refusals" else train(**scenario) for scenario in asked]
    with open(out, "wb") as file:
        pickle.dump(results, file)


if __name__ == "__main__":
    main()
