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
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import grpc
import torch
import torch.distributed
import torch.distributed.nn.functional

from superoffload._core.error import Error
from superoffload.torch.attention import Attention

_IGNORED = -100  # a target that no token has
_made = 0


@dataclasses.dataclass
class Batch:
    """This rank's part of a batch."""

    inputs: dict[str, torch.Tensor]  # arguments of the model: input_ids and position_ids, [batch, sequence / ranks]
    targets: torch.Tensor  # the next token of each, or -100


class SequenceParallel:
    """Has the attention of ``model`` work across ``ranks`` ranks. All ranks make one, in the same order.

    ``attention``: whose; ``rows``: of each batch, which DeepSpeed's has to know. It serves one model of a process.
    """

    def __init__(
        self, model: Any, ranks: int, *, attention: Literal["own", "deepspeed"] = "own", rows: int = 1
    ) -> None:
        if attention not in ("own", "deepspeed"):
            raise ValueError(f'attention is {attention!r} but must be "own" or "deepspeed"')
        world = torch.distributed.get_world_size()
        if ranks < 1 or world % ranks != 0:
            raise _refused(f"{world} ranks are not divisible by {ranks} ranks of a sequence; choose a divisor")
        self.ranks = ranks
        self.rank = torch.distributed.get_rank() % ranks
        _check_model(model, ranks)
        self._lengths: list[list[int]] | None = None  # of packed sequences
        self._rows: int | None = None  # None: any number
        self._packs = True  # rows may have several sequences
        if attention == "deepspeed" and ranks > 1:
            self.group = self._register_deepspeed(model, rows)
        else:
            self.group = self._make_groups(world)
            self._register(model)

    def _make_groups(self, world: int) -> Any:
        own = None
        for first in range(0, world, self.ranks):
            members = list(range(first, first + self.ranks))
            group = torch.distributed.new_group(members)
            if torch.distributed.get_rank() in members:
                own = group
        return own

    def _register(self, model: Any) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        global _made
        _made += 1
        name = f"superoffload_ulysses_{_made}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attention)
        # Which tokens see each other follows from all ranks' positions.
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, lambda *_, **__: None)
        model.set_attn_implementation(name)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _register_deepspeed(self, model: Any, rows: int) -> Any:
        try:
            import deepspeed.comm
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        except ImportError as error:
            raise _refused('attention="deepspeed" needs DeepSpeed: install it, or leave attention= out') from error
        kernel = model.config._attn_implementation
        self._rows, self._packs = rows, kernel != "sdpa"
        if any(getattr(module, "sinks", None) is not None for module in model.modules()):
            raise _refused("DeepSpeed does not divide attention sinks among ranks; leave attention= out")
        if not self._packs and getattr(model.config.get_text_config(), "sliding_window", None) is not None:
            raise _refused("DeepSpeed drops the mask of a sliding window; use a flash kernel, or leave attention= out")
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
            raise _refused("a batch has an attention_mask with padding; pack sequences with position_ids instead")
        tokens = batch["input_ids"]
        labels = batch.get("labels", tokens)
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device)
        positions = positions.expand_as(tokens)
        if not self._packs and bool(((positions == 0).sum(dim=1) > 1).any()):
            raise _refused("DeepSpeed drops the masks of packed rows; use a flash kernel, or leave attention= out")
        if self._rows not in (None, tokens.shape[0]):
            raise _refused(f"a batch has {tokens.shape[0]} rows, but rows={self._rows} was given")
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        # The first token of the next sequence is nobody's target.
        targets = targets.masked_fill(torch.nn.functional.pad(positions[:, 1:] == 0, (0, 1)), _IGNORED)
        missing = -tokens.shape[1] % self.ranks
        more = positions[:, -1:] + torch.arange(1, missing + 1, dtype=torch.int64, device=tokens.device)
        positions = torch.cat([positions, more], dim=1)
        tokens = torch.nn.functional.pad(tokens, (0, missing))
        targets = torch.nn.functional.pad(targets, (0, missing), value=_IGNORED)
        parts = [tensor.chunk(self.ranks, dim=1)[self.rank].contiguous() for tensor in (tokens, positions, targets)]
        return Batch({"input_ids": parts[0], "position_ids": parts[1]}, parts[2])

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy. Its average over all ranks is the mean over all targets of all ranks, and so are gradients."""
        total = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum"
        )
        count = (targets != _IGNORED).sum()
        torch.distributed.all_reduce(count)
        return total * torch.distributed.get_world_size() / count.clamp(min=1)

    def _before_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        if positions is None:
            raise _refused("position_ids are missing, without which a rank does not know its place in the sequence")
        everybody = [torch.empty_like(positions) for _ in range(self.ranks)]
        torch.distributed.all_gather(everybody, positions.contiguous(), group=self.group)
        whole = torch.cat(everybody, dim=1)
        begins = [{0, *row.nonzero().flatten().tolist(), whole.shape[1]} for row in whole == 0]
        lengths = [[end - begin for begin, end in itertools.pairwise(sorted(row))] for row in begins]
        self._lengths = lengths if any(len(row) > 1 for row in lengths) else None

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """For transformers: [batch, heads, sequence / ranks, size] -> [batch, sequence / ranks, heads, size]."""
        for name in ("softcap", "position_bias"):
            if options.get(name) is not None:
                raise _refused(f"attention with {name} is not supported across ranks; train with ranks=1")
        heads, shared = query.shape[1], key.shape[1]
        if shared % self.ranks != 0:  # a rank's heads all have the same key
            key, value = (each.repeat_interleave(self.ranks // shared, dim=1) for each in (key, value))
        query, key, value = (self._gather_sequence(each) for each in (query, key, value))
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if sliding_window is not None and not causal:
            raise _refused("attention with a window to both sides is not supported across ranks; train with ranks=1")
        sinks = options.get("s_aux")
        attention = Attention(
            scale=scaling or query.shape[3] ** -0.5,
            causal=causal,
            window=sliding_window,
            sinks=None if sinks is None else sinks.chunk(self.ranks)[self.rank],
            dropout=dropout,
        )
        output = attention(query, key, value, self._lengths)
        assert output.shape[1] * self.ranks == heads
        return self._gather_heads(output), None

    def _gather_sequence(self, part: torch.Tensor) -> torch.Tensor:
        """[batch, heads, sequence / ranks, size] -> [batch, heads / ranks, sequence, size]"""
        batch, heads, length, size = part.shape
        by_rank = part.reshape(batch, self.ranks, heads // self.ranks, length, size).transpose(0, 1)
        mine = self._exchange(by_rank).permute(1, 2, 0, 3, 4)
        return mine.reshape(batch, heads // self.ranks, self.ranks * length, size)

    def _gather_heads(self, part: torch.Tensor) -> torch.Tensor:
        """[batch, heads / ranks, sequence, size] -> [batch, sequence / ranks, heads, size]"""
        batch, heads, length, size = part.shape
        by_rank = part.reshape(batch, heads, self.ranks, length // self.ranks, size).permute(2, 0, 3, 1, 4)
        mine = self._exchange(by_rank).permute(1, 2, 0, 3, 4)
        return mine.reshape(batch, length // self.ranks, self.ranks * heads, size)

    def _exchange(self, by_rank: torch.Tensor) -> torch.Tensor:
        sent = by_rank.contiguous()
        received = torch.empty_like(sent)
        return torch.distributed.nn.functional.all_to_all_single(received, sent, group=self.group)


def _check_model(model: Any, ranks: int) -> None:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks != 0 or (shared % ranks != 0 and ranks % shared != 0):
        raise _refused(
            f"{heads} attention heads with {shared} keys cannot be divided among {ranks} ranks; the ranks of a "
            "sequence must divide the heads, and divide the keys or be a multiple of them"
        )


def _refused(what: str) -> Error:
    return Error(grpc.StatusCode.UNIMPLEMENTED, f"sequence parallelism: {what}")
