"""Sequence parallelism for Hugging Face models (Ulysses): parts of a sequence, and in attention parts of the heads.

    parallel = superoffload.torch.ulysses.SequenceParallel(model, ranks=2)
    for batch in parallel.batches(loader):
        loss = parallel.loss(model(**batch.inputs).logits, batch.targets)
        loss.backward()  # under FSDP2 or DistributedDataParallel over all ranks

Outside of attention each rank computes its part of the sequence. Before attention an all-to-all gives each rank the
whole sequence of its part of the heads, and afterwards another one gives back its part of the sequence for all heads.
The ranks of torch.distributed are data-parallel groups of ``ranks`` consecutive ones. Gradients are averaged over all
ranks; ``loss`` weights tokens so that the average is the gradient of the mean over all targets.

With ``attention="deepspeed"`` DeepSpeed's UlyssesSPAttentionHF does the exchange around the model's own attention
kernel (DeepSpeed has to be installed; no engine of it is used).
"""

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import grpc
import torch
import torch.distributed

from superoffload._core.error import Error
from superoffload.torch.ranks import miniature
from superoffload.torch.ranks.divided_attention import (
    PACKED,
    DividedAttention,
    GroupRanks,
    divides,
    refused,
    ropes_by_length,
)

_IGNORED = -100  # a target that no token has
_made = 0


@dataclasses.dataclass
class Batch:
    """This rank's part of a batch."""

    inputs: dict[str, torch.Tensor]  # arguments of the model: input_ids and position_ids, [batch, sequence / ranks]
    targets: torch.Tensor  # the next token of each, or -100


class SequenceParallel:
    """Has the attention of ``model`` work across ``ranks`` ranks. All ranks make one, in the same order.

    Models that compute something else on parts of sequences are refused. ``attention``: whose; ``rows``: of each batch,
    which DeepSpeed's has to know. It serves one model of a process.
    """

    def __init__(
        self, model: Any, ranks: int, *, attention: Literal["own", "deepspeed"] = "own", rows: int = 1
    ) -> None:
        if attention not in ("own", "deepspeed"):
            raise ValueError(f'attention is {attention!r} but must be "own" or "deepspeed"')
        world = torch.distributed.get_world_size()
        if ranks < 1 or world % ranks != 0:
            raise refused(f"{world} ranks are not divisible by {ranks} ranks of a sequence; choose a divisor")
        self.ranks = ranks
        self.rank = torch.distributed.get_rank() % ranks
        _check_model(model, ranks, attention)
        self._takes = inspect.signature(model.forward).parameters
        self._rows: int | None = None  # None: any number
        self._packs = True  # rows may have several sequences
        if attention == "deepspeed" and ranks > 1:
            self.group = self._register_deepspeed(model, rows)
        else:
            self.group = self._make_groups(world)
            global _made
            _made += 1
            DividedAttention(model, GroupRanks(self.group, ranks, self.rank), f"superoffload_ulysses_{_made}")

    def _make_groups(self, world: int) -> Any:
        own = None
        for first in range(0, world, self.ranks):
            members = list(range(first, first + self.ranks))
            group = torch.distributed.new_group(members)
            if torch.distributed.get_rank() in members:
                own = group
        return own

    def _register_deepspeed(self, model: Any, rows: int) -> Any:
        try:
            import deepspeed.comm
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        except ImportError as error:
            raise refused('attention="deepspeed" needs DeepSpeed: install it, or leave attention= out') from error
        kernel = model.config._attn_implementation
        self._rows, self._packs = rows, kernel != "sdpa"
        if ropes_by_length(model):
            raise refused(
                "with DeepSpeed's attention ranks do not know the length that rope needs; leave attention= out"
            )
        if any(getattr(module, "sinks", None) is not None for module in model.modules()):
            raise refused("DeepSpeed does not divide attention sinks among ranks; leave attention= out")
        if not self._packs and getattr(model.config.get_text_config(), "sliding_window", None) is not None:
            raise refused("DeepSpeed drops the mask of a sliding window; use a flash kernel, or leave attention= out")
        if not deepspeed.comm.is_initialized():
            deepspeed.comm.init_distributed(dist_backend=torch.distributed.get_backend())
        groups = UlyssesSPAttentionHF.register_with_transformers(model, kernel, self.ranks, rows)
        return groups.get_sequence_parallel_group()

    def batches(self, loader: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[Batch]:
        """This rank's parts of the batches that the first rank of each sequence loads.

        A batch has input_ids, [batch, sequence], and may have labels (else the tokens themselves) and position_ids,
        which begin at 0 in each sequence of a packed row. Rows are padded to a multiple of ``ranks``.
        """
        batches = iter(loader)
        first = torch.distributed.get_global_rank(self.group, 0)
        while True:
            sent = [next(batches, None)]
            if self.ranks > 1:
                torch.distributed.broadcast_object_list(sent, src=first, group=self.group)
            if sent[0] is None:
                return
            yield self.part(sent[0])

    def part(self, batch: Mapping[str, torch.Tensor]) -> Batch:
        """This rank's part of a batch that all ranks of its sequence have."""
        mask = batch.get("attention_mask")
        if mask is not None and not bool((mask == 1).all()):
            raise refused("a batch has an attention_mask with padding; pack sequences with position_ids instead")
        for name in batch.keys() - {"input_ids", "labels", "position_ids", "attention_mask"}:
            if name in self._takes or name in PACKED:
                raise refused(
                    f"a batch has {name}, which is not divided among ranks; take it out, or train with ranks=1"
                )
        tokens = batch["input_ids"]
        labels = batch.get("labels", tokens)
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device)
        positions = positions.expand_as(tokens)
        if not self._packs and bool(((positions == 0).sum(dim=1) > 1).any()):
            raise refused("DeepSpeed drops the masks of packed rows; use a flash kernel, or leave attention= out")
        if self._rows not in (None, tokens.shape[0]):
            raise refused(f"a batch has {tokens.shape[0]} rows, but rows={self._rows} was given")
        targets = targets_of(labels, positions)
        missing = -tokens.shape[1] % self.ranks
        # Rope that depends on the length has to see that of the tokens, so padding does not count on.
        positions = torch.cat([positions, positions[:, -1:].expand(-1, missing)], dim=1)
        tokens = torch.nn.functional.pad(tokens, (0, missing))
        targets = torch.nn.functional.pad(targets, (0, missing), value=_IGNORED)
        parts = [tensor.chunk(self.ranks, dim=1)[self.rank].contiguous() for tensor in (tokens, positions, targets)]
        return Batch({"input_ids": parts[0], "position_ids": parts[1]}, parts[2])

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy. Its average over all ranks is the mean over all targets of all ranks, and so are gradients."""
        total, count = sums(logits, targets)
        torch.distributed.all_reduce(count)
        return total * torch.distributed.get_world_size() / count.clamp(min=1)


def sums(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of a batch's part, added up over its targets; and how many these are."""
    total = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum"
    )
    return total, (targets != _IGNORED).sum()


def targets_of(labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The next label of each token, [batch, sequence]; -100 where the next token begins another sequence."""
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    return targets.masked_fill(torch.nn.functional.pad(positions[:, 1:] == 0, (0, 1)), _IGNORED)


def _check_model(model: Any, ranks: int, attention: str) -> None:
    config = model.config.get_text_config()
    if not divides(config, ranks):
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        raise refused(
            f"{heads} attention heads with {shared} keys cannot be divided among {ranks} ranks; the ranks of a "
            "sequence must divide the heads, and divide the keys or be a multiple of them"
        )
    if ranks == 1:
        return
    verdict: list[str | None] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            # DeepSpeed leaves soft caps to the model's kernel.
            miniature.check(model, without=("attn_logit_softcapping",) if attention == "deepspeed" else ())
        except Error as error:
            verdict = [error.message]
    torch.distributed.broadcast_object_list(verdict)  # all go on, or none
    if verdict[0] is not None:
        raise Error(grpc.StatusCode.UNIMPLEMENTED, verdict[0])
