"""One fine-tuning: from a recipe to a Hugging Face directory, and on from wherever it was killed."""

import contextlib
import pathlib
from typing import Any

import superoffload.torch
from superoffload.finetune import data, export, hosting, picture
from superoffload.finetune import model as models
from superoffload.finetune import ranks as processes
from superoffload.finetune.flops import Flops
from superoffload.finetune.progress import Progress
from superoffload.finetune.ranks import Ranks
from superoffload.finetune.recipe import Recipe
from superoffload.finetune.record import Record
from superoffload.finetune.training import Trainer


def run(recipe: Recipe, ranks: Ranks) -> int:
    """The exit status: 0. Raises ValueError for what the recipe names and is not there."""
    output = pathlib.Path(recipe.output)
    record = Record.open(output, recipe, ranks)
    if record.finished:
        _say(ranks, f"{output} has the model that this recipe trains; delete it to train again")
        return 0
    tokenizer = models.tokenizer_of(recipe)
    rows = data.training_rows(recipe, tokenizer, record.begun)
    evaluated = data.evaluation_rows(recipe, tokenizer, record.begun)
    record.check_data(rows.digest(), ranks)
    config = models.config_of(recipe)
    on_meta = ranks.on_gpu and recipe.lora is None
    model = models.load(recipe, config, on_meta)
    flops = Flops(model, config, recipe.lora is not None, ranks)
    values = superoffload.torch.pretrained_weights(model, models.directory_of(recipe)) if on_meta else None
    model = models.with_adapters(model, recipe)
    models.recompute(model, recipe)
    parallel = processes.divide(model, recipe)
    with contextlib.closing(_optimizer(recipe, model, ranks, values)) as optimizer:
        model.to(ranks.device)
        trainer = Trainer(recipe, ranks, model.train(), parallel, rows)
        if not trainer.compare_losses():
            _say(ranks, "the model does more with its logits than a loss: they are computed whole, which takes memory")
        first = record.step_after(optimizer.committed_steps)
        record.forget_from(first)
        progress = Progress(trainer, rows, flops, optimizer, record, ranks, first)
        for step in range(first, trainer.steps):
            with progress.step(step) as measured:
                measured.loss = trainer.step(step, optimizer)
            if _is_due(recipe, step, trainer.steps) and evaluated is not None:
                progress.evaluated(step, trainer.evaluate(evaluated))
        progress.close()
        optimizer.synchronize()
        export.save(recipe, model, config, tokenizer, output, ranks)
        optimizer.delete()
    if ranks.first:
        picture.draw(record.entries, output / "loss.png")
        record.finish()
    _say(ranks, f"{output / 'model'} has the trained model, {output / 'log.jsonl'} what each step was")
    return 0


def _optimizer(recipe: Recipe, model: Any, ranks: Ranks, values: Any) -> Any:
    """Begins where the daemon, or else the newest checkpoint, has it."""
    output = pathlib.Path(recipe.output)
    options: dict[str, Any] = {"name": hosting.name_of(output), "sync": "pull_params"}
    if recipe.checkpoint_every:
        directory = hosting.checkpoints_of(output)
        directory.mkdir(parents=True, exist_ok=True)
        options["restore"] = hosting.newest_checkpoint(output)
        options["checkpoint"] = superoffload.torch.CheckpointSchedule(
            recipe.checkpoint_every, str(directory.resolve()), recipe.keep_checkpoints
        )
    return hosting.make(recipe, model, ranks, values, **options)


def _is_due(recipe: Recipe, step: int, steps: int) -> bool:
    every = recipe.evaluate_every or steps
    return (step + 1) % every == 0 or step + 1 == steps


def _say(ranks: Ranks, what: str) -> None:
    if ranks.first:
        print(f"superoffload finetune: {what}", flush=True)
