"""The optimizer that a configuration or a script names, in the daemon."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

import superoffload.torch
from superoffload.deepspeed.config import Config, Named
from superoffload.stand_ins import counterparts
from superoffload.torch.optimizer import Optimizer
from superoffload.torch.ranks import shards

_WITH_DEFAULTS = ("torch", "deepspeed")  # packages whose optimizers say in .defaults all that they were built with
_REMEDY = "give torch.optim.AdamW or Adam, or optimizer=lambda parameters: superoffload.torch.AdamW(parameters, ...)"
_BUCKET_BYTES = 64 << 20  # the daemon's default


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters by their names in the model, which stay when it is divided among ranks; and their own values."""

    names: list[str]
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """An optimizer that is still to be built."""

    cls: type[Optimizer]
    arguments: dict[str, Any]
    groups: list[Group]


Client: TypeAlias = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


def wanted(config: Config, client: Client, model: torch.nn.Module, groups: list[Group], ranks: int) -> Wanted | None:
    """``client``: the script's, before the section, which ``groups`` are for.

    None: the script's is one of ours already, or a function, which is called when the model is as it will be. Raises
    ValueError for what has no counterpart here.
    """
    if isinstance(client, Optimizer):
        _check_own(client, config, ranks)
        return None
    if client is not None and not isinstance(client, torch.optim.Optimizer):
        return None
    if client is not None:
        return _of_client(client, model)
    if config.optimizer is None:
        raise ValueError("the configuration has no optimizer section, and no optimizer= was given; add one of them")
    cls, arguments = _of_section(config.optimizer)
    return Wanted(cls, arguments, groups)


def build(
    wanted: Wanted,
    model: torch.nn.Module,
    config: Config,
    gpu: torch.device | None,
    ranks: int,
    options: Mapping[str, Any],
) -> Optimizer:
    """``gpu``: where parameters are to be; None: they stay on the CPU.

    ``options``: keyword arguments of ours, which no configuration of DeepSpeed's has.
    """
    by_name = dict(model.named_parameters())
    groups = [{**group.values, "params": [(n, by_name[n]) for n in group.names]} for group in wanted.groups]
    keywords: dict[str, Any] = {"max_grad_norm": config.clipping or None, **config.state_dtypes, **wanted.arguments}
    if gpu is not None:
        of_passes = config.batches.passes > 1 and ranks == 1 and config.loss_scale is None
        keywords["weights"] = "streamed" if config.streams_parameters else "resident"
        keywords["gpu"] = superoffload.torch.GpuOptions(
            device=gpu,
            resident_buckets=_resident_buckets(config, by_name.values(), options),
            # Else the GPU would keep the gradients of all parameters from pass to pass.
            accumulate="daemon" if of_passes else "gpu",
        )
    return wanted.cls(groups, **{**keywords, **options})


def take(client: Any, model: torch.nn.Module, groups: list[Group], config: Config) -> Optimizer | Wanted:
    """Of a script's own that is ours, or a function which builds one. Raises ValueError where it does not fit."""
    made = client
    if not isinstance(client, Optimizer):
        by_name = dict(model.named_parameters())
        given = [{**group.values, "params": [by_name[name] for name in group.names]} for group in groups]
        made = client(given[0]["params"] if len(given) == 1 and not groups[0].values else given)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"optimizer= has made {made!r}, which is no torch.optim.Optimizer")
        if not isinstance(made, Optimizer):
            return _of_client(made, model)
    if made.max_grad_norm not in (None, config.clipping or None):
        raise ValueError(
            f"the optimizer has max_grad_norm={made.max_grad_norm}, and gradient_clipping is {config.clipping}; make "
            "them equal"
        )
    made.max_grad_norm = config.clipping or None
    present = {"master_dtype": made.algorithm.master_dtype, "state_dtype": made.algorithm.moment_dtype}
    for option, dtype in config.state_dtypes.items():
        if present[option] != dtype:
            raise ValueError(f"the configuration asks for state in bf16; build the optimizer with {option}={dtype}")
    return made


def _check_own(client: Optimizer, config: Config, ranks: int) -> None:
    if ranks > 1:
        raise ValueError(
            f"an optimizer of superoffload's has to be built when the model is divided among ranks: {_REMEDY}"
        )
    others = [p.dtype for p in client.hosted_parameters() if config.dtype not in (None, p.dtype)]
    if others:
        raise ValueError(
            f"the optimizer was built on parameters in {others[0]}, and the configuration asks for {config.dtype}; "
            f"cast the model before, or {_REMEDY}"
        )


def follow(client: torch.optim.Optimizer, made: Optimizer) -> None:
    """What schedulers of the script set at its optimizer is ours from now on."""
    client.param_groups = made.param_groups
    client._opt_called = True  # type: ignore[attr-defined]  # schedulers look whether step() comes before theirs


def _of_client(client: torch.optim.Optimizer, model: torch.nn.Module) -> Wanted:
    kind = type(client)
    known = f"the optimizer is a {kind.__module__}.{kind.__qualname__}"
    if kind.__module__.partition(".")[0] not in _WITH_DEFAULTS:
        raise ValueError(f"{known}: it has no counterpart; {_REMEDY}")
    if client.state:
        raise ValueError("the optimizer has made steps already, whose state would be lost; give one that has not")
    arguments = {**client.defaults, "adamw_mode": bool(getattr(client, "adam_w_mode", True))}
    try:
        counterpart = counterparts.find(kind, arguments)
    except counterparts.NoCounterpart as error:
        raise ValueError(f"{known}: {error}; {_REMEDY}") from error
    return Wanted(counterpart.cls, counterpart.arguments, by_names(model, client.param_groups))


def _of_section(section: Named) -> tuple[type[Optimizer], dict[str, Any]]:
    kind, params = section.type.lower(), dict(section.params)
    if "max_grad_norm" in params:
        raise ValueError("optimizer.params.max_grad_norm is none of DeepSpeed's: it is gradient_clipping")
    read: dict[str, type] = {"lr": float, "weight_decay": float, "betas": tuple}
    harmless = {"fp32_optimizer_states", "set_grad_none", "foreach"}
    if kind in ("adam", "adamw"):
        of_torch = params.pop("torch_adam", False)
        decoupled = params.pop("adam_w_mode", True) or kind == "adamw"  # Adam is AdamW in DeepSpeed, too
        cls: type[Optimizer] = superoffload.torch.AdamW if decoupled else superoffload.torch.Adam
        # DeepSpeed's own have none by default.
        defaults: dict[str, Any] = {} if of_torch else {"weight_decay": 0.0}
        read["eps"] = float
        for name, value in (("bias_correction", True), ("amsgrad", False)):
            if params.pop(name, value) != value:
                raise ValueError(f"optimizer.params.{name} must be {str(value).lower()}: the daemon has no other")
    elif kind == "lion":
        cls, defaults = superoffload.torch.Lion, {"lr": 1e-3, "betas": (0.9, 0.999)}  # DeepSpeed's
    else:
        raise ValueError(
            f"optimizer.type is {section.type!r} but must be Adam, AdamW or Lion; for others of superoffload's, "
            "optimizer=lambda parameters: superoffload.torch.AdamW8bit(parameters, ...)"
        )
    arguments = defaults | {name: params.pop(name) for name in list(params) if name in read}
    if unknown := sorted(params.keys() - harmless):
        raise ValueError(f"optimizer.params.{unknown[0]} is not known here; there are {', '.join(read)}")
    try:
        return cls, {name: tuple(map(float, v)) if name == "betas" else float(v) for name, v in arguments.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer.params: {error}") from error


def by_names(model: torch.nn.Module, parameters: Any) -> list[Group]:
    """``parameters``: as DeepSpeed's model_parameters, or None for all."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if parameters is None:
        return [Group(list(names.values()), {})]
    given = list(parameters)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    return [_named(group, names) for group in groups]


def _named(group: Mapping[str, Any], names: Mapping[int, str]) -> Group:
    tensors: Iterable[Any] = group["params"]
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    found = []
    for tensor in tensors:
        tensor = tensor[1] if isinstance(tensor, tuple) else tensor
        if id(tensor) not in names:
            raise ValueError(f"the optimizer has a parameter of shape {list(tensor.shape)} that is not of the model")
        found.append(names[id(tensor)])
    return Group(found, {key: value for key, value in group.items() if key not in ("params", "param_names")})


def _resident_buckets(config: Config, parameters: Iterable[torch.Tensor], options: Mapping[str, Any]) -> Any:
    """Of this rank: what offload_optimizer.ratio leaves to the GPU."""
    if config.offloaded_share is None:
        return "auto"
    trained = [p for p in parameters if p.requires_grad]
    size = sum(shards.local(p).numel() * p.element_size() for p in trained)
    buckets = size / (options.get("bucket_bytes") or _BUCKET_BYTES)
    return math.floor((1 - config.offloaded_share) * buckets)
