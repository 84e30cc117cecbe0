"""The model of a recipe: from the Hugging Face Hub, from a directory, or a miniature with random weights."""

import copy
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from superoffload.finetune.recipe import Recipe
from superoffload.torch.ranks import narrowing

MINIATURE_VOCABULARY = 320  # bytes, and the special tokens that configurations name


def config_of(recipe: Recipe, own: bool = True) -> Any:
    """transformers' configuration. ``own``: as the model's files have it, not the recipe's."""
    import transformers

    if recipe.architecture is not None and not own:
        return made_of(recipe.architecture)
    try:
        return transformers.AutoConfig.from_pretrained(recipe.model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the model {recipe.model} cannot be read: {_first_line(error)}; give a directory that has it, or its name "
            "on huggingface.co (`hf auth login` where its licence is asked for)"
        ) from error


def made_of(architecture: Mapping[str, Any]) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.for_model(**architecture)
    except (ValueError, TypeError) as error:
        raise ValueError(f"architecture is no configuration of a Hugging Face model: {_first_line(error)}") from error


def miniature_config(recipe: Recipe) -> Any:
    """The same kinds of layers with few narrow ones, and a vocabulary of bytes."""
    config = config_of(recipe, own=recipe.architecture is None)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [0]
    narrowing.narrow(config, max(2, *(kinds.index(kind) + 1 for kind in kinds)), MINIATURE_VOCABULARY)
    return config


def tokenizer_of(recipe: Recipe) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(recipe.model)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer of {recipe.model} cannot be read: {_first_line(error)}") from error


def attention_of(recipe: Recipe, config: Any) -> str:
    """For transformers' attn_implementation: of what is installed the fastest that the model has."""
    import transformers

    if recipe.attention != "auto":
        return recipe.attention
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    if torch.cuda.is_available() and getattr(kind, "_supports_flash_attn", False):
        from transformers.utils import import_utils

        served = getattr(kind, "_compatible_flash_implementations", None)
        for version in (4, 3, 2):
            name, installed = f"flash_attention_{version}", f"is_flash_attn_{version}_available"
            if getattr(import_utils, installed, bool)() and (served is None or name in served):
                return name
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def make_random(recipe: Recipe, config: Any) -> Any:
    import transformers

    torch.manual_seed(recipe.seed)
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, recipe.dtype), attn_implementation=attention_of(recipe, config)
    )


def load(recipe: Recipe, config: Any, on_meta: bool) -> Any:
    """``on_meta``: parameters have no memory yet, and get theirs where they are to be (`weights_of`)."""
    import transformers

    dtype, attention = getattr(torch, recipe.dtype), attention_of(recipe, config)
    if not on_meta:
        options: dict[str, Any] = {}
        if _is_mxfp4(config):
            options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        return transformers.AutoModelForCausalLM.from_pretrained(
            recipe.model, dtype=dtype, attn_implementation=attention, **options
        )
    import accelerate

    with accelerate.init_empty_weights():  # buffers are real
        model = transformers.AutoModelForCausalLM.from_config(
            unquantized(config), dtype=dtype, attn_implementation=attention
        )
    model.tie_weights()
    return model


def directory_of(recipe: Recipe) -> pathlib.Path:
    """Where the model's files are; they are fetched where they are not there."""
    if os.path.isdir(recipe.model):
        return pathlib.Path(recipe.model)
    import huggingface_hub

    return pathlib.Path(huggingface_hub.snapshot_download(recipe.model, allow_patterns=["*.safetensors", "*.json"]))


def with_adapters(model: Any, recipe: Recipe) -> Any:
    """peft's model, of which only the adapters are trained."""
    if recipe.lora is None:
        return model
    try:
        import peft
    except ModuleNotFoundError:
        raise ValueError("lora needs peft, which is not installed: pip install 'superoffload[finetune]'") from None
    torch.manual_seed(recipe.seed)
    options = peft.LoraConfig(
        r=recipe.lora.rank,
        lora_alpha=recipe.lora.alpha,
        lora_dropout=recipe.lora.dropout,
        target_modules=recipe.lora.targets,
        task_type="CAUSAL_LM",
    )
    # In the model's dtype, as their masters are fp32 anyway; FSDP2 shards parameters of one dtype together.
    adapted = peft.get_peft_model(model, options, autocast_adapter_dtype=False)
    adapted.enable_input_require_grads()  # else nothing is learned through blocks that are computed again
    return adapted


def recompute(model: Any, recipe: Recipe) -> None:
    """Blocks keep their inputs only, where the recipe says so."""
    if recipe.recompute:
        # The first is what transformers 6 will have.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})


def unquantized(config: Any) -> Any:
    """As what was trained is written."""
    config = copy.deepcopy(config)
    for each in (config, config.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    return config


def _is_mxfp4(config: Any) -> bool:
    quantization = getattr(config, "quantization_config", None) or {}
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
