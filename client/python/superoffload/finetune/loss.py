"""The loss of a model's next tokens, in which the logits of all tokens are never in memory at once.

The output layer computes the loss itself, chunk by chunk, where the model calls it: so its weights are there also
under FSDP2. A model that does something else with its logits (soft caps, scales) is found by comparison, and its logits
are then computed whole.
"""

from typing import Any

import torch
import torch.distributed

from superoffload.finetune.rows import IGNORED

_CHUNK = 1024  # tokens
_TOLERANCE = 1e-2  # of bf16's rounding; a soft cap or a scale makes more
_TRIED_TOKENS = 32


class TokenLoss:
    """Sums of cross entropies over targets."""

    def __init__(self, model: Any) -> None:
        self._targets: torch.Tensor | None = None
        self._head = model.get_output_embeddings()
        self._whole: Any = None if self._head is None else self._head.forward
        self._coefficient = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
        if self._head is not None and isinstance(self._head, torch.nn.Linear):
            self._head.forward = self._forward
        self.is_chunked = self._head is not None and isinstance(self._head, torch.nn.Linear)

    def sums(self, called: Any, inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The sum over all targets, and the loss that balances experts, where the model has one (else None)."""
        self._targets = targets if self.is_chunked else None
        try:
            output = called(**inputs, use_cache=False)
        finally:
            self._targets = None
        balance = getattr(output, "aux_loss", None)
        balance = None if balance is None else self._coefficient * balance
        return (output.logits if self.is_chunked else _sum_of(output.logits, targets)), balance

    @torch.no_grad()
    def compare(self, called: Any, inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> bool:
        """Whether chunks give the loss of whole logits; if not, logits are whole from now on. All ranks call it."""
        if not self.is_chunked:
            return False
        chunked, _ = self.sums(called, inputs, targets)
        self.is_chunked = False
        whole, _ = self.sums(called, inputs, targets)
        differs = (chunked - whole).abs() > _TOLERANCE * whole.abs().clamp(min=1.0)
        differs = differs.float()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(differs, op=torch.distributed.ReduceOp.MAX)
        self.is_chunked = not bool(differs)
        return self.is_chunked

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._targets is None:
            logits: torch.Tensor = self._whole(hidden)
            return logits
        total: torch.Tensor = _ChunkedLoss.apply(
            hidden.flatten(0, -2), self._head.weight, self._head.bias, self._targets.flatten()
        )
        return total


def tried(batch: dict[str, torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
    """So much of a batch as `compare` needs, for so many ranks that share it."""
    return {name: tensor[:1, : _TRIED_TOKENS * ranks] for name, tensor in batch.items()}


def _sum_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


class _ChunkedLoss(torch.autograd.Function):
    """Cross entropy of a linear layer, summed over targets. Gradients are made with it, as Liger's kernel makes them.

    torch 2.13 has linear_cross_entropy, but of bf16 it returns a bf16 sum (1 % off where there are 300 targets), and
    gradients of the weight with four times the rounding of whole logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, hidden], [vocabulary, hidden], [vocabulary], [tokens]; returns a scalar in fp32."""
        total = hidden.new_zeros((), dtype=torch.float32)
        of_hidden, of_weight, of_bias, _ = ctx.needs_input_grad
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        for first in range(0, len(hidden), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            some, wanted = hidden[chunk], targets[chunk]
            logits = torch.nn.functional.linear(some, weight, bias).float()
            if not any(ctx.needs_input_grad):
                total += _sum_of(logits, wanted)
                continue
            counted = (wanted != IGNORED)[:, None]
            wanted = wanted.clamp(min=0)[:, None]
            log_probabilities = torch.log_softmax(logits, dim=-1)
            total -= (log_probabilities.gather(1, wanted) * counted).sum()
            gradient = log_probabilities.exp_()
            gradient.scatter_add_(1, wanted, -torch.ones_like(wanted, dtype=torch.float32))
            gradient = gradient.mul_(counted).to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(gradient, weight, out=hidden_grad[chunk])
            if weight_grad is not None:
                weight_grad += _product(gradient.T, some)
            if bias_grad is not None:
                bias_grad += gradient.sum(0, dtype=torch.float32)
        ctx.save_for_backward(
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias is None or bias_grad is None else bias_grad.to(bias.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        return *(None if gradient is None else gradient * outer[0] for gradient in ctx.saved_tensors), None


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In fp32, to which the products of other chunks are added."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
