"""Trains a small Equinox model on text, with the daemon's AdamW.

The plain way takes one changed line of a loop with Optax. With --overlapped the gradients of each block leave for the
daemon while the backward of the blocks below it still runs; both ways give the same parameters.

    pip install superoffload[jax] equinox
    python client/examples/train_equinox.py --steps 100 --overlapped
"""

import argparse
import pydoc_data.topics

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import superoffload.jax

VOCABULARY, WIDTH, BLOCKS, LENGTH, BATCH = 256, 128, 3, 32, 16


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(2 * WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=key)

    def __call__(self, x):  # of one text: [LENGTH, WIDTH]
        own = jax.vmap(self.norm)(x)
        mean = jnp.cumsum(own, 0) / jnp.arange(1, len(x) + 1)[:, None]
        return x + jax.vmap(self.mlp)(jnp.concatenate([own, mean], -1))


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        first, last, *keys = jax.random.split(key, BLOCKS + 2)
        self.embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=first)
        self.blocks = [Block(own) for own in keys]
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=last)


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--overlapped", action="store_true")
    options = arguments.parse_args()

    params, static = eqx.partition(Model(jax.random.key(0)), eqx.is_inexact_array)  # the rest are functions and sizes
    optimizer = superoffload.jax.adamw(1e-3, weight_decay=0.01, max_norm=1.0)
    params = optimizer.init(params)

    def apply_block(own, x):  # of a batch: offloaded layers map inside
        return jax.vmap(eqx.combine(own, static.blocks[0]))(x)

    blocks = [apply_block] * BLOCKS
    if options.overlapped:
        blocks = [superoffload.jax.offloaded(apply_block, optimizer, f"blocks.{index}") for index in range(BLOCKS)]

    def loss_fn(params, tokens):
        x = params.embedding.weight[tokens[:, :-1]]
        for block, own in zip(blocks, params.blocks, strict=True):
            x = block(own, x)
        logits = jax.vmap(jax.vmap(eqx.combine(params, static).head))(x)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    @jax.jit
    def backward(params, tokens):
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        return loss, optimizer.remaining(gradients)  # all of them in the plain way

    text = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
    random = np.random.default_rng(0)
    for step in range(1, options.steps + 1):
        places = random.integers(0, len(text) - LENGTH - 1, BATCH)
        tokens = jnp.asarray(np.stack([text[place : place + LENGTH + 1] for place in places]), jnp.int32)
        loss, gradients = backward(params, tokens)
        params, report = optimizer.finish(gradients, params=params)
        if step % 20 == 0 or step == options.steps:
            print(f"step {step}: loss {loss:.3f}, {report.kind.name.lower()}, gradient norm {report.global_norm:.2f}")
    optimizer.close()


if __name__ == "__main__":
    main()
