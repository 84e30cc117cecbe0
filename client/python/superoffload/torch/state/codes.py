"""Moments that are kept as codes of 8 bits: here, in bitsandbytes and in torchao."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from superoffload.torch.algorithm import STEP

_AT_A_TIME = 1 << 20  # elements; indices take several times the memory of codes

_BITSANDBYTES_NESTED = "__bnb_optimizer_quant_state__"  # where its state_dict() puts tensors, since 0.48
_BITSANDBYTES_BLOCKS = (256, 2048)  # since 0.44, and before


def decoded(codes: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """The fp32 numbers that codes stand for: ``values[code]`` times the scale of each ``block`` of them, row-major."""
    flat, scales = codes.reshape(-1), scales.reshape(-1)
    numbers = torch.empty(flat.numel(), dtype=torch.float32, device="cpu")
    for first in range(0, flat.numel(), _AT_A_TIME):
        some = numbers[first : first + _AT_A_TIME]
        torch.index_select(values, 0, flat[first : first + _AT_A_TIME].int(), out=some)
        some *= scales[first // block :].repeat_interleave(block)[: some.numel()]
    return numbers.view(codes.shape)


def as_of_torch(state: Mapping[Any, Any], moments: Sequence[str]) -> dict[Any, Any]:
    """``state`` of a state_dict, with the ``moments`` of torch.optim in fp32 where it is bitsandbytes' or torchao's.

    bitsandbytes has ``state1``, ``absmax1``, ``qmap1`` and so on, torchao tensors with codes, scales and their values.
    """
    return {key: _as_of_torch(of, moments) if isinstance(of, Mapping) else of for key, of in state.items()}


def _as_of_torch(of: Mapping[str, Any], moments: Sequence[str]) -> Mapping[str, Any]:
    flat = {**of, **of.get(_BITSANDBYTES_NESTED, {})}
    if "state1" not in flat:
        return {key: _of_torchao(value) for key, value in of.items()}
    found = {moment: _of_bitsandbytes(flat, number) for number, moment in enumerate(moments, start=1)}
    step = torch.tensor(float(flat.get(STEP, 0)), dtype=torch.float32, device="cpu")
    return {STEP: step, **found}


def _of_bitsandbytes(of: Mapping[str, Any], number: int) -> torch.Tensor:
    codes = of[f"state{number}"].cpu()
    if codes.dtype != torch.uint8:
        return codes
    scales = of[f"absmax{number}"].cpu()
    block = next(block for block in _BITSANDBYTES_BLOCKS if math.ceil(codes.numel() / block) == scales.numel())
    return decoded(codes, of[f"qmap{number}"].cpu(), scales, block)


def _of_torchao(value: Any) -> Any:
    if not all(hasattr(value, part) for part in ("codes", "scale", "qmap")):
        return value
    codes, scales = value.codes.cpu(), value.scale.cpu()
    return decoded(codes, value.qmap.cpu(), scales, codes.numel() // scales.numel())
