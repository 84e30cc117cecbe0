"""Reads checkpoints of ZeRO stages 1 to 3, which every rank has written a part of.

    mp_rank_00_model_states.pt                   of stages 1 and 2: param_shapes, names and shapes by group
    zero_pp_rank_R_mp_rank_00_model_states.pt    of stage 3: the same by sub-group, in each rank's file
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt

Stages 1 and 2 lay all parameters of a group one after the other, some with padding behind them, and give each rank an
equal part of the whole:

    | a ........... | b .. | c ...... | padding |
    | rank 0          | rank 1                  |

fp32 masters are saved without the padding at the end, moments with it or, in "elastic" checkpoints, without.

Stage 3 divides each parameter alone, into parts of ceil(elements / ranks), the last of which is padded. A rank has its
parts of the parameters of a sub-group one after the other:

    rank 0   | a, part 0 | b, part 0 |
    rank 1   | a, part 1 | b, part 1 |
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from superoffload._core.error import Error
from superoffload.import_checkpoint import torch_file
from superoffload.import_checkpoint.saved_state import (
    MASTER,
    STEP,
    Parameter,
    Piece,
    SavedState,
    floats,
    inconsistent,
    left_out,
    member,
    moments,
    optional,
    pieces,
    shapes,
    whole_number,
)
from superoffload.import_checkpoint.torch_file import StoredTensor

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_ALIGNMENT = 2  # elements per rank, up to which stages 1 and 2 fill a group

# Files of what is not put together here: what their names have, what it is, and what to do.
_OTHERS = (
    (re.compile(r"expert|expp_rank"), "experts that ranks divided (MoE)", "begin from the model's weights"),
    (
        re.compile(r"layer_\d+"),
        "a pipeline",
        "make a universal checkpoint of it (deepspeed.checkpoint.ds_to_universal)",
    ),
    (
        re.compile(r"mp_rank_(?!00_)\d+_"),
        "a model that ranks divided (tensor parallelism)",
        "make a universal checkpoint of it (deepspeed.checkpoint.ds_to_universal)",
    ),
)


def is_one(directory: str) -> bool:
    return any(name.endswith(("_optim_states.pt", "_model_states.pt")) for name in os.listdir(directory))


def read(directory: str) -> SavedState:
    """Raises Error: UNIMPLEMENTED for model parallelism, experts and stage 0; DATA_LOSS for files that do not fit."""
    names = sorted(os.listdir(directory))
    for name in names:
        for pattern, what, remedy in _OTHERS:
            if name.endswith("_states.pt") and pattern.search(name):
                raise Error(grpc.StatusCode.UNIMPLEMENTED, f"{directory} is of {what}, as {name} shows; {remedy}")
    paths = _of_ranks(directory, names)
    parts = [_Part(path) for path in paths]
    for part in parts:
        part.check(len(parts))
    model_path, *_ = model_files(directory)
    model = torch_file.load(model_path)
    if isinstance(model, dict) and model.get("param_shapes") is None:
        raise _stage_0(directory)
    divided = shapes(model, model_path)
    parameters = _put_together(parts, divided)
    configuration = optional(model, "ds_config", dict, {})
    return SavedState(parameters, parts[0].groups(len(divided)), configuration, left_out(model, list(parameters)))


def model_files(directory: str, rank: int = 0, ranks: int = 1) -> list[str]:
    """Those of ``rank`` where so many ranks have saved, else of rank 0; one per rank of model parallelism.

    Raises Error where there is none.
    """
    found = {name: match[1] for name in sorted(os.listdir(directory)) if (match := _MODEL_FILE.fullmatch(name))}
    saved_by = len(set(found.values()) - {None})
    own = [name for name, by in found.items() if by in (None, str(rank if saved_by == ranks else 0))]
    if not own:
        raise inconsistent(directory, "lacks the file of rank 0 that ends in mp_rank_00_model_states.pt")
    return [os.path.join(directory, name) for name in own]


def _of_ranks(directory: str, names: Sequence[str]) -> list[str]:
    """The optimizer's file of each rank."""
    by_rank: dict[int, str] = {}
    for name in names:
        match = _OPTIMIZER_FILE.fullmatch(name)
        if match and (other := by_rank.setdefault(int(match[1]), name)) != name:
            raise inconsistent(directory, f"has {other} and {name}, both of rank {match[1]}")
    if not by_rank:
        raise _stage_0(directory)
    missing = sorted(set(range(max(by_rank) + 1)) - by_rank.keys())
    if missing:
        raise inconsistent(directory, f"lacks the optimizer's file of rank {missing[0]}, and has one of {max(by_rank)}")
    return [os.path.join(directory, by_rank[rank]) for rank in range(len(by_rank))]


def _stage_0(directory: str) -> Error:
    return Error(
        grpc.StatusCode.UNIMPLEMENTED,
        f"{directory} is of ZeRO stage 0, whose files do not say which parameter has which moments; save one with "
        '"zero_optimization": {"stage": 1}',
    )


class _Part:
    """What one rank has written of the optimizer."""

    def __init__(self, path: str) -> None:
        self.path = path
        loaded = torch_file.load(path)
        self._state = member(loaded, "optimizer_state_dict", dict, path)
        stage = self._state.get("zero_stage", 1)  # a bf16 optimizer does not say it
        self.is_stage_3 = whole_number(stage, f"{path}: zero_stage") == 3
        where = f"{path}: optimizer_state_dict"
        masters = "fp32_flat_groups" if self.is_stage_3 else "single_partition_of_fp32_groups"
        self._where = f"{where}: {masters}"
        self._masters = member(self._state, masters, list, where)
        key = "optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state"
        self._base_where = f"{where}: {key}"
        elastic = isinstance(self._state.get(key), list)  # then it has the states and nothing else
        base = {"state": self._state[key]} if elastic else member(self._state, key, dict, where)
        self._states = base["state"] if elastic else member(base, "state", dict, self._base_where)
        self._groups = None if elastic else member(base, "param_groups", list, self._base_where)
        self.flats = len(self._masters)

    def check(self, ranks: int) -> None:
        counts = self._state.get("partition_count", ranks)
        for count in counts if isinstance(counts, list) else [counts]:
            if (wanted := whole_number(count, f"{self.path}: partition_count")) != ranks:
                raise inconsistent(
                    self.path, f"is of {wanted} ranks, but files of {ranks} are there; some are missing or left over"
                )
        if self._state.get("ds_zero_partition_groups"):
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"{self.path} is of experts that ranks divided (MoE), which are not put together here",
            )

    def groups(self, count: int) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, of which elastic checkpoints have the number."""
        if self._groups is None:
            return [{} for _ in range(count)]
        return [member(self._groups, i, dict, f"{self._base_where}: param_groups") for i in range(len(self._groups))]

    def group_of(self, flat: int) -> int:
        """The parameter group of a flat tensor; torch numbers parameters over all groups."""
        if self._groups is None:
            return flat
        for index, group in enumerate(self.groups(0)):
            if flat in member(group, "params", list, f"{self._base_where}: param_groups[{index}]"):
                return index
        raise inconsistent(self._base_where, f"has no parameter group with parameter {flat}")

    def state(self, flat: int) -> dict[Any, Any]:
        return member(self._states, flat, dict, f"{self._base_where}: state")

    def steps(self, flat: int) -> int:
        """Some optimizers count in the state, some in the group; elastic checkpoints have it beside them."""
        state = self.state(flat)
        places = [state, {} if self._groups is None else self.groups(0)[self.group_of(flat)]]
        counted = next((of[STEP] for of in places if STEP in of), self._state.get("base_optimizer_state_step"))
        return whole_number(counted, f"{self._base_where}: step of state {flat}")

    def array(self, name: str, flat: int) -> StoredTensor:
        """The flat tensor of masters or of a moment."""
        where = f"{self._base_where}: state {flat}"
        tensor = (
            member(self._masters, flat, StoredTensor, self._where)
            if name == MASTER
            else member(self.state(flat), name, StoredTensor, where)
        )
        return floats(tensor, self._where if name == MASTER else f"{where}: {name}")

    def arrays(self) -> tuple[str, ...]:
        return (MASTER, *moments(self.state(0), f"{self._base_where}: state 0"))

    def padding(self, flat: int) -> int:
        """Elements behind the last parameter, of this rank's part."""
        saved = optional(self._state, "group_paddings", list, [])
        return whole_number(saved[flat], f"{self.path}: group_paddings") if flat < len(saved) else 0

    def paddings_between(self, flat: int, count: int) -> list[int]:
        """Elements behind each parameter but the last; older versions have none."""
        if (saved := self._state.get("param_alignment_paddings")) is None:
            return [0] * count
        where = f"{self.path}: param_alignment_paddings"
        of_flat = member(saved, flat, list, where)
        if len(of_flat) != count:
            raise inconsistent(where, f"has {len(of_flat)} numbers for {count} parameters")
        return [whole_number(padding, where) for padding in of_flat]


def _steps(parts: Sequence[_Part], flat: int) -> int:
    steps = parts[0].steps(flat)
    for part in parts[1:]:
        if (others := part.steps(flat)) != steps:
            raise inconsistent(part.path, f"is of step {others}, but {parts[0].path} of step {steps}")
    return steps


def _put_together(parts: Sequence[_Part], divided: Sequence[dict[str, tuple[int, ...]]]) -> dict[str, Parameter]:
    for part in parts:
        if part.flats != len(divided):
            raise inconsistent(part.path, f"has {part.flats} groups of masters, but param_shapes has {len(divided)}")
    parameters: dict[str, Parameter] = {}
    arrays = parts[0].arrays()
    find = _find_in_stage_3 if parts[0].is_stage_3 else _find_in_stages_1_and_2
    for flat, of_group in enumerate(divided):
        steps, group = _steps(parts, flat), parts[0].group_of(flat)
        tensors = {array: [part.array(array, flat) for part in parts] for array in arrays}
        for name, found in find(parts, flat, of_group, tensors).items():
            if name in parameters:
                raise inconsistent(parts[0].path, f"has parameter {name!r} twice")
            parameters[name] = Parameter(of_group[name], group, steps, found)
    return parameters


# By parameter of a group, or of a sub-group, and by array.
_Found = dict[str, dict[str, list[Piece]]]


def _find_in_stages_1_and_2(
    parts: Sequence[_Part],
    flat: int,
    of_group: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Sequence[StoredTensor]],
) -> _Found:
    """``tensors``: by array, those of all ranks."""
    first = 0
    places = {}
    for (name, shape), padding in zip(of_group.items(), parts[0].paddings_between(flat, len(of_group)), strict=True):
        places[name] = first, math.prod(shape)
        first += math.prod(shape) + padding
    slack = max(_ALIGNMENT * len(parts), sum(part.padding(flat) for part in parts))
    for array, of_ranks in tensors.items():
        has = sum(tensor.elements for tensor in of_ranks)
        if not first <= has <= first + slack:
            raise inconsistent(
                os.path.dirname(parts[0].path),
                f"has {has} elements of {array} in group {flat}, whose parameters have {first}",
            )
    return {
        name: {array: pieces(of_ranks, *place) for array, of_ranks in tensors.items()} for name, place in places.items()
    }


def _find_in_stage_3(
    parts: Sequence[_Part],
    flat: int,
    of_sub_group: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Sequence[StoredTensor]],
) -> _Found:
    """``tensors``: by array, those of all ranks."""
    of_rank = sum(-(-math.prod(shape) // len(parts)) for shape in of_sub_group.values())
    for array, of_ranks in tensors.items():
        for part, tensor in zip(parts, of_ranks, strict=True):
            if tensor.elements != of_rank:
                raise inconsistent(
                    part.path,
                    f"has {tensor.elements} elements of {array} in sub-group {flat}, where its parts of "
                    f"parameters have {of_rank}",
                )
    first = 0
    found: _Found = {}
    for name, shape in of_sub_group.items():
        elements = math.prod(shape)
        share = -(-elements // len(parts))
        found[name] = {
            array: [
                Piece(tensor, first, count)
                for rank, tensor in enumerate(of_ranks)
                if (count := min(share, elements - rank * share)) > 0
            ]
            for array, of_ranks in tensors.items()
        }
        first += share
    return found
