"""Optimizer state that leaves the daemon and comes back: checkpoints, state_dict(), torch's own format."""

import glob
import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import torch

from superoffload import _torch_checkpoint, _torch_options
from superoffload._error import Error
from superoffload._torch_moment import FORMAT, Moment, callers, find_directory, module_of
from superoffload.v1 import optimizer_pb2

Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_KEY = "superoffload"  # of the moment in a state_dict
_ARRAYS = ("master", "exp_avg", "exp_avg_sq")
_TORCH_KEYS = ("step", "exp_avg", "exp_avg_sq")
_KEYS = (*_TORCH_KEYS, "master")
_STATE_DICT_CALLERS = ("torch.distributed.checkpoint.state_dict",)  # they take tensors out of state_dict()

# (endpoint, name) -> lineage and committed steps of an optimizer that this process has closed.
_closed: dict[tuple[str, str], tuple[str, int]] = {}


class ParameterState(Mapping[str, torch.Tensor]):
    """What torch has in ``optimizer.state[parameter]``, and the fp32 ``master``: copies, made when asked for."""

    def __init__(self, optimizer: "StateOwner", index: int) -> None:
        self._optimizer = weakref.proxy(optimizer)
        self._index = index

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in _KEYS:
            raise KeyError(key)
        return self._optimizer.state_of([self._index], [key])[self._index][key].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)


class StateOwner(torch.optim.Optimizer):
    """The part of the optimizers that saves and loads their state."""

    _algorithm: int

    def _own_state(self, state_directory: str | os.PathLike[str] | None, continues: bool) -> None:
        """To be called once it is attached; ``continues``: with the state that it found."""
        self._state_directory = None if state_directory is None else os.path.abspath(state_directory)
        self._lineage = uuid.uuid4().hex
        lineage, committed_steps = _closed.pop((self._connection.endpoint, self.name), (None, None))
        if continues and lineage is not None and committed_steps == self._committed_steps():
            self._lineage = lineage
        self._fill_state()

    def _fill_state(self) -> None:
        """torch.distributed.checkpoint makes a step of its own where it finds no state."""
        for index, parameter in enumerate(self._hosted):
            self.state[parameter.tensor] = ParameterState(self, index)

    def _state_closed(self) -> None:
        """To be called when it is detached."""
        self.state.clear()
        if not self._anonymous:
            _closed[self._connection.endpoint, self.name] = self._lineage, self._committed_steps()

    def is_attached(self) -> bool:
        return self._attached

    def _committed_steps(self) -> int:
        return self.last_result.committed_steps if self.last_result else self._attachment.optimizer.committed_steps

    def moment_identity(self) -> dict[str, Any]:
        """Two moments with the same one have the same masters, moments and steps."""
        return {"name": self.name, "lineage": self._lineage, "committed_steps": self._committed_steps()}

    def _state_replaced(self) -> None:
        """The state is another than so many steps have made it."""
        self._lineage = uuid.uuid4().hex

    # Reading.

    def state_of(self, indices: Sequence[int], keys: Sequence[str]) -> dict[int, dict[str, torch.Tensor]]:
        """Views of the daemon's memory by hosted parameter, right until the next step: fp32, in its shape."""
        self._check_attached()
        self._quiesce()
        self._attachment.call("SettleOptimizer", optimizer_pb2.SettleOptimizerRequest(name=self.name))
        step = torch.tensor(float(self._committed_steps()))
        layout = self._attachment.optimizer.layout
        offsets = {
            "master": layout.master_offset,
            "exp_avg": layout.exp_avg_offset,
            "exp_avg_sq": layout.exp_avg_sq_offset,
        }
        result: dict[int, dict[str, torch.Tensor]] = {}
        for index in indices:
            placement, shape = layout.placements[index], self._hosted[index].tensor.shape
            result[index] = {}
            for key in keys:
                if key == "step":
                    result[index][key] = step.clone()
                    continue
                buffer = self._attachment.state(offsets[key] + 4 * placement.state_offset, 4 * shape.numel())
                result[index][key] = torch.frombuffer(buffer, dtype=torch.float32).view(shape)
        return result

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of ``master``, ``exp_avg`` and ``exp_avg_sq`` by parameter name: fp32, in the parameter's shape."""
        state = self.state_of(range(len(self._hosted)), _ARRAYS)
        return {
            self._hosted[index].name: {key: tensor.clone() for key, tensor in tensors.items()}
            for index, tensors in state.items()
        }

    # Checkpoints.

    def save_checkpoint(self, directory: str | os.PathLike[str]) -> int:
        """Has the daemon write a checkpoint of this moment, and waits; returns its number of committed steps.

        ``directory`` must not exist. Its safetensors files hold ``model.NAME``, ``exp_avg.NAME`` and
        ``exp_avg_sq.NAME`` in fp32.
        """
        self._check_attached()
        self._quiesce()
        request = optimizer_pb2.CheckpointOptimizerRequest(name=self.name, directory=os.path.abspath(directory))
        return self._attachment.stream("CheckpointOptimizer", request).committed_steps

    def restore_checkpoint(self, directories: Directories) -> None:
        """Goes back, or on, to a checkpoint: parameters, moments, step and hyper-parameters become those saved."""
        self._check_attached()
        self._quiesce()
        self._state_replaced()
        with self._attachment.detached():
            self._restore(directories)
        self.last_result = None
        self._sent_groups = [None] * len(self.param_groups)
        self._live.adopt()

    def _restore(self, directories: Directories) -> None:
        if isinstance(directories, str | os.PathLike):
            directories = [directories]
        request = optimizer_pb2.RestoreOptimizerRequest(name=self.name, directories=map(os.path.abspath, directories))
        restored = self._connection.call_again("RestoreOptimizer", request)
        for group, values in zip(self.param_groups, restored.groups, strict=True):
            group.update(
                lr=values.lr, betas=(values.beta1, values.beta2), eps=values.eps, weight_decay=values.weight_decay
            )

    # state_dict.

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters and the present moment: free. Pickled or deeply copied it holds the state; see `Moment`.

        With ``state_tensors()`` and ``optimizer.state[parameter]`` the state can be looked at.
        """
        self._check_attached()
        state = super().state_dict()
        if any(module_of(frame) in _STATE_DICT_CALLERS for frame, _ in zip(callers(), range(4), strict=False)):
            return self._with_tensors(state, _KEYS)
        state["state"] = {}
        state[_KEY] = Moment(self)
        return state

    def torch_state_dict(self) -> dict[str, Any]:
        """A state_dict that torch.optim.AdamW (or Adam) on the same parameters can load: copies of all moments."""
        self._check_attached()
        return self._with_tensors(super().state_dict(), _TORCH_KEYS)

    def _with_tensors(self, state: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        views = self.state_of(range(len(self._hosted)), keys)
        by_tensor = {id(parameter.tensor): views[index] for index, parameter in enumerate(self._hosted)}
        state["state"] = {
            index: {key: by_tensor[id(tensor)][key].clone() for key in keys}
            for index, tensor in enumerate(self._all_parameters())
            if id(tensor) in by_tensor
        }
        return state

    def save_state(self, beside: str | None) -> dict[str, Any]:
        """Where the state of this moment is: a checkpoint's ``directory``, or ``state``, the tensors themselves.

        ``beside``: path of a checkpoint, less its number; those of other numbers are replaced.
        """
        if beside is None and self._state_directory is None:
            self.synchronize()
            views = self.state_of(range(len(self._hosted)), _ARRAYS)
            return {"state": {self._hosted[index].name: tensors for index, tensors in views.items()}}
        if beside is None:
            os.makedirs(self._state_directory, exist_ok=True)
        prefix = beside or os.path.join(self._state_directory, f"{self.name}-{self._committed_steps():08d}")
        directory = f"{prefix}-{uuid.uuid4().hex[:12]}"
        self.save_checkpoint(directory)
        if beside is not None:  # the file that named the one before has just been overwritten
            for old in glob.glob(f"{glob.escape(prefix)}-*"):
                if old != directory:
                    shutil.rmtree(old)
        return {"directory": directory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to the moment of a ``state_dict()``, or takes over the state of a torch.optim.AdamW (or Adam).

        Parameters become those of the moment, too; torch's state has none, and the model's stay. Loading the present
        moment is free.
        """
        self._check_attached()
        self._check_same_groups(state_dict)
        _torch_options.check_groups(state_dict["param_groups"], self._algorithm)
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

    def _load_saved(self, saved: Mapping[str, Any]) -> None:
        if saved.get("format") != FORMAT:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the state_dict has format {saved.get('format')} but this version reads {FORMAT}; use the version "
                "of superoffload that saved it",
            )
        if {key: saved[key] for key in ("name", "lineage", "committed_steps")} == self.moment_identity():
            if self._live.changed():
                self.pull_params()
        elif "state" in saved:
            self._restore_tensors(saved["state"], saved["committed_steps"])
        else:
            self.restore_checkpoint(find_directory(saved["directory"], self._state_directory))

    def load_torch_state_dict(self, state_dict: dict[str, Any]) -> None:
        """``load_state_dict()`` of a torch.optim.AdamW (or Adam) on the same parameters."""
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
        tensors, committed_steps = _torch_checkpoint.from_torch(state_dict["state"], keys, names)
        self._restore_tensors(tensors, committed_steps, state_dict["param_groups"])

    def _restore_tensors(
        self,
        tensors: dict[str, dict[str, torch.Tensor]],
        committed_steps: int,
        groups: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        with tempfile.TemporaryDirectory(dir=self._state_directory) as directory:
            _torch_checkpoint.write(
                directory,
                tensors,
                committed_steps,
                groups or self.param_groups,
                {parameter.name: parameter.group for parameter in self._hosted},
            )
            self.restore_checkpoint(directory)

    def _check_same_groups(self, state_dict: dict[str, Any]) -> None:
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        ours = [len(group["params"]) for group in self.param_groups]
        if saved != ours:
            raise ValueError(f"the state_dict has parameter groups of {saved} parameters, the optimizer of {ours}")

    def _all_parameters(self) -> list[torch.Tensor]:
        return [tensor for group in self.param_groups for tensor in group["params"]]
