"""Optimizer state that leaves the daemon and comes back: checkpoints, state_dict(), torch's own format."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc
import torch

from superoffload._core import run, warn
from superoffload._core.error import Error
from superoffload.torch import groups
from superoffload.torch.algorithm import STEP
from superoffload.torch.fingerprint import digests
from superoffload.torch.hosting import Hosting, Ranks, tensors_of
from superoffload.torch.ranks import host_mesh, shards
from superoffload.torch.state import tensor_file
from superoffload.torch.state.checkpoints import Checkpoints, drop_others
from superoffload.torch.state.codes import as_of_torch
from superoffload.torch.state.moment import FORMAT, Lineage, Moment, callers, find_directory, module_of
from superoffload.torch.state.parameter import ParameterState
from superoffload.torch.state.views import state_views, stored_views

_KEY = "superoffload"  # of the moment in a state_dict
# In the place of each parameter's step, of which torch.optim makes a number when it loads a state; its error quotes it.
_NOT_OF_TORCH = (
    b"a state of superoffload.torch, which torch.optim cannot load: torch_state_dict() makes one that it can"
)
_STATE_DICT_CALLERS = (  # they take tensors out of state_dict()
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim.zero_redundancy_optimizer",
)
_SAVE_SECONDS = 60  # that ranks may save after one another
_SLOW_SECONDS = 10  # until a rank that waits for others says so


class Written(Protocol):
    """What the loop writes to ``optimizer.state``; see written.py."""

    def torch_keys(self) -> tuple[str, ...]: ...
    def state_keys(self) -> tuple[str, ...]: ...
    def send(self) -> None: ...


class State:
    """Reads, saves and loads the state of one optimizer.

    ``state_directory``: where the daemon writes what is pickled; None: the tensors go into the pickle.
    """

    def __init__(
        self,
        hosting: Hosting,
        lineage: Lineage,
        written: Written,
        checkpoints: Checkpoints,
        state_directory: str | None,
    ) -> None:
        self._hosting = hosting
        self._lineage = lineage
        self._written = written
        self._checkpoints = checkpoints
        self._state_directory = state_directory

    def is_present(self, identity: dict[str, Any]) -> bool:
        """Whether the optimizer is attached, and at the moment of this identity."""
        return self._hosting.attached and self._lineage.moment() == identity

    # The model's parameters and the masters.

    def push_params(self) -> None:
        """See `Optimizer.push_params`."""
        self._hosting.check_attached()
        self._hosting.quiesce()
        self._lineage.replace()
        self._hosting.push_parameters()

    def pull_params(self) -> None:
        """See `Optimizer.pull_params`."""
        self._hosting.check_attached()
        self._hosting.quiesce()
        self._hosting.pull_parameters()

    # Reading.

    def state_of(self, indices: Sequence[int], keys: Sequence[str]) -> dict[int, dict[str, torch.Tensor]]:
        """See `Optimizer.state_of`."""
        self._hosting.check_attached()
        self._written.send()
        return state_views(self._hosting, indices, keys)

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """See `Optimizer.state_tensors`."""
        state = self.state_of(range(len(self._hosting.hosted)), self._hosting.algorithm.arrays)
        return {
            self._hosting.hosted[index].name: {key: tensor.clone() for key, tensor in tensors.items()}
            for index, tensors in state.items()
        }

    # state_dict.

    def dict_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Completes torch's state_dict with the present moment, for ``state_dict()``, which calls it."""
        # The first two frames are this method's, and the third is state_dict()'s.
        if any(module_of(frame) in _STATE_DICT_CALLERS for frame, _ in zip(callers(), range(5), strict=False)):
            return self._with_tensors(state, self._written.state_keys(), host_mesh.like_on_host)
        state["state"] = {
            key: {STEP: _NOT_OF_TORCH, **value.others} if isinstance(value, ParameterState) else value
            for key, value in state["state"].items()
        }
        state[_KEY] = Moment(self, self._lineage.moment())
        return state

    def torch_dict_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Completes torch's state_dict with copies of what torch has, for ``torch_state_dict()``."""
        return self._with_tensors(state, self._written.torch_keys(), shards.like)

    def _with_tensors(
        self, state: dict[str, Any], keys: Sequence[str], like: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> dict[str, Any]:
        views = self.state_of(range(len(self._hosting.hosted)), keys)
        by_tensor = {id(parameter.tensor): views[index] for index, parameter in enumerate(self._hosting.hosted)}
        if self._hosting.group is not None:
            self._warn_of_absent_ranks(self._hosting.group)
            self._hosting.gather_state(by_tensor, keys)
        state["state"] = {
            index: {
                key: value.clone() if key == STEP else like(tensor, value.clone())
                for key, value in by_tensor[id(tensor)].items()
            }
            for index, tensor in enumerate(tensors_of(self._hosting.loop))
            if id(tensor) in by_tensor
        }
        return state

    def _warn_of_absent_ranks(self, group: Ranks) -> None:
        absent = group.absent(f"state {self._hosting.committed_steps()}", _SLOW_SECONDS)
        if absent:
            warn.warn(
                f"rank {group.rank} completes the optimizer's state with what other ranks have, and waits for rank "
                f"{', '.join(map(str, absent))} until the process group's time-out: all ranks call torch_state_dict(), "
                "and one may save what it returns"
            )

    def _check_all_save(self, group: Ranks) -> None:
        absent = group.absent(f"save {self._hosting.committed_steps()}", _SAVE_SECONDS)
        if absent:
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"rank {group.rank} has its part of the optimizer's state only, and rank {', '.join(map(str, absent))} "
                f"did not save its own within {_SAVE_SECONDS:g} seconds, so that what is saved here could not be "
                "loaded. Have all ranks call torch_state_dict() and save that on one; or have all ranks call "
                "save_checkpoint(), which any number of them restores; or save state_dict() on all ranks, each into a "
                "file of its own",
            )

    def save(self, beside: str | None) -> dict[str, Any]:
        """Where the state of this moment is: a checkpoint's ``directory``, or ``state``, the tensors themselves.

        ``beside``: path of a checkpoint, less its number; those of other numbers are replaced.
        """
        if beside is not None and self._hosting.ranks() > 1:
            return {"directory": self._checkpoints.saved_beside(beside), "run": True}
        if self._hosting.group is not None:
            self._check_all_save(self._hosting.group)
        if beside is not None:
            prefix = beside
        elif self._state_directory is not None:
            os.makedirs(self._state_directory, exist_ok=True)
            prefix = os.path.join(self._state_directory, f"{self._hosting.name}-{self._hosting.committed_steps():08d}")
        else:
            self._hosting.synchronize()
            self._written.send()
            return {"state": stored_views(self._hosting)}
        directory = f"{prefix}-{uuid.uuid4().hex[:12]}"
        self._hosting.check_attached()
        self._hosting.quiesce()
        self._checkpoints.write(directory)
        if beside is not None:
            drop_others(prefix, directory)
        return {"directory": directory}

    def load(self, state_dict: dict[str, Any]) -> None:
        """Has the daemon go to the moment of a state_dict, or take over that of torch's, for ``load_state_dict()``."""
        self._hosting.check_attached()
        self._check_same_groups(state_dict)
        groups.check_groups(state_dict["param_groups"], self._hosting.algorithm)
        moment = state_dict.get(_KEY)
        if moment is None:
            self._load_torch_state(state_dict)
        elif isinstance(moment, Moment):
            if moment.identity != self._lineage.moment():
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"this state_dict is of optimizer {moment.identity['name']} after "
                    f"{moment.identity['committed_steps']} committed steps, this is {self._hosting.name} after "
                    f"{self._hosting.committed_steps()}, and nobody saved that moment; to come back to one keep "
                    "copy.deepcopy(optimizer.state_dict()), or torch.save() it",
                )
        else:
            self._load_saved(moment)

    def load_others(self, state_dict: dict[str, Any]) -> None:
        """Loads what the loop had in ``optimizer.state`` of its own; torch's state_dict has nothing of that."""
        if state_dict.get(_KEY) is None:
            return
        state = self._hosting.loop.state
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        tensors = dict(zip(saved, tensors_of(self._hosting.loop), strict=True))
        for key, value in state_dict["state"].items():
            if key in tensors:
                state[tensors[key]].update({name: other for name, other in value.items() if name != STEP})
            else:
                state[key] = value

    def _load_saved(self, saved: Mapping[str, Any]) -> None:
        if saved.get("format") != FORMAT:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the state_dict has format {saved.get('format')} but this version reads {FORMAT}; use the version "
                "of superoffload that saved it",
            )
        run = saved.get("run", False)  # of all ranks, for all
        part = f".{self._hosting.name.rsplit('.', 1)[-1]}"  # of a run
        if not run and self._hosting.ranks() > 1 and not saved["name"].endswith(part):
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the state_dict was saved by {saved['name']} and this is {self._hosting.name}: each rank loads what "
                "it has saved itself; restore= with the checkpoints of all ranks fits any number of them",
            )
        before, has_changed = self._digests(), self._has_changed_parameters()
        if not run and {key: saved[key] for key in ("name", "lineage", "committed_steps")} == self._lineage.moment():
            if has_changed:
                self.pull_params()
        elif "state" in saved:
            self._checkpoints.restore_tensors(saved["state"], saved["committed_steps"])
        else:
            self._checkpoints.restore_checkpoint(find_directory(saved["directory"], self._state_directory))
        replaced = (self._digests() != before).nonzero().flatten().tolist()
        if replaced:
            first = self._hosting.hosted[replaced[0]]
            warn.warn(
                f"load_state_dict() has replaced the values of {len(replaced)} parameters, the first being "
                f"{first.name}, by those that were saved: they are part of this state. To keep "
                "others, load the model's after the optimizer's, and call push_params()"
            )

    def _has_changed_parameters(self) -> bool:
        """Whether somebody else has written parameters, of any rank."""
        changed = bool(run.all_or_none(self._hosting.group, "read its parameters", self._hosting.changed_parameters))
        return changed if self._hosting.group is None else any(self._hosting.group.gather_objects(changed))

    def _digests(self) -> torch.Tensor:
        """Returns digests of the parameters as the last step has left them, or the loop since."""
        self._hosting.synchronize()
        return digests([parameter.local.detach() for parameter in self._hosting.hosted])

    def _load_torch_state(self, state_dict: dict[str, Any]) -> None:
        saved_parameters = [key for group in state_dict["param_groups"] for key in group["params"]]
        saved = dict(zip(map(id, tensors_of(self._hosting.loop)), saved_parameters, strict=True))
        keys = {parameter.name: saved[id(parameter.tensor)] for parameter in self._hosting.hosted}
        if not state_dict["state"] and self._hosting.committed_steps() == 0:
            return  # of an optimizer that has made no step, as this one
        if self._has_changed_parameters():
            self.push_params()
        views = self.state_of(range(len(self._hosting.hosted)), self._hosting.algorithm.arrays)
        present = {parameter.name: views[index] for index, parameter in enumerate(self._hosting.hosted)}
        given = as_of_torch(state_dict["state"], self._hosting.algorithm.moments)
        by_tensor = {tensor: given[key] for tensor, key in saved.items() if key in given}
        whole = self._hosting.gather_loaded(by_tensor)
        state = {
            keys[hosted.name]: whole.get(id(hosted.tensor))
            or {
                key: shards.rows_of(shards.local(value), hosted.rows) if torch.is_tensor(value) else value
                for key, value in given[keys[hosted.name]].items()
            }
            for hosted in self._hosting.hosted
            if keys[hosted.name] in given
        }
        tensors, committed_steps = tensor_file.from_torch(self._hosting.algorithm, state, keys, present)
        if self._hosting.group is not None:  # a rank may have no element of those with most steps
            committed_steps = max(self._hosting.group.gather_objects(committed_steps))
        self._checkpoints.restore_tensors(tensors, committed_steps)

    def _check_same_groups(self, state_dict: dict[str, Any]) -> None:
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        ours = [len(group["params"]) for group in self._hosting.loop.param_groups]
        if saved != ours:
            raise ValueError(f"the state_dict has parameter groups of {saved} parameters, the optimizer of {ours}")
