"""AdamW and Adam: names of scalars, and defaults. What optimizers have in common: optimizer.py."""

from typing import TYPE_CHECKING, Any

from superoffload.jax.algorithm import Algorithm, Schedule
from superoffload.jax.keywords import Keywords
from superoffload.jax.optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

_SCALARS = {"lr": "learning_rate", "beta1": "b1", "beta2": "b2", "eps": "eps", "weight_decay": "weight_decay"}
_ADAMW = Algorithm("adamw", _SCALARS, "weight_decay")
_ADAM = Algorithm("adam", _SCALARS, "weight_decay")
_ADAMW8BIT = Algorithm("adamw_8bit", _SCALARS, "weight_decay", state_bits=8)
_ADAM8BIT = Algorithm("adam_8bit", _SCALARS, "weight_decay", state_bits=8)


def adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any = None,
    **options: "Unpack[Keywords]",
) -> Optimizer:
    """AdamW as optax.adamw defines it, in the daemon, on fp32 masters.

    Args:
        learning_rate: a number, or a schedule as Optax has them: a function of the number of committed steps.
        b1, b2, eps, weight_decay: as for optax.adamw.
        mask: which leaves decay: a pytree prefix of bools, or a function that makes one of the parameters.
        labels: the group of each leaf, as for optax.multi_transform: a pytree prefix of strings, or a function.
        groups: each label's hyper-parameters, as ``{"head": {"learning_rate": 1e-3}}``; others are those above. With
            narrow moments also ``"optim_bits": 32``, for a group whose moments are kept in fp32.
        trainable: which leaves are updated: a prefix or a function, as ``mask``. Others are frozen: they may be
            anything, and come back as they are.
        state_dtype: jnp.float32, or jnp.bfloat16 for moments of half the memory, which results then depend on.
        master_dtype: jnp.float32, or jnp.bfloat16 for masters of leaves in bf16, rounded stochastically; results then
            depend on it, too.
        rounding: of bf16 moments: "stochastic", under ``seed``, or "nearest", with which an update that is small
            against a moment is lost.
        seed: of stochastic rounding; 0 unless the optimizer exists already or comes from a checkpoint, which have
            their own. The same in all processes.
        max_norm: clip the global 2-norm of the gradients to this, by ``max_norm / (norm + 1e-6)``; None does not clip.
        endpoint: the daemon, "unix:/path/control.sock". Default: $SUPEROFFLOAD_ENDPOINT, a daemon at its usual places,
            else a private one that ends with this process.
        name: the optimizer's name in the daemon. With a name it outlives this process, and init() of an optimizer of
            that name attaches to it again. Without one it is deleted in the end.
        sync: when attaching to an existing optimizer: "check" that the given parameters are the published ones,
            "push_params" (the given ones win) or "pull_params" (the daemon wins; init() returns its).
        speculation: "adaptive", "always" or "never"; never changes results.
        restore: directory of a checkpoint, or directories of all its ranks, that an optimizer which is created begins
            with; init() returns its parameters. One that exists already goes on as it is, unless its trainer ended
            before it had been filled. Not with sync="push_params".
        checkpoint: have the daemon take checkpoints while training goes on; None leaves an existing schedule.
        lease_seconds: the daemon deletes an optimizer with a name when no trainer was attached to it for so long.
        bucket_bytes: gradient bytes per bucket; 0 is the daemon's default, 64 MiB.
        gpu: `GpuOptions`, for parameters on a GPU.
        weights: of a model on a GPU: "resident", all leaves are arrays there; "streamed", those of blocks, whose names
            have a number (``layers.0``, ``Block_0``), come from the daemon while an `offloaded` layer computes, forward
            and backward, and have no elements in what `init` and `finish` return; or the part of the blocks that
            stream, 0 to 1. ``init()`` takes these as arrays of the host as well.
    """
    defaults = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    return Optimizer(_ADAMW, defaults, mask, **options)


def adam(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    **options: "Unpack[Keywords]",
) -> Optimizer:
    """Adam as optax.adam defines it; arguments as for `adamw`."""
    defaults = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "eps": eps, "weight_decay": 0.0}
    return Optimizer(_ADAM, defaults, **options)


def adamw8bit(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any = None,
    **options: "Unpack[Keywords]",
) -> Optimizer:
    """`adamw` whose moments are kept in 8 bits, with an fp32 scale per 256, as bitsandbytes and torchao keep them.

    Moments of leaves of one dimension, of fewer than 4096 elements, and of embeddings (by their names: a part with
    "embed", "wte", "wpe") are kept in fp32, unless their group says ``"optim_bits": 8``.
    """
    defaults = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    return Optimizer(_ADAMW8BIT, defaults, mask, **options)


def adam8bit(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    **options: "Unpack[Keywords]",
) -> Optimizer:
    """`adam` whose moments are kept as those of `adamw8bit`."""
    defaults = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "eps": eps, "weight_decay": 0.0}
    return Optimizer(_ADAM8BIT, defaults, **options)
