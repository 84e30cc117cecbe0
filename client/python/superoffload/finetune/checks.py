"""What can be checked of a recipe before a model is loaded: a line each, and what to do where a check fails."""

import dataclasses
import datetime
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import torch

import superoffload.torch
from superoffload._core import fair_share
from superoffload._core.error import Error
from superoffload.finetune import data, hosting, planning
from superoffload.finetune import model as models
from superoffload.finetune.recipe import Recipe
from superoffload.finetune.record import Record
from superoffload.finetune.rows import Order
from superoffload.torch.ranks import divided_attention
from superoffload.torch.ranks import miniature as tried

_WEIGHT_BYTES = 2  # of a parameter in the files of most models
_UNBOUNDED = float(1 << 50)


@dataclasses.dataclass
class _Checked:
    """What one check has found for those after it."""

    recipe: Recipe
    config: Any = None
    model: Any = None  # on meta


def run(recipe: Recipe) -> int:
    """The exit status: 1 when a check fails. A check that needs what another one did not find is left out."""
    checked = _Checked(recipe)
    failed = False
    for name, check in _CHECKS.items():
        try:
            said = check(checked)
        except (ValueError, OSError, ImportError) as error:
            said, failed = f"NO: {error}", True
        except Error as error:
            said, failed = f"NO: {error.message}", True
        print(f"{name:>10}  {said}", flush=True)
        if failed and name == "model":
            return 1
    return int(failed)


def _model(checked: _Checked) -> str:
    recipe = checked.recipe
    config = models.config_of(recipe)
    if recipe.architecture is not None:
        stated, own = models.made_of(recipe.architecture).to_dict(), config.to_dict()
        for name in recipe.architecture.keys() & stated.keys():
            if stated[name] != own.get(name):
                raise ValueError(
                    f"architecture has {name}: {stated[name]}, but {recipe.model} has {own.get(name)}; mend the recipe"
                )
    config = models.unquantized(config)
    with torch.device("meta"):
        checked.model = models.make_random(recipe, config)
    checked.config = config
    hosting.kind_of(recipe)
    hosting.options_of(recipe)
    parameters = sum(parameter.numel() for parameter in checked.model.parameters())
    attention = checked.model.config._attn_implementation
    return f"{type(checked.model).__name__}, {parameters / 1e9:.2f} B parameters, attention {attention}"


def _files(checked: _Checked) -> str:
    recipe = checked.recipe
    if os.path.isdir(recipe.model):
        values = superoffload.torch.pretrained_weights(checked.model, recipe.model)
        missing = [name for name, _ in checked.model.named_parameters() if name not in values]
        if missing:
            raise ValueError(f"the files of {recipe.model} lack {', '.join(missing[:3])}; fetch them again")
        return f"{recipe.model} has all parameters"
    import huggingface_hub

    info = huggingface_hub.HfApi().model_info(recipe.model, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if file.rfilename.endswith(".safetensors")}
    if not sizes:
        raise ValueError(f"{recipe.model} has no safetensors files; choose a model that has them")
    return f"{len(sizes)} files of {sum(sizes.values()) / 2**30:.1f} GiB on the Hub"


def _data(checked: _Checked) -> str:
    recipe = checked.recipe
    tokenizer = models.tokenizer_of(recipe)
    rows = data.training_rows(recipe, tokenizer, datetime.date.today())
    evaluated = data.evaluation_rows(recipe, tokenizer, datetime.date.today())
    order = Order(len(rows), recipe.batch_size, recipe.seed)
    used = float(rows.used.sum()) / rows.tokens.numel()
    said = (
        f"{len(rows)} rows of {recipe.length} tokens, {used:.0%} of them used, {order.steps_per_epoch} steps per epoch"
    )
    return said if evaluated is None else f"{said}; {len(evaluated)} rows to evaluate"


def _ranks(checked: _Checked) -> str:
    recipe = checked.recipe
    gpus = torch.cuda.device_count()
    if gpus and recipe.ranks > gpus and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            f"the recipe has ranks: {recipe.ranks}, and this machine {gpus} GPUs; on several machines start it with "
            "torchrun or srun, one process per GPU"
        )
    if recipe.sequence_parallel > 1:
        if not divided_attention.divides(checked.config.get_text_config(), recipe.sequence_parallel):
            raise ValueError(
                f"the model's heads cannot be divided among sequence_parallel: {recipe.sequence_parallel} ranks"
            )
        tried.check(checked.model)
    return f"{recipe.ranks}, on {gpus} GPUs" if gpus else f"{recipe.ranks}, on the CPU"


def _memory(checked: _Checked) -> str:
    recipe = checked.recipe
    if recipe.lora is not None:
        return "not planned for adapters"
    available = (fair_share.available_bytes() or 0) / recipe.ranks
    gpu = float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else _UNBOUNDED
    request = planning.request_of(recipe)
    request.machine.like, request.machine.name = "gh200-96-480", "this machine"
    request.machine.host.memory_bytes, request.machine.gpu.memory_bytes = available, gpu
    request.quick = True
    response = planning.answered(request, recipe)
    advice = " ".join(response.recommendation.sentences)
    host, on_gpu = response.memory[0].host, response.memory[0].gpu
    if not host.fits:
        raise ValueError(
            f"a rank's daemon needs {_gib(host.total_bytes)} and may have {_gib(host.available_bytes)}; {advice}"
        )
    if not torch.cuda.is_available():
        return f"{_gib(host.total_bytes)} of the daemon's for each rank"
    if not on_gpu.fits:
        raise ValueError(f"a GPU needs {_gib(on_gpu.total_bytes)} and has {_gib(on_gpu.available_bytes)}; {advice}")
    return f"{_gib(host.total_bytes)} of the daemon's for each rank, {_gib(on_gpu.total_bytes)} of a GPU's"


def _output(checked: _Checked) -> str:
    output = pathlib.Path(checked.recipe.output)
    record = Record.read(output, checked.recipe)
    parent = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK):
        raise ValueError(f"{parent} cannot be written; give the recipe another output")
    size = sum(parameter.numel() for parameter in checked.model.parameters())
    # Masters and two moments in fp32, of one checkpoint more than are kept, and the exported model.
    needed = size * (12 * (checked.recipe.keep_checkpoints + 1) * bool(checked.recipe.checkpoint_every) + _WEIGHT_BYTES)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ValueError(
            f"{parent} has {_gib(free)} free, and checkpoints and the model need {_gib(needed)}; keep fewer "
            "(keep_checkpoints) or give the recipe another output"
        )
    done = f", with {len(record.entries)} lines in its log" if record.entries else ""
    return f"{output}{done}"


_CHECKS: dict[str, Callable[[_Checked], str]] = {
    "model": _model,
    "files": _files,
    "data": _data,
    "ranks": _ranks,
    "memory": _memory,
    "output": _output,
}


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
