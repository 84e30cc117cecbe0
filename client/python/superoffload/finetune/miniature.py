"""A recipe in small, in a minute on any machine: its architecture and its ranks, with random weights, on bytes of text.

It is trained twice, with the daemon and with torch.optim on fp32 masters, and what the losses differ by is told.
"""

import dataclasses
import pydoc_data.topics
from typing import Any

from superoffload.finetune import documents, hosting, reference, rows
from superoffload.finetune import model as models
from superoffload.finetune import ranks as processes
from superoffload.finetune.ranks import Ranks
from superoffload.finetune.recipe import Recipe
from superoffload.finetune.training import Trainer

_STEPS = 8
_LENGTH = 48
_BYTES = 1 << 16
_RATE = 1e-3


def run(recipe: Recipe, ranks: Ranks) -> int:
    """The exit status: 0."""
    length = _LENGTH * recipe.sequence_parallel
    small = dataclasses.replace(recipe, length=length, steps=_STEPS, learning_rate=_RATE, warmup=0.0)
    text = "".join(pydoc_data.topics.topics.values()).encode()[:_BYTES]
    some = rows.split(documents.learned_whole(list(text)), small.length)
    ours = _train(small, ranks, some, hosted=True)
    if ranks.first:
        print(f"{recipe.model} in small: {_words(recipe)}, {_STEPS} steps, loss {ours[0]:.4f} to {ours[-1]:.4f}")
    if reference.counterpart(recipe) is None:
        if ranks.first:
            print(f"torch.optim has no counterpart of {recipe.optimizer} with these options")
        return 0
    theirs = _train(small, ranks, some, hosted=False)
    if ranks.first:
        difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        print(
            f"torch.optim on fp32 masters: loss {theirs[0]:.4f} to {theirs[-1]:.4f}; "
            f"largest difference {difference:.1e}"
        )
    return 0


def _train(recipe: Recipe, ranks: Ranks, some: rows.Rows, hosted: bool) -> list[float]:
    model = models.with_adapters(models.make_random(recipe, models.miniature_config(recipe)), recipe)
    models.recompute(model, recipe)
    if not hosted:
        model.to(ranks.device)
    parallel = processes.divide(model, recipe)
    optimizer: Any = hosting.make(recipe, model, ranks) if hosted else reference.TorchWithMasters(recipe, model)
    model.to(ranks.device)
    trainer = Trainer(recipe, ranks, model.train(), parallel, some)
    trainer.compare_losses()
    losses = [trainer.step(number, optimizer) for number in range(trainer.steps)]
    if hosted:
        optimizer.close()
    return losses


def _words(recipe: Recipe) -> str:
    words = "1 rank" if recipe.ranks == 1 else f"{recipe.ranks} ranks"
    return words if recipe.sequence_parallel == 1 else f"{words}, {recipe.sequence_parallel} to a sequence"
