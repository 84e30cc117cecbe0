"""The largest models that this machine trains, found from an estimate downwards."""

import torch
from tests.device import machine, models, rows

from superoffload.torch import GpuOptions

STEPS = 3
GPU_BYTES = 5  # per parameter, with the optimizer in the daemon: itself, some of its gradient, slots
GPU_ONLY_BYTES = 20  # itself, its gradient, master, the master's gradient, moments
SPARE_GPU_BYTES = 6 << 30  # activations and contexts


def _free_gpu_bytes() -> int:
    return SPARE_GPU_BYTES + (1 << 20) if machine.DRY_RUN else torch.cuda.mem_get_info()[0]


def superoffload_model(fraction: float) -> dict[str, object]:
    """Both sides need room: masters and moments in the host's memory, parameters and gradients in the GPU's."""
    machine.use_gpu()
    host = 1 << 20 if machine.DRY_RUN else machine.available_host_bytes() - machine.DAEMON_SPARE_BYTES
    on_gpu = (_free_gpu_bytes() - SPARE_GPU_BYTES) / GPU_BYTES
    most = min(host / machine.DAEMON_BYTES_PER_PARAMETER, on_gpu)
    print(f"estimate: {host / machine.DAEMON_BYTES_PER_PARAMETER:.3g} for the host, {on_gpu:.3g} for the GPU")
    model = models.build(int(fraction * most))
    with machine.daemon(machine.daemon_budget(models.count(model))):
        optimizer = rows.optimizer_of(model, gpu=GpuOptions(resident_buckets=0, cast="fused"))
        try:
            return rows.measure(model, optimizer.step, steps=STEPS, batch=1).report()
        finally:
            optimizer.close()


def gpu_only_model(fraction: float) -> dict[str, object]:
    machine.use_gpu()
    model = models.build(int(fraction * (_free_gpu_bytes() - SPARE_GPU_BYTES) / GPU_ONLY_BYTES))
    return rows.measure(model, rows.fused_adamw_step(model), steps=STEPS, batch=1).report()
