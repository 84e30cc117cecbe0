"""A forward pass of which this rank computes a part of each sequence (Ulysses)."""

from typing import Any

import torch
import torch.distributed

from superoffload.torch import ulysses


def forward(module: torch.nn.Module, parallel: Any, *inputs: Any, **batch: Any) -> Any:
    """``parallel``: the SequenceParallel of the module; ``batch``: what all ranks of a sequence have.

    The output has the mean loss over all targets of the sequences, and the logits of this rank's part.
    """
    if inputs or "input_ids" not in batch:
        raise ValueError("with sequence_parallel_size, call the engine as engine(input_ids=..., labels=...)")
    part = parallel.part(batch)
    output = module(**part.inputs)
    output["loss"] = _loss(parallel, output.logits, part.targets)
    return output


def _loss(parallel: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Gradients of this rank's part are so large that their average over ranks is the gradient of the mean."""
    total, count = ulysses.sums(logits, targets)
    of_all = torch.stack([total.detach(), count.to(total.dtype)])
    torch.distributed.all_reduce(of_all, group=parallel.group)
    targets_of_all = of_all[1].clamp(min=1)
    of_rank = total * (parallel.ranks / targets_of_all)
    return of_rank + (of_all[0] / targets_of_all - of_rank).detach()
