"""What training loops write to ``optimizer.state``, and how the daemon takes it over."""

import operator
from typing import Any, ClassVar

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch.algorithm import MASTER, STEP, Algorithm
from superoffload.torch.checkpoints import CheckpointOwner
from superoffload.torch.parameter_state import ParameterState
from superoffload.torch.ranks import shards
from superoffload.torch.state_copies import StateCopies


class WrittenState(CheckpointOwner):
    """The part of the optimizers that fills ``optimizer.state``, and sends what the loop has written there."""

    algorithm: ClassVar[Algorithm]

    def torch_keys(self) -> tuple[str, ...]:
        """Of ``optimizer.state[parameter]`` in torch."""
        return (STEP, *self.algorithm.moments)

    def state_keys(self) -> tuple[str, ...]:
        return (*self.torch_keys(), MASTER)

    def _fill_state(self) -> None:
        """torch.distributed.checkpoint makes a step of its own where it finds no state."""
        self._copies = StateCopies()
        self._states = [ParameterState(self, index) for index in range(len(self._hosted))]
        self.state.update(
            {parameter.tensor: state for parameter, state in zip(self._hosted, self._states, strict=True)}
        )

    def copy_of_state(self, index: int, key: str) -> torch.Tensor:
        """For `ParameterState`: what the loop has written already, or a copy."""
        return self._copies.get(index, key, lambda: self._views([index], [key])[index][key].clone())

    def set_state(self, index: int, key: str, value: Any) -> None:
        shape = torch.Size() if key == STEP else self._hosted[index].local.shape
        given = torch.as_tensor(
            shards.local(value) if torch.is_tensor(value) else value, dtype=torch.float32, device="cpu"
        )
        if given.shape != shape and given.numel() != 1:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{key} of {self._hosted[index].name} is given as {list(given.shape)} but is {list(shape)}",
            )
        self._copies.set(index, key, given.expand(shape) if given.dim() <= len(shape) else given.reshape(shape))

    def _written_state(self) -> dict[int, dict[str, torch.Tensor]]:
        """What the loop has written to ``optimizer.state`` since the last step, by index of the parameter."""
        if self._states_are_in_place():
            return self._copies.written()
        for index, parameter in enumerate(self._hosted):
            state = self.state.get(parameter.tensor)
            if state is self._states[index] and not state.is_cleared:
                continue
            given = dict(state or {})
            ours = self.state[parameter.tensor] = self._states[index] = ParameterState(self, index)
            if not given.keys() & set(self.state_keys()):  # torch makes it anew
                zeros = torch.zeros(self._hosted[index].local.shape, dtype=torch.float32, device="cpu")
                given |= dict.fromkeys(self.algorithm.moments, zeros) | {STEP: 0.0}
            missing = [key for key in self.torch_keys() if key not in given]
            if missing:
                raise Error(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"optimizer.state of {parameter.name} was replaced and has no {missing[0]}; give it "
                    f"{', '.join(self.torch_keys())}, or nothing to begin anew",
                )
            ours.update(given)
        return self._copies.written()

    def _states_are_in_place(self) -> bool:
        """In the order in which they were filled in, as they are unless the loop has replaced some: fast."""
        in_place = len(self.state) >= len(self._states) and all(map(operator.is_, self._states, self.state.values()))
        return in_place and not any(state.is_cleared for state in self._states)

    def _send_written_state(self) -> None:
        """Has the daemon take over what the loop has written. Raises Error in several ranks."""
        written = self._written_state()
        if not written:
            return
        if self._ranks() > 1:
            self._copies.on_another_moment()
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"optimizer.state of {self._hosted[min(written)].name} was written, which reaches no other rank, and "
                "is left out; have all ranks call torch_state_dict(), then load_torch_state_dict() with the new one",
            )
        self._stepping.check_parameters()
        tensors = {
            self._hosted[index].name: tensors | {key: given.clone() for key, given in written.get(index, {}).items()}
            for index, tensors in self._views(range(len(self._hosted)), self.state_keys()).items()
        }
        steps = [self._committed_steps(), *(int(state[STEP]) for state in written.values() if STEP in state)]
        self._restore_tensors(tensors, max(steps))
