"""What a script asks an engine that follows from its configuration and its optimizer."""

from typing import Any

import torch

from superoffload.deepspeed.config import Config
from superoffload.torch.optimizer import Optimizer


class Answers(torch.nn.Module):
    """Of an engine, under DeepSpeed's names."""

    def __init__(self, config: Config, optimizer: Optimizer) -> None:
        super().__init__()
        self.config, self.optimizer = config, optimizer

    def get_global_grad_norm(self) -> float | None:
        """Of all gradients of the last step, before clipping; None before the first one."""
        result = self.optimizer.last_result
        return None if result is None else result.global_norm

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        return [group["betas"] for group in self.optimizer.param_groups]

    def train_batch_size(self) -> int:
        return self.config.batches.total

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.batches.micro

    def gradient_accumulation_steps(self) -> int:
        return self.config.batches.passes

    def gradient_clipping(self) -> float:
        return self.config.clipping

    def zero_optimization_stage(self) -> int:
        return self.config.stage

    def zero_optimization(self) -> bool:
        return self.config.stage > 0

    def bfloat16_enabled(self) -> bool:
        return self.config.dtype is torch.bfloat16

    def fp16_enabled(self) -> bool:
        return self.config.dtype is torch.float16
