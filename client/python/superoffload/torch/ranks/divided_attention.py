"""Ulysses' attention for transformers: ranks exchange parts of a sequence for parts of the heads, and back."""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import torch
import torch.distributed
import torch.distributed.nn.functional

from superoffload._core.error import Error
from superoffload.torch.ranks.attention import Attention

_REFUSED = -1  # the positions that a rank sends when it refuses its arguments, so that all ranks refuse them
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # other ways than position_ids to tell where sequences begin
REMEDY = "train it with ranks=1"


class Ranks(Protocol):
    """Those that share a sequence."""

    number: int
    rank: int

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """What each of them passes here."""

    def swap(self, by_rank: torch.Tensor) -> torch.Tensor:
        """[rank, ...], for each of them -> [rank, ...], from each of them, through which gradients go back."""


class GroupRanks:
    """A process group."""

    def __init__(self, group: Any, number: int, rank: int) -> None:
        self.number = number
        self.rank = rank
        self._group = group

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        everybody = [torch.empty_like(part) for _ in range(self.number)]
        torch.distributed.all_gather(everybody, part.contiguous(), group=self._group)
        return everybody

    def swap(self, by_rank: torch.Tensor) -> torch.Tensor:
        sent = by_rank.contiguous()
        received = torch.empty_like(sent)
        return torch.distributed.nn.functional.all_to_all_single(received, sent, group=self._group)


class DividedAttention:
    """The attention of one model. ``name``: under which transformers finds it."""

    def __init__(self, model: Any, ranks: Ranks, name: str) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._ranks = ranks
        self._lengths: list[list[int]] | None = None  # of packed sequences
        self._last = 0  # the largest position of the whole sequences
        self._padded = False
        self._calls = 0
        ALL_ATTENTION_FUNCTIONS.register(name, self._attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _no_mask)
        model.set_attn_implementation(name)
        self._arguments = list(inspect.signature(model.forward).parameters)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        if ranks.number > 1:
            self._watch_layers(model)
            self._show_whole_length(model)

    def _watch_layers(self, model: Any) -> None:
        watched = layers(model)
        if not watched:
            raise refused(f"{type(model).__name__} has no list of layers whose attention could be followed; {REMEDY}")
        types = getattr(model.config.get_text_config(), "layer_types", None) or []
        for name, layer in watched.items():
            of_type = types[int(name.rpartition(".")[2]) :][:1]
            self._watch(f"{name} ({', '.join([type(layer).__name__, *of_type])})", layer)

    def _watch(self, name: str, layer: Any) -> None:
        before = 0  # calls until the layer began

        def enter(module: Any, args: Any) -> None:
            nonlocal before
            before = self._calls

        def leave(module: Any, args: Any, output: Any) -> None:
            if before == self._calls:
                raise refused(
                    f"{name} did not call the attention of SequenceParallel, so that its tokens see none of other "
                    f"ranks; {REMEDY}, or take out a later set_attn_implementation()"
                )

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)

    def _show_whole_length(self, model: Any) -> None:
        """Rope that depends on the length takes it from the largest position: one more shows that of all ranks."""

        def append(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
            positions = bound.arguments["position_ids"]
            last = positions.new_full((*positions.shape[:-1], 1), self._last)
            bound.arguments["position_ids"] = torch.cat([positions, last], dim=-1)
            return bound.args, bound.kwargs

        def cut(module: Any, args: Any, output: Any) -> Any:
            return tuple(each[..., :-1, :] for each in output)

        for module in ropes_by_length(model):
            module.register_forward_pre_hook(append, with_kwargs=True)
            module.register_forward_hook(cut)

    def _before_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        arguments = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        positions = arguments.get("position_ids")
        if positions is None:
            raise refused("position_ids are missing, without which a rank does not know its place in the sequence")
        if positions.ndim != 2:
            raise refused(f"position_ids have {positions.ndim} axes but must be [batch, sequence / ranks]; {REMEDY}")
        if _masks(arguments):
            positions = torch.full_like(positions, _REFUSED)
        whole = torch.cat(list(self._ranks.gather(positions)), dim=1).cpu()
        if bool((whole == _REFUSED).any()):
            raise refused(
                f"a rank's model got an attention_mask, {', '.join(PACKED)}, which other ranks would not see; leave "
                "them out, and pack sequences with position_ids that begin at 0 in each"
            )
        steps = whole.diff(dim=1)
        follows = (steps == 1) | (whole[:, 1:] == 0)
        padding = self._ranks.number - 1  # the last position may be repeated so often
        follows[:, follows.shape[1] - padding :] |= steps[:, follows.shape[1] - padding :] == 0
        if not bool(follows.all()):
            raise refused("position_ids neither go on by 1 nor begin again at 0; they say where packed sequences begin")
        begins = [{0, *row.nonzero().flatten().tolist(), whole.shape[1]} for row in whole == 0]
        lengths = [[end - begin for begin, end in itertools.pairwise(sorted(row))] for row in begins]
        self._lengths = lengths if any(len(row) > 1 for row in lengths) else None
        self._last = int(whole.max())
        self._padded = bool(((steps[:, -1:] == 0) & (whole[:, -1:] != 0)).any())

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
        self._calls += 1
        for name in ("softcap", "position_bias"):
            if options.get(name) is not None:
                raise refused(f"attention with {name} is not supported across ranks; {REMEDY}")
        if attention_mask is not None:
            raise refused(f"{type(module).__name__} makes a mask of its own, which lacks other ranks' tokens; {REMEDY}")
        number = self._ranks.number
        heads, shared = query.shape[1], key.shape[1]
        if shared % number != 0:  # a rank's heads all have the same key
            key, value = (each.repeat_interleave(number // shared, dim=1) for each in (key, value))
        query, key, value = (self._gather_sequence(each) for each in (query, key, value))
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if self._padded and not causal:
            raise refused(f"attention to both sides sees padding; give batches a length that {number} ranks divide")
        if sliding_window is not None and not causal:
            raise refused(f"attention with a window to both sides is not supported across ranks; {REMEDY}")
        sinks = options.get("s_aux")
        attention = Attention(
            scale=scaling or query.shape[3] ** -0.5,
            causal=causal,
            window=sliding_window,
            sinks=None if sinks is None else sinks.chunk(number)[self._ranks.rank],
            dropout=dropout,
        )
        output = attention(query, key, value, self._lengths)
        assert output.shape[1] * number == heads
        return self._gather_heads(output), None

    def _gather_sequence(self, part: torch.Tensor) -> torch.Tensor:
        """[batch, heads, sequence / ranks, size] -> [batch, heads / ranks, sequence, size]"""
        batch, heads, length, size = part.shape
        number = self._ranks.number
        by_rank = part.reshape(batch, number, heads // number, length, size).transpose(0, 1)
        mine = self._ranks.swap(by_rank).permute(1, 2, 0, 3, 4)
        return mine.reshape(batch, heads // number, number * length, size)

    def _gather_heads(self, part: torch.Tensor) -> torch.Tensor:
        """[batch, heads / ranks, sequence, size] -> [batch, sequence / ranks, heads, size]"""
        batch, heads, length, size = part.shape
        number = self._ranks.number
        by_rank = part.reshape(batch, heads, number, length // number, size).permute(2, 0, 3, 1, 4)
        mine = self._ranks.swap(by_rank).permute(1, 2, 0, 3, 4)
        return mine.reshape(batch, length // number, number * heads, size)


def divides(config: Any, ranks: int) -> bool:
    """Whether so many ranks can share the heads of a model."""
    heads = getattr(config.get_text_config(), "num_attention_heads", None) or 0
    keys = getattr(config.get_text_config(), "num_key_value_heads", None) or heads
    return heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)  # always where there are none


def layers(model: Any) -> dict[str, Any]:
    """The model's layers by name, out of its lists but for those within others."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.ModuleList)}
    found = {}
    for name, each in lists.items():
        if not any(name.startswith(f"{other}.") for other in lists):
            for i, layer in enumerate(each):
                if len(each) == count or isinstance(layer, GradientCheckpointingLayer):
                    found[f"{name}.{i}"] = layer
    return found


def ropes_by_length(model: Any) -> list[Any]:
    """The modules whose rope depends on the length."""
    found = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]  # of each type of layer
        if any(each is not None and ("dynamic" in each or each == "longrope") for each in kinds):
            found.append(module)
    return found


def refused(what: str) -> Error:
    return Error(grpc.StatusCode.UNIMPLEMENTED, f"sequence parallelism: {what}")


def _masks(arguments: dict[str, Any]) -> bool:
    """Whether they say more about who sees whom than position_ids do."""
    mask = arguments.get("attention_mask")
    full = mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask == 1).all()))
    return not full or any(arguments.get(name) is not None for name in PACKED)


def _no_mask(*_: Any, mask_function: Any, use_vmap: bool = False, **__: Any) -> None:
    """Who sees whom follows from all ranks' positions, but for what a model adds to that."""
    if use_vmap or _adds(mask_function):
        raise refused(f"the model adds to its causal mask (tokens of an image see each other, for one); {REMEDY}")


def _adds(mask_function: Any) -> bool:
    """Whether transformers made it of a mask and more, or of what it had made so: packed rows put theirs around it."""
    inner = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    functions = [each for value in inner for each in (value if isinstance(value, tuple) else (value,))]
    return mask_function.__qualname__.startswith("or_masks") or any(map(_adds, filter(inspect.isfunction, functions)))
