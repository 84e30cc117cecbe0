"""Whether a model computes on parts of sequences what it computes on whole ones, tried on a miniature of it.

The miniature has the model's class and configuration, but random weights, narrow layers and only as many of them as
have every kind. Threads with a copy each stand for ranks, on the CPU in fp32. Their outputs and gradients together are
compared with those of whole sequences.
"""

import copy
import dataclasses
import itertools
import math
import re
import threading
from collections.abc import Sequence
from typing import Any

import torch

from superoffload._core.error import Error
from superoffload.torch.ranks import narrowing
from superoffload.torch.ranks.divided_attention import REMEDY, DividedAttention, divides, layers, refused

_ROWS = 2
_PART = 12  # tokens of a row on a rank
_VOCABULARY = 64
_LIMIT = 1 << 27  # parameters
_TOLERANCE = 5e-3  # of norms; rounding makes 1e-6 in most families, and tokens that are not seen 1e-2 and more


@dataclasses.dataclass
class _Module:
    """What a module took and gave, [rows, tokens, ...], in its first call."""

    kind: str
    input: Any
    output: Any


@dataclasses.dataclass
class _Run:
    """What a model computes of whole sequences, or of their parts put together."""

    output: torch.Tensor
    gradients: list[torch.Tensor]
    modules: dict[str, _Module]  # as they ended


def check(model: Any, without: Sequence[str] = ()) -> None:
    """Raises where they differ, and where no miniature can be made; ``without``: what its configuration has not."""
    from transformers import PreTrainedModel

    original = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
    if original is None:
        raise refused(f"{type(model).__name__} is no model of transformers; {REMEDY}")
    kind = _kind_of(original)
    ranks = next(ranks for ranks in itertools.count(2) if divides(original.config, ranks))
    doing = "made"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each rank's thread would start as many
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
            torch.manual_seed(0)
            models = [_make(kind, original, without)]
            models += [copy.deepcopy(models[0]) for _ in range(ranks)]
            tokens = torch.randint(
                _VOCABULARY // 4, _VOCABULARY // 2, (_ROWS, ranks * _PART), dtype=torch.int64, device="cpu"
            )
            doing = "computed on whole sequences"
            whole = _run(models[:1], tokens)
            doing = "computed on parts of sequences"
            parts = _run(models[1:], tokens)
    except Error as error:
        raise refused(f"in {kind.__name__}, {error.message.removeprefix(refused('').message)}") from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise refused(f"{kind.__name__} cannot be tried: a small one cannot be {doing} ({why}); {REMEDY}") from error
    finally:
        torch.set_num_threads(threads)
    _compare(kind.__name__, whole, parts)


def make(original: Any) -> Any:
    """A miniature of a model of transformers', in fp32 on the CPU, not in training mode; nothing random is drawn.

    ValueError, or what else the model raises: there is none.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return _make(_kind_of(original), original, ())


def _kind_of(original: Any) -> Any:
    return next(each for each in type(original).__mro__ if not each.__name__.startswith("FSDP"))


def _make(kind: Any, original: Any, without: Sequence[str]) -> Any:
    config = copy.deepcopy(original.config)
    narrowing.narrow(config, _depth(original), _VOCABULARY)
    for name in without:
        setattr(config, name, None)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(config).parameters())
    if count > _LIMIT:
        raise ValueError(f"it still has {count} parameters")
    model = kind(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # what begins at 0 would hide what it multiplies
            scale = 0.1 if parameter.ndim < 2 else 0.5 / math.sqrt(parameter.shape[-1])
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return model.requires_grad_(True)


def _depth(model: Any) -> int:
    """How many of the first layers have every kind of layer."""
    by_list: dict[str, list[Any]] = {}
    for name, layer in layers(model).items():
        by_list.setdefault(name.rpartition(".")[0], []).append(
            tuple(
                (inner, type(module).__name__, tuple(sorted((k, v) for k, v in vars(module).items() if _tells(k, v))))
                for inner, module in layer.named_modules()
            )
        )
    return max((max(each.index(kind) for kind in set(each)) + 1 for each in by_list.values()), default=1)


def _tells(name: str, value: Any) -> bool:
    """Whether an attribute tells a layer's kind."""
    return isinstance(value, bool | int | str) and not re.search("idx|index", name) and not name.startswith("_")


class _ThreadRanks:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, sent: list[Any]) -> None:
        self.number = len(sent)
        self.rank = rank
        self._barrier = barrier
        self._sent = sent

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        self._sent[self.rank] = part
        self._barrier.wait()
        everybody = list(self._sent)
        self._barrier.wait()
        return everybody

    def swap(self, by_rank: torch.Tensor) -> torch.Tensor:
        return torch.stack([each[self.rank] for each in self.gather(by_rank)])


def _run(models: Sequence[Any], tokens: torch.Tensor) -> _Run:
    """One model for each part of the sequences."""
    positions = torch.arange(tokens.shape[1], dtype=torch.int64, device="cpu").expand_as(tokens)
    barrier = threading.Barrier(len(models), timeout=60)
    sent: list[Any] = [None] * len(models)
    outputs: list[Any] = [None] * len(models)
    kept: list[dict[str, _Module]] = [{} for _ in models]
    errors: list[Exception] = []

    def forward(rank: int) -> None:
        try:
            outputs[rank] = models[rank](input_ids=parts[rank][0], position_ids=parts[rank][1])[0]
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            errors.append(error)
            barrier.abort()

    parts = list(zip(tokens.chunk(len(models), dim=1), positions.chunk(len(models), dim=1), strict=True))
    for rank, model in enumerate(models):
        if len(models) > 1:
            DividedAttention(model, _ThreadRanks(rank, barrier, sent), f"superoffload_ulysses_miniature_{rank}")
        _follow(model, kept[rank])
    threads = [threading.Thread(target=forward, args=(rank,)) for rank in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    output = torch.cat(outputs, dim=1)
    classes = output.shape[-1]
    torch.nn.functional.cross_entropy(output.float().reshape(-1, classes), tokens.flatten() % classes).backward()
    of_ranks = zip(*(model.parameters() for model in models), strict=True)
    gradients = [
        torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in of_each]).sum(dim=0)
        for of_each in of_ranks
    ]
    modules = {}
    for name in kept[0]:
        of_each = [of_rank[name] for of_rank in kept if name in of_rank]
        taken, given = (_put_together([getattr(m, which) for m in of_each]) for which in ("input", "output"))
        modules[name] = _Module(of_each[0].kind, taken, given)
    return _Run(output.detach(), gradients, modules)


def _follow(model: Any, kept: dict[str, _Module]) -> None:
    for name, module in model.named_modules():
        if name and not type(module).__module__.startswith("torch."):

            def keep(module: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                taken = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
                given = output[0] if isinstance(output, tuple) else output
                kept.setdefault(name, _Module(type(module).__name__, taken, given))

            module.register_forward_hook(keep, with_kwargs=True)


def _put_together(parts: list[Any]) -> torch.Tensor | None:
    if all(isinstance(part, torch.Tensor) and part.ndim == 3 for part in parts):
        return torch.cat(parts, dim=1).detach()
    return None


def _compare(kind: str, whole: _Run, parts: _Run) -> None:
    norm = torch.stack([gradient.norm() for gradient in whole.gradients]).norm()
    least = float(norm) / 100  # smaller ones may be nothing but rounding
    pairs = zip(whole.gradients, parts.gradients, strict=True)
    differences = [_difference(expected, found, least) for expected, found in pairs]
    difference = max(*differences, _difference(whole.output, parts.output))
    if difference < _TOLERANCE:
        return
    culprit = "the model"
    for name, expected in whole.modules.items():
        found = parts.modules.get(name, expected)
        if _same(expected.input, found.input) and not _same(expected.output, found.output):
            culprit = f"{name} ({expected.kind})"
            break
    raise refused(
        f"{kind} computes something else on parts of sequences (up to {difference:.1e} of a gradient): {culprit} needs "
        f"other ranks' tokens, and not by transformers' attention alone; {REMEDY}"
    )


def _same(expected: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    if expected is None or found is None or expected.shape != found.shape:
        return True
    return _difference(expected, found) < _TOLERANCE


def _difference(expected: torch.Tensor, found: torch.Tensor, least: float = 0.0) -> float:
    if expected.shape != found.shape:
        return math.inf
    return float((expected - found).norm()) / max(float(expected.norm()), least, 1e-30)
