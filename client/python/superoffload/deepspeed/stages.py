"""A model divided among ranks as a configuration says: by FSDP2, and its sequences by Ulysses."""

from typing import Any

import torch

from superoffload.deepspeed.config import Config


def divide(model: torch.nn.Module, config: Config, ranks: int) -> Any:
    """Returns the SequenceParallel of the model, or None.

    Stages 1 to 3, and 0: between steps each rank has a part of parameters, gradients and state. From stage 2 down
    parameters that a forward has gathered stay until its backward; with stage 3 they are gathered again.
    """
    if ranks == 1:
        return None
    parallel = None
    if config.sequence_parallel_size > 1:
        from superoffload.torch import ulysses

        parallel = ulysses.SequenceParallel(model, config.sequence_parallel_size)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(reduce_dtype=config.reduce_dtype)
    for block in _blocks(model):
        fully_shard(block, mp_policy=policy, reshard_after_forward=config.stage == 3)
    fully_shard(model, mp_policy=policy, reshard_after_forward=config.stage == 3)
    return parallel


def set_gradient_sync(model: torch.nn.Module, on: bool) -> None:
    """Whether backward exchanges gradients with other ranks."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Entries of the lists of modules that are in no other one."""
    found: list[torch.nn.Module] = []

    def look(module: torch.nn.Module) -> None:
        for child in module.children():
            if isinstance(child, torch.nn.ModuleList):
                found.extend(entry for entry in child if any(True for _ in entry.parameters()))
            else:
                look(child)

    look(model)
    return found
