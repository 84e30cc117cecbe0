"""The recipe's optimizer in the daemon."""

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import torch

import superoffload.torch
from superoffload.finetune.ranks import Ranks
from superoffload.finetune.recipe import Recipe
from superoffload.stand_ins import options as chosen
from superoffload.torch.keywords import Keywords
from superoffload.torch.optimizer import Optimizer


def kind_of(recipe: Recipe) -> Any:
    """The class; raises ValueError where there is none."""
    every = {name: getattr(superoffload.torch, name) for name in superoffload.torch.__all__}
    kinds = {name: kind for name, kind in every.items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    if recipe.optimizer not in kinds:
        raise ValueError(f"optimizer is {recipe.optimizer!r} but must be one of {', '.join(kinds)}")
    return kinds[recipe.optimizer]


def hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """What the algorithm computes with, as torch.optim calls it."""
    given = recipe.optimizer_options or {}
    own = {name: value for name, value in given.items() if name not in Keywords.__annotations__}
    return {"lr": recipe.learning_rate} | {n: tuple(v) if isinstance(v, list) else v for n, v in own.items()}


def options_of(recipe: Recipe) -> dict[str, Any]:
    """Where and how the state is kept. Raises ValueError."""
    given = recipe.optimizer_options or {}
    try:
        return chosen.keywords({name: value for name, value in given.items() if name in Keywords.__annotations__})
    except ValueError as error:
        raise ValueError(f"optimizer_options: {error}") from error


def make(
    recipe: Recipe, model: Any, ranks: Ranks, values: Mapping[str, torch.Tensor] | None = None, **more: Any
) -> Any:
    """``values``: of parameters on meta; ``more``: arguments of the optimizer's that say where its state begins."""
    options = {"max_grad_norm": recipe.max_grad_norm} | hyperparameters(recipe) | options_of(recipe)
    if ranks.on_gpu:
        # Else the GPU would keep the gradients of all parameters from pass to pass.
        adds: Literal["daemon", "gpu"] = "daemon" if recipe.passes > 1 and ranks.count == 1 else "gpu"
        on_gpu = superoffload.torch.GpuOptions(device=ranks.device, weights=values, accumulate=adds)
        options = {"weights": recipe.weights, "gpu": on_gpu} | options
    try:
        return kind_of(recipe)(model.named_parameters(), **options, **more)
    except TypeError as error:
        raise ValueError(f"optimizer_options: {error}") from error


def name_of(output: pathlib.Path) -> str:
    """Of the optimizer in the daemon: the same for each process that writes there."""
    return f"finetune-{hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:16]}"


def checkpoints_of(output: pathlib.Path) -> pathlib.Path:
    return output / "checkpoints"


def newest_checkpoint(output: pathlib.Path) -> str | None:
    """One that has its name is whole."""
    found = [path for path in checkpoints_of(output).glob("step-*") if path.is_dir()]
    return str(max(found, key=lambda path: (path.name.split("-")[1], path.stat().st_mtime))) if found else None
