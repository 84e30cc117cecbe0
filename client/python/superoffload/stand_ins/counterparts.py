"""What our optimizers are in place of others': the class and its arguments, or why there is none."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import superoffload.torch
from superoffload.stand_ins import imports
from superoffload.torch.optimizer import Optimizer

_TAKEN = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "differentiable")
_SHOWN = ("amsgrad", "foreach", "capturable", "differentiable", "fused")


class NoCounterpart(Exception):
    """The text says why."""


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """``arguments``: all but the parameters. ``shown``: what groups of the original have as well, for who looks."""

    cls: type[Optimizer]
    arguments: dict[str, Any]
    shown: dict[str, Any] = dataclasses.field(default_factory=dict)


def find(asked: type, arguments: Mapping[str, Any]) -> Counterpart:
    """For an object of class ``asked``; raises NoCounterpart. ``arguments``: all of its constructor's, by name."""
    package = asked.__module__.partition(".")[0]
    if (package, asked.__name__) not in _KNOWN:
        raise NoCounterpart("it has no counterpart")
    return _OF_PACKAGES[package](asked, arguments)


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in _TAKEN if name in arguments}


def _refuse_unless(arguments: Mapping[str, Any], harmless: Mapping[str, Any]) -> None:
    for name, value in harmless.items():
        if arguments.get(name, value) != value:
            raise NoCounterpart(f"{name}={arguments[name]!r} has no counterpart")


def _of_torch(asked: type, arguments: Mapping[str, Any]) -> Counterpart:
    """foreach, fused and capturable change how torch computes, and not what."""
    decoupled = asked.__name__ == "AdamW" or arguments.get("decoupled_weight_decay", False)
    shown = {name: arguments[name] for name in _SHOWN if name in arguments}
    cls = superoffload.torch.AdamW if decoupled else superoffload.torch.Adam
    return Counterpart(cls, _given(arguments), {**shown, "decoupled_weight_decay": decoupled})


def _of_bitsandbytes(asked: type, arguments: Mapping[str, Any]) -> Counterpart:
    """Its Adam, too, has decoupled weight decay. Pages are for GPUs whose memory is short."""
    _refuse_unless(arguments, {"min_8bit_size": 4096, "args": None, "percentile_clipping": 100, "block_wise": True})
    name = asked.__name__.removeprefix("Paged")
    eight_bits = name.endswith("8bit") or (not name.endswith("32bit") and arguments.get("optim_bits") == 8)
    cls: type[Optimizer]
    if name.startswith("Lion"):
        cls = superoffload.torch.Lion8bit if eight_bits else superoffload.torch.Lion
    else:
        cls = superoffload.torch.AdamW8bit if eight_bits else superoffload.torch.AdamW
    return Counterpart(cls, _given(arguments))


def _of_deepspeed(asked: type, arguments: Mapping[str, Any]) -> Counterpart:
    _refuse_unless(arguments, {"bias_correction": True, "fp32_optimizer_states": True})
    decoupled = arguments.get("adamw_mode", True)
    return Counterpart(superoffload.torch.AdamW if decoupled else superoffload.torch.Adam, _given(arguments))


def _of_transformers(asked: type, arguments: Mapping[str, Any]) -> Counterpart:
    raise NoCounterpart("its eps is added before the bias correction; torch.optim.AdamW has one (optim='adamw_torch')")


_OF_PACKAGES: dict[str, Callable[[type, Mapping[str, Any]], Counterpart]] = {
    "torch": _of_torch,
    "bitsandbytes": _of_bitsandbytes,
    "deepspeed": _of_deepspeed,
    "transformers": _of_transformers,
}
# Those that are stood in for, and one that only ../deepspeed is given.
_KNOWN = {(module.partition(".")[0], name) for module, names in imports.CLASSES.items() for name in names}
_KNOWN.add(("deepspeed", "FusedAdam"))
