"""Operations that a model needs for tokens: causal, without padding and without what is computed again."""

from typing import Any

import torch

from superoffload import plan
from superoffload.finetune.ranks import Ranks
from superoffload.finetune.rows import Rows

# Dense bf16, as NVIDIA's data sheets have it without sparsity.
_PEAKS = {"GH200": 989e12, "H100": 989e12, "H200": 989e12, "GB200": 2.5e15, "GB300": 2.5e15, "B200": 2.25e15}


class Flops:
    """``frozen``: weights get no gradients, so that backward has half of its products."""

    def __init__(self, model: Any, config: Any, frozen: bool, ranks: Ranks) -> None:
        described = plan.describe(model, config)
        shape = described.architecture
        share = shape.experts_per_token / shape.experts if shape.experts else 1.0
        self._products = 0.0  # weights that a token is multiplied with
        for parameter in described.parameters:
            size = torch.Size(parameter.shape).numel()
            is_lookup = parameter.unit == 0 and len(parameter.shape) == 2 and not shape.tied_embeddings
            self._products += 0 if is_lookup else size * (share if "experts" in parameter.name.split(".") else 1.0)
        width = shape.query_heads * (shape.head_dimension + (shape.value_head_dimension or shape.head_dimension))
        self._full, self._windowed = (shape.layers - shape.windowed_layers) * width, shape.windowed_layers * width
        self._window = shape.window
        self._passes = 2 if frozen else 3
        self._peak = 0.0
        if ranks.device.type == "cuda":
            name = torch.cuda.get_device_name(ranks.device)
            self._peak = next((peak for part, peak in _PEAKS.items() if part in name), 0.0) * ranks.count

    def of_rows(self, rows: Rows) -> torch.Tensor:
        """[rows], of forward and backward."""
        seen = rows.positions.double() + 1  # tokens that each sees, itself included
        seen.masked_fill_(torch.arange(rows.tokens.shape[1]) >= rows.used[:, None], 0)
        attention = self._full * seen.sum(dim=1)
        if self._window:
            attention += self._windowed * seen.clamp(max=self._window).sum(dim=1)
        return 2 * self._passes * (self._products * rows.used.double() + attention)

    def mfu(self, flops_per_second: float) -> float | None:
        """Of all ranks' GPUs; None where the peak is not known."""
        return flops_per_second / self._peak if self._peak else None
