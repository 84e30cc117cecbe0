"""The keyword arguments that all optimizers take, for type checkers; those who build them describe them."""

from collections.abc import Mapping
from typing import Any, TypedDict

from superoffload._core import policies, stored
from superoffload._core.optimizers import Directories
from superoffload.jax.gpu_options import GpuOptions
from superoffload.jax.streams import Weights


class Keywords(TypedDict, total=False):
    labels: Any
    groups: Mapping[str, Mapping[str, Any]] | None
    trainable: Any
    state_dtype: Any
    master_dtype: Any
    rounding: stored.Rounding
    seed: int | None
    max_norm: float | None
    endpoint: str | None
    name: str | None
    sync: policies.Sync
    speculation: policies.Speculation
    restore: Directories | None
    checkpoint: policies.CheckpointSchedule | None
    lease_seconds: float | None
    bucket_bytes: int
    gpu: GpuOptions | None
    weights: Weights
