"""Optimizer state that leaves the daemon and comes back: checkpoints, state_dict(), torch's own format."""

import os
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import torch

from superoffload._core import warn
from superoffload._core.error import Error
from superoffload._core.layout import array_offsets
from superoffload.torch import options, tensor_file
from superoffload.torch.algorithm import STEP, array_name
from superoffload.torch.checkpoints import drop_others
from superoffload.torch.fingerprint import digests
from superoffload.torch.moment import FORMAT, Moment, callers, find_directory, module_of
from superoffload.torch.parameter_state import ParameterState
from superoffload.torch.ranks import replicas, shards
from superoffload.torch.ranks.sharding import TorchGroup
from superoffload.torch.written_state import WrittenState
from superoffload.v1 import optimizer_pb2

_KEY = "superoffload"  # of the moment in a state_dict
# In the place of each parameter's step, of which torch.optim makes a number when it loads a state; its error quotes it.
_NOT_OF_TORCH = (
    b"a state of superoffload.torch, which torch.optim cannot load: torch_state_dict() makes one that it can"
)
_STATE_DICT_CALLERS = ("torch.distributed.checkpoint.state_dict",)  # they take tensors out of state_dict()
_SAVE_SECONDS = 60  # that ranks may save after one another
_SLOW_SECONDS = 10  # until a rank that waits for others says so

# (endpoint, name) -> lineage and committed steps of an optimizer that this process has closed.
_closed: dict[tuple[str, str], tuple[str, int]] = {}


class StateOwner(WrittenState):
    """The part of the optimizers that reads, saves and loads their state."""

    def _own_state(self, state_directory: str | os.PathLike[str] | None, continues: bool) -> None:
        """To be called once it is attached; ``continues``: with the state that it found."""
        self._state_directory = None if state_directory is None else os.path.abspath(state_directory)
        self._lineage = uuid.uuid4().hex
        lineage, committed_steps = _closed.pop((self._connection.endpoint, self.name), (None, None))
        if continues and lineage is not None and committed_steps == self._committed_steps():
            self._lineage = lineage
        self._fill_state()

    def _state_closed(self) -> None:
        """To be called when it is detached."""
        self.state.clear()
        if not self._anonymous:
            _closed[self._connection.endpoint, self.name] = self._lineage, self._committed_steps()

    def is_attached(self) -> bool:
        return self._attached

    def _committed_steps(self) -> int:
        return self._stepping.committed_steps()

    def moment_identity(self) -> dict[str, Any]:
        """Two moments with the same one have the same masters, moments and steps."""
        return {"name": self.name, "lineage": self._lineage, "committed_steps": self._committed_steps()}

    def _state_replaced(self) -> None:
        """The state is another than so many steps have made it."""
        self._lineage = uuid.uuid4().hex

    # Reading.

    def state_of(self, indices: Sequence[int], keys: Sequence[str]) -> dict[int, dict[str, torch.Tensor]]:
        """Views of the daemon's memory by hosted parameter, right until the next step: fp32, in its local shape."""
        self._check_attached()
        self._send_written_state()
        return self._views(indices, keys)

    def _views(self, indices: Sequence[int], keys: Sequence[str]) -> dict[int, dict[str, torch.Tensor]]:
        self._check_attached()
        self._quiesce()
        self._attachment.call("SettleOptimizer", optimizer_pb2.SettleOptimizerRequest(name=self.name))
        steps = self._attachment.parameter_steps() if STEP in keys else []
        layout = self._attachment.optimizer.layout
        offsets = array_offsets(layout)
        result: dict[int, dict[str, torch.Tensor]] = {}
        for index in indices:
            placement, shape = layout.placements[index], self._hosted[index].local.shape
            result[index] = {}
            for key in keys:
                if key == STEP:
                    result[index][key] = torch.tensor(steps[index], dtype=torch.float32, device="cpu")
                    continue
                offset = offsets[array_name(key)] + 4 * placement.state_offset
                buffer = self._attachment.state(offset, 4 * shape.numel())
                result[index][key] = torch.frombuffer(buffer, dtype=torch.float32).view(shape)
        return result

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of ``master`` and of the moments by parameter name: fp32, in the parameter's local shape."""
        state = self.state_of(range(len(self._hosted)), self.algorithm.arrays)
        return {
            self._hosted[index].name: {key: tensor.clone() for key, tensor in tensors.items()}
            for index, tensors in state.items()
        }

    # state_dict.

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters and the present moment: free. Pickled or deeply copied it holds the state; see `Moment`.

        With ``state_tensors()`` and ``optimizer.state[parameter]`` the state can be looked at.
        """
        self._check_attached()
        self._send_written_state()
        state = super().state_dict()
        if any(module_of(frame) in _STATE_DICT_CALLERS for frame, _ in zip(callers(), range(4), strict=False)):
            return self._with_tensors(state, self.state_keys(), shards.like_on_host)
        state["state"] = {
            key: {STEP: _NOT_OF_TORCH, **value.others} if isinstance(value, ParameterState) else value
            for key, value in state["state"].items()
        }
        state[_KEY] = Moment(self)
        return state

    def torch_state_dict(self) -> dict[str, Any]:
        """A state_dict that the optimizer's counterpart in torch.optim can load, on the same parameters: copies."""
        self._check_attached()
        return self._with_tensors(super().state_dict(), self.torch_keys(), shards.like)

    def _with_tensors(
        self, state: dict[str, Any], keys: Sequence[str], like: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> dict[str, Any]:
        views = self.state_of(range(len(self._hosted)), keys)
        by_tensor = {id(parameter.tensor): views[index] for index, parameter in enumerate(self._hosted)}
        if self._sharding is not None:
            self._warn_of_absent_ranks(self._sharding.group)
            replicas.gather_state(self._sharding, by_tensor, keys)
        state["state"] = {
            index: {
                key: value.clone() if key == STEP else like(tensor, value.clone())
                for key, value in by_tensor[id(tensor)].items()
            }
            for index, tensor in enumerate(self._all_parameters())
            if id(tensor) in by_tensor
        }
        return state

    def _warn_of_absent_ranks(self, group: TorchGroup) -> None:
        absent = group.absent(f"state {self._committed_steps()}", _SLOW_SECONDS)
        if absent:
            warn.warn(
                f"rank {group.rank} completes the optimizer's state with what other ranks have, and waits for rank "
                f"{', '.join(map(str, absent))} until the process group's time-out: all ranks call torch_state_dict(), "
                "and one may save what it returns"
            )

    def _check_all_save(self, group: TorchGroup) -> None:
        absent = group.absent(f"save {self._committed_steps()}", _SAVE_SECONDS)
        if absent:
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"rank {group.rank} has its part of the optimizer's state only, and rank {', '.join(map(str, absent))} "
                f"did not save its own within {_SAVE_SECONDS:g} seconds, so that what is saved here could not be "
                "loaded. Have all ranks call torch_state_dict() and save that on one; or have all ranks call "
                "save_checkpoint(), which any number of them restores; or save state_dict() on all ranks, each into a "
                "file of its own",
            )

    def save_state(self, beside: str | None) -> dict[str, Any]:
        """Where the state of this moment is: a checkpoint's ``directory``, or ``state``, the tensors themselves.

        ``beside``: path of a checkpoint, less its number; those of other numbers are replaced.
        """
        if beside is not None and self._ranks() > 1:
            return {"directory": self.saved_beside(beside), "run": True}
        if self._sharding is not None:
            self._check_all_save(self._sharding.group)
        if beside is not None:
            prefix = beside
        elif self._state_directory is not None:
            os.makedirs(self._state_directory, exist_ok=True)
            prefix = os.path.join(self._state_directory, f"{self.name}-{self._committed_steps():08d}")
        else:
            self.synchronize()
            views = self.state_of(range(len(self._hosted)), (STEP, *self.algorithm.arrays))
            return {"state": {self._hosted[index].name: tensors for index, tensors in views.items()}}
        directory = f"{prefix}-{uuid.uuid4().hex[:12]}"
        self._check_attached()
        self._quiesce()
        self._write_checkpoint(directory)
        if beside is not None:
            drop_others(prefix, directory)
        return {"directory": directory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to the moment of a ``state_dict()``, or takes over the state of its counterpart in torch.optim.

        Parameters become those of the moment, too; torch's state has none, and the model's stay. Loading the present
        moment is free.
        """
        self._check_attached()
        self._check_same_groups(state_dict)
        options.check_groups(state_dict["param_groups"], self.algorithm)
        moment = state_dict.get(_KEY)
        if moment is None:
            self._load_torch_state(state_dict)
        elif isinstance(moment, Moment):
            if moment.identity != self.moment_identity():
                raise Error(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"this state_dict is of optimizer {moment.identity['name']} after "
                    f"{moment.identity['committed_steps']} committed steps, this is {self.name} after "
                    f"{self._committed_steps()}, and nobody saved that moment; to come back to one keep "
                    "copy.deepcopy(optimizer.state_dict()), or torch.save() it",
                )
        else:
            self._load_saved(moment)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._fill_state()
        if moment is not None:
            self._load_others(state_dict)

    def _load_others(self, state_dict: dict[str, Any]) -> None:
        """What the loop had in ``optimizer.state`` of its own."""
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        tensors = dict(zip(saved, self._all_parameters(), strict=True))
        for key, value in state_dict["state"].items():
            if key in tensors:
                self.state[tensors[key]].update({name: other for name, other in value.items() if name != STEP})
            else:
                self.state[key] = value

    def _ranks(self) -> int:
        """Among which the state is divided."""
        return 1

    def _load_saved(self, saved: Mapping[str, Any]) -> None:
        if saved.get("format") != FORMAT:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the state_dict has format {saved.get('format')} but this version reads {FORMAT}; use the version "
                "of superoffload that saved it",
            )
        run = saved.get("run", False)  # of all ranks, for all
        part = f".{self.name.rsplit('.', 1)[-1]}"  # of a run
        if not run and self._ranks() > 1 and not saved["name"].endswith(part):
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the state_dict was saved by {saved['name']} and this is {self.name}: each rank loads what it has "
                "saved itself; restore= with the checkpoints of all ranks fits any number of them",
            )
        before = self._digests()
        if not run and {key: saved[key] for key in ("name", "lineage", "committed_steps")} == self.moment_identity():
            if self._live.changed():
                self.pull_params()
        elif "state" in saved:
            self._restore_tensors(saved["state"], saved["committed_steps"])
        else:
            self.restore_checkpoint(find_directory(saved["directory"], self._state_directory))
        replaced = (self._digests() != before).nonzero().flatten().tolist()
        if replaced:
            warn.warn(
                f"load_state_dict() has replaced the values of {len(replaced)} parameters, the first being "
                f"{self._hosted[replaced[0]].name}, by those that were saved: they are part of this state. To keep "
                "others, load the model's after the optimizer's, and call push_params()"
            )

    def _digests(self) -> torch.Tensor:
        """Of the parameters as the last step has left them, or the loop since."""
        self.synchronize()
        return digests([parameter.local.detach() for parameter in self._hosted])

    def load_torch_state_dict(self, state_dict: dict[str, Any]) -> None:
        """``load_state_dict()`` of its counterpart in torch.optim on the same parameters."""
        self.load_state_dict(state_dict)

    def _load_torch_state(self, state_dict: dict[str, Any]) -> None:
        saved_parameters = [key for group in state_dict["param_groups"] for key in group["params"]]
        saved = dict(zip(map(id, self._all_parameters()), saved_parameters, strict=True))
        keys = {parameter.name: saved[id(parameter.tensor)] for parameter in self._hosted}
        if not state_dict["state"] and self._committed_steps() == 0:
            return  # of an optimizer that has made no step, as this one
        if self._live.changed():
            self.push_params()
        masters = self.state_of(range(len(self._hosted)), ["master"])
        names = {parameter.name: masters[index]["master"] for index, parameter in enumerate(self._hosted)}
        state = {
            keys[hosted.name]: {
                key: shards.rows_of(shards.local(value), hosted.rows) if torch.is_tensor(value) else value
                for key, value in state_dict["state"][keys[hosted.name]].items()
            }
            for hosted in self._hosted
            if keys[hosted.name] in state_dict["state"]
        }
        tensors, committed_steps = tensor_file.from_torch(self.algorithm, state, keys, names)
        if self._sharding is not None:  # a rank may have no element of those with most steps
            committed_steps = max(self._sharding.group.gather_objects(committed_steps))
        self._restore_tensors(tensors, committed_steps)

    def _restore_tensors(self, tensors: dict[str, dict[str, torch.Tensor]], committed_steps: int) -> None:
        """Hyper-parameters are sent with the next step."""
        with tempfile.TemporaryDirectory(dir=self._state_directory) as directory:
            file = tensor_file.write(os.path.join(directory, "state.safetensors"), tensors, committed_steps)
            self._restore(optimizer_pb2.RestoreOptimizerRequest(files=[file]))

    def _check_same_groups(self, state_dict: dict[str, Any]) -> None:
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        ours = [len(group["params"]) for group in self.param_groups]
        if saved != ours:
            raise ValueError(f"the state_dict has parameter groups of {saved} parameters, the optimizer of {ours}")

    def _all_parameters(self) -> list[torch.Tensor]:
        return [tensor for group in self.param_groups for tensor in group["params"]]
