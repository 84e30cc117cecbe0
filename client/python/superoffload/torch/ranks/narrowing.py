"""A configuration of transformers' becomes that of a miniature: a few narrow layers with all that layers have."""

import re
from typing import Any

_SHORT = 16  # tokens above which a model is beyond its training: between those of a part and of the whole
_WINDOW = 7
_EXPERTS = 16  # at most
_SIZE = 8  # of a head, at least

_WIDTHS = re.compile(
    r"(hidden|head|intermediate|latent|embedding)_size|_dim$|_rank$|d_model|d_head|d_ssm|n_embd|n_inner"
)
_FORWARD = re.compile(r"(?<!mamba_)intermediate_size|ffn|n_inner")  # most parameters, and few depend on them
_FEWER = 8
_WINDOWS = re.compile(r"window|chunk_size$")
_COUNTS = re.compile(r"experts$")


def narrow(config: Any, depth: int, vocabulary: int) -> None:
    """``depth``: layers that it has then, the first ones. Widths keep their ratios."""
    _narrow(config, depth, vocabulary, getattr(config.get_text_config(), "num_hidden_layers", None))


def _narrow(config: Any, depth: int, vocabulary: int, count: int | None) -> None:
    """``count``: of its layers, until now."""
    size = vars(config).get("head_dim")
    if not isinstance(size, int) and isinstance(getattr(config, "num_attention_heads", None), int):
        size = config.hidden_size // config.num_attention_heads
    divisor = 1
    while size and size % (2 * divisor) == 0 and size // (2 * divisor) >= _SIZE:
        divisor *= 2
    dynamic = "dynamic" in str(vars(config).get("rope_parameters", vars(config).get("rope_scaling")))
    for name, value in list(vars(config).items()):
        if hasattr(value, "get_text_config"):
            _narrow(value, depth, vocabulary, count)
        elif isinstance(value, dict):
            _narrow_rope(value, divisor)
        elif isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, value[:depth])
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif name.endswith(("num_hidden_layers", "n_layer", "n_layers", "num_layers")):
            setattr(config, name, min(value, depth))
        elif name == "original_max_position_embeddings" or (name == "max_position_embeddings" and dynamic):
            setattr(config, name, _SHORT)
        elif "vocab_size" in name or name in ("max_position_embeddings", "n_positions"):
            setattr(config, name, vocabulary)
        elif re.search(r"_token_(id|index)$", name):
            setattr(config, name, min(value, vocabulary - 1))
        elif _WINDOWS.search(name):
            setattr(config, name, min(value, _WINDOW))
        elif _COUNTS.search(name):
            setattr(config, name, min(value, _EXPERTS))
        elif _FORWARD.search(name) and value % (8 * _FEWER * divisor) == 0:
            setattr(config, name, value // (_FEWER * divisor))
        elif _WIDTHS.search(name) and value % divisor == 0:
            setattr(config, name, value // divisor)
    config.use_cache = False


def _narrow_rope(parameters: dict[str, Any], divisor: int) -> None:
    for name, value in parameters.items():
        if isinstance(value, dict):
            _narrow_rope(value, divisor)
        elif name == "original_max_position_embeddings":
            parameters[name] = _SHORT
        elif name in ("short_factor", "long_factor"):
            parameters[name] = value[::divisor]
        elif name == "mrope_section":
            less = [section // divisor for section in value[:-1]]
            parameters[name] = [*less, sum(value) // divisor - sum(less)]
