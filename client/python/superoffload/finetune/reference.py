"""What a miniature is compared with: the optimizer of torch's on fp32 masters, as one writes it by hand."""

from typing import Any

import torch

from superoffload.finetune import hosting
from superoffload.finetune.recipe import Recipe


def counterpart(recipe: Recipe) -> Any:
    """torch.optim's class that computes the same; None: there is none."""
    options = hosting.options_of(recipe)
    if any(options.get(name, torch.float32) != torch.float32 for name in ("state_dtype", "master_dtype")):
        return None
    return getattr(torch.optim, recipe.optimizer, None)


class TorchWithMasters:
    """For parameters of any dtype; DTensors as well."""

    def __init__(self, recipe: Recipe, model: Any) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
        self._optimizer = counterpart(recipe)(self._masters, **hosting.hyperparameters(recipe))
        self._max_grad_norm = recipe.max_grad_norm
        self.param_groups = self._optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        if self._max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm)
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
