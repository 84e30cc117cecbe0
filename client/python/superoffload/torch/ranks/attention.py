"""Attention over whole sequences by torch's kernels, in memory that grows with their length and not with its square.

Packed rows are computed sequence by sequence, and windows block by block, since a mask would have an element for each
pair of tokens. Tensors are [batch, heads, sequence, size], as in torch; keys may have fewer heads than queries.
"""

import dataclasses
from collections.abc import Sequence

import torch

_ALIGNED = 8  # elements of a head that kernels read at once


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention of one layer.

    ``window``: a token sees so many, itself and those before it. ``sinks``: [heads], the logit of what each head
    attends to beside all tokens, and that has no value.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """``lengths``: of the sequences that are packed into each row; without it each row is one."""
        if lengths is None:
            return self._of_sequences(query, key, value)
        rows = []
        for row, of_row in enumerate(lengths):
            parts = [each[row : row + 1].split(list(of_row), dim=2) for each in (query, key, value)]
            rows.append(torch.cat([self._of_sequences(*part) for part in zip(*parts, strict=True)], dim=2))
        return torch.cat(rows)

    def _of_sequences(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length = query.shape[2]
        if self.window is None or length <= self.window:
            return self._of_kernel(query, key, value)
        window = self.window
        first = self._of_kernel(*(each[:, :, :window] for each in (query, key, value)))
        # Each further block of queries sees keys of its own block and of the one before.
        missing = -length % window
        blocks = [torch.nn.functional.pad(each, (0, 0, 0, missing)) for each in (query, key, value)]
        own = _fold(blocks[0][:, :, window:], window, window)
        keys, values = (_fold(each, 2 * window, window) for each in blocks[1:])
        places = torch.arange(2 * window, dtype=torch.int64, device=query.device)
        distance = window + places[:window, None] - places[None, :]
        others = self._of_kernel(own, keys, values, (distance >= 0) & (distance < window))
        others = others.unflatten(0, (query.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        return torch.cat([first, others], dim=2)[:, :, :length]

    def _of_kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        size = value.shape[3]
        if self.sinks is not None:
            query, key, value, mask = _add_sinks(query, key, value, mask, self.sinks / self.scale)
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=self.causal and mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output if self.sinks is None else output[:, :, 1:, :size]


def _fold(tensor: torch.Tensor, length: int, step: int) -> torch.Tensor:
    """[batch, heads, sequence, size] -> [batch * blocks, heads, length, size], where a block begins at each step."""
    return tensor.unfold(2, length, step).transpose(1, 2).flatten(0, 1).transpose(2, 3)


def _add_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A first token that every other one attends to, as much as the sink of its head says, and that has no value.

    ``sinks``: [heads], before they are scaled. Heads become wider by what kernels read at once: in the first element of
    that the queries have the sink, and the first token's key has 1.
    """
    size = query.shape[3]
    query, key, value = (torch.nn.functional.pad(each, (0, _ALIGNED, 1, 0)) for each in (query, key, value))
    last = torch.tensor(size, dtype=torch.int64, device=query.device)
    place = torch.nn.functional.one_hot(last, size + _ALIGNED).to(query.dtype)
    first = torch.zeros(key.shape[2], 1, dtype=key.dtype, device=key.device)
    first[0] = 1
    if mask is not None:
        mask = torch.nn.functional.pad(torch.nn.functional.pad(mask, (0, 0, 1, 0)), (1, 0), value=True)
    return query + sinks.to(query.dtype)[:, None, None] * place, key + first * place, value, mask
