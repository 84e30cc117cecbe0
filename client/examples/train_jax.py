"""Trains a small transformer in plain JAX on text, with the daemon's AdamW.

The layers are stacked and scanned over, and recomputed in backward. A layer's gradients leave for the daemon while the
backward of the layers below it still runs; finish() has the new parameters.

    pip install superoffload[jax] optax
    python client/examples/train_jax.py --steps 200
"""

import argparse
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import superoffload.jax

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 128, 4, 4, 64, 16


def init_params(key):
    keys = iter(jax.random.split(key, 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32) / np.sqrt(shape[-2])

    return {
        "embedding": normal(VOCABULARY, WIDTH),
        "layers": {
            "attention": normal(LAYERS, WIDTH, 3 * WIDTH),
            "projection": normal(LAYERS, WIDTH, WIDTH),
            "up": normal(LAYERS, WIDTH, 4 * WIDTH),
            "down": normal(LAYERS, 4 * WIDTH, WIDTH),
        },
        "head": normal(WIDTH, VOCABULARY),
    }


def normed(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def layer_fn(params, x):
    batch, length, _ = x.shape
    query, key, value = jnp.split(normed(x) @ params["attention"], 3, -1)
    query, key, value = (part.reshape(batch, length, HEADS, -1) for part in (query, key, value))
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + attended.reshape(batch, length, WIDTH) @ params["projection"]
    return x + jax.nn.gelu(normed(x) @ params["up"]) @ params["down"]


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--save", help="a directory that does not exist, for a checkpoint at the end")
    options = arguments.parse_args()

    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 10, max(options.steps, 11))
    optimizer = superoffload.jax.adamw(schedule, b2=0.95, weight_decay=0.1, max_norm=1.0)
    params = optimizer.init(init_params(jax.random.key(0)))
    layer = superoffload.jax.offloaded(layer_fn, optimizer, "layers")

    def loss_fn(params, tokens):
        @jax.checkpoint
        def body(x, inputs):
            own, index = inputs
            return layer(own, x, index=index), None

        x = params["embedding"][tokens[:, :-1]]
        x, _ = jax.lax.scan(body, x, (params["layers"], jnp.arange(LAYERS)))
        logits = normed(x) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def backward(params, tokens):
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        return loss, optimizer.remaining(gradients)  # those of the embedding and the head

    text = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
    random = np.random.default_rng(0)
    for step in range(1, options.steps + 1):
        places = random.integers(0, len(text) - LENGTH - 1, BATCH)
        tokens = jnp.asarray(np.stack([text[place : place + LENGTH + 1] for place in places]), jnp.int32)
        loss, rest = backward(params, tokens)
        params, report = optimizer.finish(rest, params=params)
        if step % 20 == 0 or step == options.steps:
            print(f"step {step}: loss {loss:.3f}, {report.kind.name.lower()}, gradient norm {report.global_norm:.2f}")
    if options.save:
        print("saved", optimizer.save(options.save))
    optimizer.close()


if __name__ == "__main__":
    main()
