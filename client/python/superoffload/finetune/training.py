"""The loop: rows of each step, their loss, and an optimizer's steps; the same in whatever process it goes on."""

import math
from typing import Any

import torch

from superoffload.finetune import apart
from superoffload.finetune import loss as losses
from superoffload.finetune.ranks import Ranks
from superoffload.finetune.recipe import Recipe
from superoffload.finetune.rows import IGNORED, Order, Rows
from superoffload.torch import ulysses


def rate(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate of a step, of which there are so many: it grows to the recipe's, and then falls to 0."""
    warmup = math.ceil(recipe.warmup * steps)
    if step < warmup:
        return recipe.learning_rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if recipe.schedule == "cosine":
        return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    return recipe.learning_rate * (1 - done if recipe.schedule == "linear" else 1)


class Trainer:
    """Computes gradients of a step and has an optimizer take it."""

    def __init__(self, recipe: Recipe, ranks: Ranks, model: Any, parallel: Any, rows: Rows) -> None:
        """``parallel``: the SequenceParallel of the model, or None."""
        self._recipe, self._ranks, self._model, self._parallel, self._rows = recipe, ranks, model, parallel, rows
        self._loss = losses.TokenLoss(model)
        # Ulysses' attention looks at positions by itself.
        packed = parallel is None and bool((rows.positions[:, 1:] == 0).any())
        self._masks = packed and apart.needs_masks(model)
        self._flat = str(model.config._attn_implementation).startswith("flash") and parallel is None
        self._order = Order(len(rows), recipe.batch_size, recipe.seed)
        self.steps = recipe.steps or max(1, round(recipe.epochs * self._order.steps_per_epoch))
        self._counts = targets_of_rows(rows)

    def compare_losses(self) -> bool:
        """Whether the loss is computed in chunks; False: the model does something else with its logits."""
        batch = losses.tried(self._rows.batch([0]), self._recipe.sequence_parallel)
        return self._loss.compare(self._model, *self._part(batch))

    def step(self, number: int, optimizer: torch.optim.Optimizer) -> float:
        """Trains on the rows of a step; returns the mean loss over their targets. All ranks call it."""
        recipe = self._recipe
        torch.manual_seed((recipe.seed * recipe.ranks + self._ranks.rank) * 1_000_003 + number)  # of dropout
        rows = self.rows_of(number)
        mine = rows[self._ranks.rank // recipe.sequence_parallel :: recipe.groups]
        count = max(1, int(self._counts[rows].sum()))
        passes = [mine[i : i + recipe.rows_per_pass] for i in range(0, len(mine), recipe.rows_per_pass)]
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, number, self.steps)
        for some in passes:
            summed, balance = self._loss.sums(self._model, *self._part(self._rows.batch(some)))
            scaled = summed * (self._ranks.count / count)  # FSDP2 takes the mean over ranks
            if balance is not None:
                scaled = scaled + balance / len(passes)
            scaled.backward()
            total += summed.detach()
        optimizer.step()
        optimizer.zero_grad()
        return self._ranks.sum(total) / count

    def rows_of(self, number: int) -> list[int]:
        """Of a step, of all ranks."""
        return self._order.of_step(number)

    @torch.no_grad()
    def evaluate(self, rows: Rows) -> float:
        """The mean loss over all targets of rows. All ranks call it."""
        recipe = self._recipe
        self._model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        # FSDP2 needs each rank to call the model as often as every other one: rows that are missing count as nothing.
        wide = recipe.rows_per_pass * recipe.groups
        for first in range(0, len(rows), wide):
            own = range(first + self._ranks.rank // recipe.sequence_parallel, first + wide, recipe.groups)
            batch = rows.batch([min(i, len(rows) - 1) for i in own])
            for place, i in enumerate(own):
                if i >= len(rows):
                    batch["labels"][place] = IGNORED
            total += self._loss.sums(self._model, *self._part(batch))[0]
        self._model.train()
        return self._ranks.sum(total) / max(1, int(targets_of_rows(rows).sum()))

    def _part(self, batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """This rank's inputs of the model, and their targets."""
        batch = {name: tensor.to(self._ranks.device) for name, tensor in batch.items()}
        if self._parallel is not None:
            part = self._parallel.part(batch)
            return part.inputs, part.targets
        targets = ulysses.targets_of(batch["labels"], batch["position_ids"])
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        if self._flat:  # flash kernels know documents by their positions in one row only
            inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
            targets = targets.reshape(1, -1)
        elif self._masks:
            inputs["attention_mask"] = apart.masks_of(self._model, batch["position_ids"])
        return inputs, targets


def targets_of_rows(rows: Rows) -> torch.Tensor:
    """How many targets each row has."""
    return (ulysses.targets_of(rows.labels, rows.positions) != IGNORED).sum(dim=1)
