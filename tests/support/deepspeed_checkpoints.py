"""Writes checkpoints in DeepSpeed's layouts, without DeepSpeed: its classes are made up here, by their names."""

import collections
import contextlib
import dataclasses
import enum
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

ALIGNMENT = 2  # elements per rank


class LossScaler:
    def __init__(self, scale: float) -> None:
        self.cur_scale = scale


class ZeroStageEnum(int, enum.Enum):
    optimizer_states = 1
    gradients = 2
    weights = 3


@dataclasses.dataclass
class fragment_address:  # noqa: N801  DeepSpeed's name
    numel: int
    start: int


class Config(dict):
    pass


_CLASSES = {
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment": fragment_address,
    "deepspeed.runtime.config": Config,
}


@dataclasses.dataclass
class Made:
    """What a checkpoint is to have. ``groups``: parameters by name, each with its arrays in fp32, by group."""

    groups: list[dict[str, dict[str, torch.Tensor]]]
    param_groups: list[dict[str, Any]]
    steps: list[int]  # of each group
    configuration: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{array}.{name}": tensor
            for group in self.groups
            for name, arrays in group.items()
            for array, tensor in arrays.items()
        }


def make(
    shapes: list[dict[str, tuple[int, ...]]],
    *,
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq"),
    steps: int = 7,
    seed: int = 0,
) -> Made:
    generator = torch.Generator().manual_seed(seed)
    groups = [
        {
            name: {array: torch.randn(shape, generator=generator).abs() for array in ("model", *moments)}
            for name, shape in of_group.items()
        }
        for of_group in shapes
    ]
    param_groups: list[dict[str, Any]] = [
        {"lr": 1e-3 * (i + 1), "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.1 * i} for i in range(len(shapes))
    ]
    return Made(groups, param_groups, [steps] * len(shapes))


@contextlib.contextmanager
def _deepspeed() -> Iterator[None]:
    """DeepSpeed's classes are there, by their names."""
    before = {module: sys.modules.get(module) for module in ("deepspeed", *_CLASSES)}
    try:
        sys.modules.update({module: types.ModuleType(module) for module in before})
        for module, cls in _CLASSES.items():
            cls.__module__ = module
            setattr(sys.modules[module], cls.__name__, cls)
        yield
    finally:
        for module, was in before.items():
            del sys.modules[module]
            if was is not None:
                sys.modules[module] = was


def save(path: pathlib.Path, saved: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _deepspeed():
        torch.save(saved, path)


def load(path: pathlib.Path) -> Any:
    with _deepspeed():
        return torch.load(path, weights_only=False)


def _model_states(made: Made, divided: list[dict], frozen: dict[str, torch.Tensor]) -> dict[str, Any]:
    weights = {name: arrays["model"].bfloat16() for group in made.groups for name, arrays in group.items()}
    tied = {f"tied.{name}": name for name in list(weights)[:1]}
    module = {**weights, **frozen, **{alias: weights[name] for alias, name in tied.items()}, "buffer": torch.ones(3)}
    return {
        "module": collections.OrderedDict(module),
        "buffer_names": ["buffer"],
        "param_shapes": divided,
        "shared_params": tied,
        "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()},
        "frozen_param_fragments": frozen,
        "global_steps": max(made.steps),
        "dp_world_size": 2,
        "ds_config": made.configuration,
        "ds_version": "0.19.8",
        "args": Config(local_rank=0),
    }


def _shapes(groups: list[dict[str, dict[str, torch.Tensor]]]) -> list[dict[str, torch.Size]]:
    return [
        collections.OrderedDict((name, arrays["model"].shape) for name, arrays in group.items()) for group in groups
    ]


def _optimizer_file(state: dict[str, Any], ranks: int, stage: int) -> dict[str, Any]:
    state = {
        "loss_scaler": LossScaler(65536.0),
        "zero_stage": ZeroStageEnum(stage),
        "partition_count": ranks if stage == 3 else [ranks] * len(state["single_partition_of_fp32_groups"]),
        **state,
    }
    return {"optimizer_state_dict": state, "ds_config": Config(), "ds_version": "0.19.8"}


def write_stage_1(
    directory: pathlib.Path,
    made: Made,
    ranks: int,
    *,
    stage: int = 1,
    prefix: str = "bf16_",
    between: bool = False,
    elastic: bool = False,
    lean: bool = True,
) -> None:
    """``between``: each parameter is padded to 8 elements. ``lean``: masters lack the padding at the end."""
    frozen = {"frozen.weight": torch.ones(2, 3)}
    save(directory / "mp_rank_00_model_states.pt", _model_states(made, _shapes(made.groups), frozen))
    flats: list[dict[str, list[torch.Tensor]]] = []
    paddings, behind = [], []
    for group in made.groups:
        sizes = [next(iter(arrays.values())).numel() for arrays in group.values()]
        padded = [-size % 8 if between and i + 1 < len(sizes) else 0 for i, size in enumerate(sizes)]
        behind.append(padded)
        used = sum(sizes) + sum(padded)
        total = -(-used // (ALIGNMENT * ranks)) * ALIGNMENT * ranks
        paddings.append([max(0, min(total // ranks, (rank + 1) * total // ranks - used)) for rank in range(ranks)])
        of_arrays = {}
        for array in next(iter(group.values())):
            flat = torch.full((total,), -9.0)
            at = 0
            for arrays, size, gap in zip(group.values(), sizes, padded, strict=True):
                flat[at : at + size] = arrays[array].flatten()
                at += size + gap
            of_arrays[array] = list(flat.chunk(ranks))
        flats.append(of_arrays)
    for rank in range(ranks):
        cut = [
            {
                array: parts[rank][: parts[rank].numel() - paddings[i][rank]].clone()
                if elastic or (lean and array == "model")
                else parts[rank].clone()
                for array, parts in of_arrays.items()
            }
            for i, of_arrays in enumerate(flats)
        ]
        states = [
            {"step": made.steps[i], **{array: tensor for array, tensor in arrays.items() if array != "model"}}
            for i, arrays in enumerate(cut)
        ]
        groups = [{**group, "params": [i]} for i, group in enumerate(made.param_groups)]
        state = {
            "base_optimizer_state": states if elastic else {"state": dict(enumerate(states)), "param_groups": groups},
            "single_partition_of_fp32_groups": [arrays["model"] for arrays in cut],
            "group_paddings": [of_group[rank] for of_group in paddings],
            "param_alignment_paddings": behind,
            "param_slice_mappings": [{name: fragment_address(1, 0) for name in group} for group in made.groups],
        }
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        save(directory / name, _optimizer_file(state, ranks, stage))


def sub_groups(made: Made, size: int) -> list[tuple[int, dict[str, dict[str, torch.Tensor]]]]:
    """Of stage 3, each with the number of its group; ``size``: parameters in one."""
    found = []
    for index, group in enumerate(made.groups):
        items = list(group.items())
        found += [(index, dict(items[at : at + size])) for at in range(0, len(items), size)]
    return found


def _of_sub_groups(made: Made, size: int) -> list[dict[str, Any]]:
    cut = [index for index, _ in sub_groups(made, size)]
    return [
        {**group, "params": [at for at, index in enumerate(cut) if index == i]}
        for i, group in enumerate(made.param_groups)
    ]


def write_stage_3(directory: pathlib.Path, made: Made, ranks: int, *, size: int = 2) -> None:
    cut = sub_groups(made, size)
    for rank in range(ranks):
        frozen = {"frozen.weight": torch.ones(-(-6 // ranks))}
        states = _model_states(made, _shapes([group for _, group in cut]), frozen)
        save(directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", states)
        flats = []
        for _, group in cut:
            of_arrays: dict[str, list[torch.Tensor]] = {}
            for arrays in group.values():
                for array, tensor in arrays.items():
                    share = -(-tensor.numel() // ranks)
                    padded = torch.cat([tensor.flatten(), torch.full((share * ranks - tensor.numel(),), -9.0)])
                    of_arrays.setdefault(array, []).append(padded[rank * share : (rank + 1) * share])
            flats.append({array: torch.cat(parts) for array, parts in of_arrays.items()})
        state = {
            "fp32_flat_groups": [arrays.pop("model") for arrays in flats],
            "optimizer_state_dict": {
                "state": {
                    at: {"step": torch.tensor(float(made.steps[index])), **flats[at]}
                    for at, (index, _) in enumerate(cut)
                },
                "param_groups": _of_sub_groups(made, size),
            },
        }
        save(directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", _optimizer_file(state, ranks, stage=3))


def write_universal(directory: pathlib.Path, made: Made, *, of_stage_3: bool = False) -> None:
    names = {"model": "fp32"}
    frozen = {"frozen.weight": torch.ones(2, 3)}
    divided = [group for _, group in sub_groups(made, 2)] if of_stage_3 else made.groups
    prefix = "zero_pp_rank_0_" if of_stage_3 else ""
    save(directory / f"{prefix}mp_rank_00_model_states.pt", _model_states(made, _shapes(divided), frozen))
    for steps, group in zip(made.steps, made.groups, strict=True):
        for name, arrays in group.items():
            for array, tensor in arrays.items():
                saved: Any = tensor.flatten() if of_stage_3 else {"param": tensor, "cat_dim": 0}
                save(directory / "zero" / name / f"{names.get(array, array)}.pt", saved)
            if not of_stage_3:
                save(directory / "zero" / name / "step.pt", torch.tensor(float(steps)))
    if not of_stage_3:  # what the optimizer does not have lies there, too
        save(directory / "zero" / "frozen.weight" / "fp32.pt", {"param": frozen["frozen.weight"]})
    state: dict[str, Any] = {"loss_scaler": LossScaler(1.0)}
    if of_stage_3:
        state["param_groups"] = _of_sub_groups(made, 2)
        cut = sub_groups(made, 2)
        state["optimizer_state_dict"] = {"state": {at: {"step": made.steps[i]} for at, (i, _) in enumerate(cut)}}
    else:
        state["param_groups"] = [{**group, "params": [i]} for i, group in enumerate(made.param_groups)]
    save(directory / "zero" / "optimizer_state.pt", state)
