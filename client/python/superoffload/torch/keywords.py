"""The keyword arguments that all optimizers take, for type checkers; those who build them describe them."""

import os
from typing import Any, TypedDict

import torch

from superoffload._core import policies, stored
from superoffload._core.optimizers import Directories
from superoffload.torch.gpu.options import GpuOptions, Weights
from superoffload.torch.overlap import Overlap


class Keywords(TypedDict, total=False):
    """The arguments of `Optimizer` that have a default."""

    maximize: bool
    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None
    state_dtype: torch.dtype
    master_dtype: torch.dtype
    rounding: stored.Rounding
    seed: int | None
    max_grad_norm: float | None
    endpoint: str | None
    name: str | None
    sync: policies.Sync
    speculation: policies.Speculation
    restore: Directories | None
    checkpoint: policies.CheckpointSchedule | None
    state_directory: str | os.PathLike[str] | None
    lease_seconds: float | None
    bucket_bytes: int
    overlap: Overlap
    gpu: GpuOptions
    weights: Weights
    replicas: Any
