"""Reads universal checkpoints, which ds_to_universal makes of ZeRO's: whole parameters, whatever the ranks were.

zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt   a dict with the tensor as "param"; made of stage 3, the tensor itself, flat
zero/NAME/step.pt                        missing where it was made of stage 3
zero/optimizer_state.pt                  parameter groups; made of stage 3, all that rank 0 had saved
*_model_states.pt                        as they were: names and shapes by group, or by sub-group of stage 3
"""

import math
import os
from collections.abc import Mapping
from typing import Any

import grpc

from superoffload._core.error import Error
from superoffload.import_checkpoint import torch_file
from superoffload.import_checkpoint.saved_state import (
    FIRST,
    MASTER,
    SECOND,
    STEP,
    Parameter,
    Piece,
    SavedState,
    floats,
    inconsistent,
    left_out,
    member,
    optional,
    shapes,
    whole_number,
)
from superoffload.import_checkpoint.torch_file import StoredTensor
from superoffload.import_checkpoint.zero_checkpoint import model_files

FOLDER = "zero"
_OPTIMIZER_FILE = "optimizer_state.pt"
_FILES = {MASTER: "fp32.pt", FIRST: f"{FIRST}.pt", SECOND: f"{SECOND}.pt"}


def is_one(directory: str) -> bool:
    return os.path.isdir(os.path.join(directory, FOLDER))


def read(directory: str) -> SavedState:
    """Raises Error: UNIMPLEMENTED for experts; DATA_LOSS for what is missing or does not fit together."""
    optimizer_path = os.path.join(directory, FOLDER, _OPTIMIZER_FILE)
    optimizer = torch_file.load(optimizer_path)
    groups = member(optimizer, "param_groups", list, optimizer_path)
    groups = [member(groups, i, dict, f"{optimizer_path}: param_groups") for i in range(len(groups))]
    paths = model_files(directory)
    model = torch_file.load(paths[0])
    flats: dict[str, tuple[int, tuple[int, ...]]] = {}  # by name: group or sub-group, and shape
    for path in paths:
        for flat, of_group in enumerate(shapes(torch_file.load(path), path)):
            flats.update({parameter: (flat, shape) for parameter, shape in of_group.items()})
    configuration = optional(model, "ds_config", dict, {})
    _check_order(directory, configuration, model)
    whole = _Whole(os.path.join(directory, FOLDER), optimizer, optimizer_path, groups)
    parameters = {name: whole.parameter(name, *of_name) for name, of_name in flats.items()}
    if others := sorted(whole.names_with_moments - parameters.keys()):
        raise inconsistent(directory, f"has moments of {others[0]!r}, which {paths[0]} does not name")
    return SavedState(parameters, groups, configuration, left_out(model, list(parameters)))


def _check_order(directory: str, configuration: Mapping[Any, Any], model: Mapping[Any, Any]) -> None:
    """ds_to_universal takes parameters of a group for being in their order, where this option had shuffled them."""
    options = optional(configuration, "zero_optimization", dict, {})
    if options.get("round_robin_gradients") and options.get("stage") in (1, 2) and model.get("dp_world_size") != 1:
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{directory} was made of a checkpoint with round_robin_gradients, where DeepSpeed's ds_to_universal gives "
            "parameters the numbers of others; name the checkpoint of which it was made",
        )


class _Whole:
    def __init__(
        self, folder: str, optimizer: Mapping[Any, Any], optimizer_path: str, groups: list[dict[str, Any]]
    ) -> None:
        self._folder = folder
        # What the optimizer does not have lies there without moments.
        self.names_with_moments = {
            entry.name for entry in os.scandir(folder) if os.path.exists(os.path.join(entry.path, _FILES[FIRST]))
        }
        self._optimizer_path = optimizer_path
        self._groups = groups
        # Of rank 0 of stage 3, whose sub-groups are parameters to the optimizer.
        self._of_stage_3: dict[Any, Any] | None = (
            member(optimizer, "optimizer_state_dict", dict, optimizer_path)
            if "optimizer_state_dict" in optimizer
            else None
        )

    def parameter(self, name: str, flat: int, shape: tuple[int, ...]) -> Parameter:
        """``flat``: its group, or its sub-group of stage 3. ``shape``: used where the tensors are flat."""
        if name not in self.names_with_moments:
            raise inconsistent(self._folder, f"lacks moments of parameter {name!r}")
        folder = os.path.join(self._folder, name)
        arrays = {}
        for array, file in _FILES.items():
            path = os.path.join(folder, file)
            if array == SECOND and not os.path.exists(path):
                continue  # Lion's
            tensor = self._tensor(path)
            if array == MASTER and self._of_stage_3 is None:
                shape = tensor.shape
            if tensor.elements != math.prod(shape):
                raise inconsistent(path, f"has {tensor.elements} elements, and the parameter {math.prod(shape)}")
            arrays[array] = [Piece(tensor, 0, tensor.elements)]
        group = self._group_of(flat)
        return Parameter(shape, group, self._steps(os.path.join(folder, f"{STEP}.pt"), flat, group), arrays)

    def _tensor(self, path: str) -> StoredTensor:
        loaded = torch_file.load(path)
        if isinstance(loaded, dict):
            if loaded.get("is_expert_param"):
                raise Error(
                    grpc.StatusCode.UNIMPLEMENTED,
                    f"{path} is of experts (MoE), which are not put together here; begin from the model's weights",
                )
            loaded = member(loaded, "param", StoredTensor, path)
        return floats(member([loaded], 0, StoredTensor, path), path)

    def _group_of(self, flat: int) -> int:
        where = f"{self._optimizer_path}: param_groups"
        for index, group in enumerate(self._groups):
            held = member(group, "params", list, f"{where}[{index}]")
            if flat in held:
                return index
        raise inconsistent(where, f"has no group with parameter {flat}")

    def _steps(self, path: str, flat: int, group: int) -> int:
        if os.path.exists(path):
            return whole_number(torch_file.load(path), path)
        where = f"{self._optimizer_path}: state {flat}"
        states = {} if self._of_stage_3 is None else member(self._of_stage_3, "state", dict, self._optimizer_path)
        places = [optional(states, flat, dict, {}), self._groups[group]]
        counted = next((of[STEP] for of in places if STEP in of), None)
        return whole_number(counted, f"{where}: {STEP}")
