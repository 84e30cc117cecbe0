"""What the adapter asks of JAX's GPU support, and nothing else does."""

from typing import Any

import jax


def is_on_gpu(sharding: jax.sharding.Sharding) -> bool:
    """Whether arrays of this sharding lie in the memory of NVIDIA GPUs."""
    return all(_is_gpu(device) for device in sharding.device_set)


def _is_gpu(device: Any) -> bool:
    if device.platform not in ("gpu", "cuda"):
        return False
    return "rocm" not in getattr(device.client, "platform_version", "").lower()


def ordinal(device: Any) -> int:
    """Of a GPU, as the driver counts those of this process."""
    return device.local_hardware_id
