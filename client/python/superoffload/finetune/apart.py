"""Whether a model keeps the documents of a row apart, of which only the positions tell it.

Most of transformers' models make masks of positions that begin again at 0. Some do not (GPT-OSS, of 5.24); they get
masks. Recurrences take no masks: what no mask keeps apart is refused. A miniature tells, whose numbers are fp32's.
"""

from typing import Any

import torch

from superoffload.torch.ranks import miniature

_FIRST, _SECOND = 12, 8  # tokens of two documents; windows of miniatures are shorter than the first
_TOLERANCE = 1e-3  # rounding makes 1e-6


def needs_masks(model: Any) -> bool:
    """Whether it does with masks only. Raises ValueError where it does not do so at all."""
    why = ""
    try:
        small = miniature.make(model)
        for with_masks in (False, True):
            if _keeps_apart(small, with_masks):
                return with_masks
    except Exception as error:  # whatever a model raises that is called in a way it does not know
        why = f" ({type(error).__name__}: {error})"
    raise ValueError(
        f"{type(model).__name__} does not keep documents of one row apart{why}: set pack: false, which gives each a row"
    )


@torch.no_grad()
def _keeps_apart(small: Any, with_masks: bool) -> bool:
    tokens = torch.arange(_FIRST + _SECOND)[None] * 7 % 16 + 16
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]
    masks = {"attention_mask": masks_of(small, positions)} if with_masks else {}
    together = small(input_ids=tokens, position_ids=positions, use_cache=False, **masks).logits[:, _FIRST:]
    alone = small(input_ids=tokens[:, _FIRST:], position_ids=positions[:, _FIRST:], use_cache=False).logits
    return float((together - alone).norm()) <= _TOLERANCE * float(alone.norm())


def masks_of(model: Any, positions: torch.Tensor) -> Any:
    """For `attention_mask`: a mask, or one for each kind of layer; `positions` are [rows, tokens]."""
    from transformers.masking_utils import create_masks_for_generate

    like = torch.empty((), dtype=model.dtype, device=positions.device).expand(*positions.shape, 1)
    return create_masks_for_generate(model.config, like, None, None, position_ids=positions)
