"""The trained model as a Hugging Face directory."""

import pathlib
import shutil
from typing import Any

import torch

from superoffload.finetune import model as models
from superoffload.finetune.ranks import Ranks
from superoffload.finetune.recipe import Recipe


def save(recipe: Recipe, model: Any, config: Any, tokenizer: Any, output: pathlib.Path, ranks: Ranks) -> None:
    """``output/model``: the weights in the recipe's dtype, or the adapters, and the tokenizer. All ranks call it."""
    weights = model.state_dict() if ranks.count == 1 else _gathered(model)
    if ranks.first:
        target, beside = output / "model", output / ".model"
        shutil.rmtree(beside, ignore_errors=True)
        if recipe.lora is not None:
            model.save_pretrained(beside, state_dict=weights)
        else:
            plain = models.load(recipe, config, on_meta=True)  # without FSDP's classes and hooks
            once = dict([*plain.named_parameters(), *plain.named_buffers()])  # tied ones under one name
            plain.save_pretrained(beside, state_dict={n: weight for n, weight in weights.items() if n in once})
        tokenizer.save_pretrained(beside)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
    ranks.wait()


def _gathered(model: Any) -> dict[str, torch.Tensor]:
    """Whole, on the CPU of rank 0."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
