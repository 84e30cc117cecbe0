"""Trains a small Flax NNX model on text, with the daemon's AdamW.

The plain way takes one changed line of a loop with Optax. With --overlapped the gradients of each block leave for the
daemon while the backward of the blocks below it still runs; both ways give the same parameters.

    pip install superoffload[jax] flax
    python client/examples/train_flax.py --steps 100 --overlapped
"""

import argparse
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import superoffload.jax

VOCABULARY, WIDTH, BLOCKS, LENGTH, BATCH = 256, 128, 3, 32, 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.past = nnx.Linear(2 * WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.norm(x)
        mean = jnp.cumsum(x, 1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(nnx.gelu(self.past(jnp.concatenate([x, mean], -1))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--overlapped", action="store_true")
    options = arguments.parse_args()

    model = Model(nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    optimizer = superoffload.jax.adamw(1e-3, weight_decay=0.01, max_norm=1.0)
    params = optimizer.init(params)

    def apply_block(own, x):
        return nnx.merge(nnx.graphdef(model.blocks[0]), own)(x)

    blocks = [apply_block] * BLOCKS
    if options.overlapped:
        blocks = [superoffload.jax.offloaded(apply_block, optimizer, f"blocks.{index}") for index in range(BLOCKS)]

    def loss_fn(params, tokens):
        whole = nnx.merge(graph, params)
        x = whole.embedding(tokens[:, :-1])
        for index, block in enumerate(blocks):
            x = block(params["blocks"][index], x)
        logits = jax.nn.log_softmax(whole.head(x))
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    @jax.jit
    def backward(params, tokens):
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        return loss, optimizer.remaining(gradients)  # all of them, where no block is offloaded

    text = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
    random = np.random.default_rng(0)
    for step in range(1, options.steps + 1):
        places = random.integers(0, len(text) - LENGTH - 1, BATCH)
        tokens = jnp.asarray(np.stack([text[place : place + LENGTH + 1] for place in places]), jnp.int32)
        loss, gradients = backward(params, tokens)
        params, report = optimizer.finish(gradients, params=params)
        if step % 10 == 0 or step == options.steps:
            print(f"step {step}: loss {loss:.3f}, {report.kind.name.lower()}, gradient norm {report.global_norm:.2f}")
    nnx.update(model, params)
    optimizer.close()


if __name__ == "__main__":
    main()
