"""Optimizers for JAX whose state and arithmetic live in superoffloadd.

The plain way::

    optimizer = superoffload.jax.adamw(3e-4, max_norm=1.0)
    params = optimizer.init(params)
    loss, gradients = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    params, report = optimizer.step(gradients, params=params)

The overlapped way: gradients of a layer leave while the backward of the layers below it runs::

    layers = [superoffload.jax.offloaded(layer_fn, optimizer, f"layers.{i}") for i in range(n)]

    @jax.jit
    def backward(params, batch):  # loss_fn calls layers[i](params["layers"][i], x)
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        return loss, optimizer.remaining(gradients)

    loss, rest = backward(params, batch)
    params, report = optimizer.finish(rest, params=params)

Leaves are bfloat16, float16 or float32 arrays on the CPU or on one NVIDIA GPU; fp32 masters and moments never leave the
daemon. Both ways give the same bits, with whatever speculation.
"""

from superoffload._core import extras

extras.need("jax", "jax")

# ruff: noqa: E402
from superoffload._core.policies import CheckpointSchedule
from superoffload._core.step_result import StepResult, VerdictKind
from superoffload.jax.adam import adam, adam8bit, adamw, adamw8bit
from superoffload.jax.gpu_options import GpuOptions
from superoffload.jax.lion import lion, lion8bit
from superoffload.jax.offload import offloaded
from superoffload.jax.optimizer import Optimizer

__all__ = [
    "CheckpointSchedule",
    "GpuOptions",
    "Optimizer",
    "StepResult",
    "VerdictKind",
    "adam",
    "adam8bit",
    "adamw",
    "adamw8bit",
    "lion",
    "lion8bit",
    "offloaded",
]
