"""What training loops write to ``optimizer.state``, and how the daemon takes it over."""

import operator
from collections.abc import Callable
from typing import Any

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch.algorithm import MASTER, STEP
from superoffload.torch.hosting import Hosting
from superoffload.torch.ranks import shards
from superoffload.torch.state.copies import StateCopies
from superoffload.torch.state.parameter import ParameterState
from superoffload.torch.state.views import like_view, state_views


class WrittenState:
    """Fills ``optimizer.state``, and sends what the loop has written there.

    ``restore``: has the daemon take over arrays by parameter name, and the number of committed steps.
    """

    def __init__(
        self,
        hosting: Hosting,
        copies: StateCopies,
        restore: Callable[[dict[str, dict[str, torch.Tensor]], int], None],
    ) -> None:
        self._hosting = hosting
        self._copies = copies
        self._restore = restore
        self._states: list[ParameterState] = []

    def torch_keys(self) -> tuple[str, ...]:
        """The keys of ``optimizer.state[parameter]`` in torch."""
        return (STEP, *self._hosting.algorithm.moments)

    def state_keys(self) -> tuple[str, ...]:
        """The keys of ``optimizer.state[parameter]`` here."""
        return (*self.torch_keys(), MASTER)

    def fill(self) -> None:
        """Fills ``optimizer.state``: torch.distributed.checkpoint makes a step of its own where it finds none."""
        hosted = self._hosting.hosted
        self._copies.clear()
        self._states = [ParameterState(self, index) for index in range(len(hosted))]
        self._hosting.loop.state.update(
            {parameter.tensor: state for parameter, state in zip(hosted, self._states, strict=True)}
        )

    def copy_of_state(self, index: int, key: str) -> torch.Tensor:
        """Returns, for `ParameterState`, what the loop has written already, or a copy."""
        return self._copies.get(index, key, lambda: state_views(self._hosting, [index], [key])[index][key].clone())

    def set_state(self, index: int, key: str, value: Any) -> None:
        """Notes, for `ParameterState`, what the loop writes."""
        like = like_view(self._hosting, index, key)
        shape = like.shape
        given = torch.as_tensor(shards.local(value) if torch.is_tensor(value) else value, device="cpu")
        name = self._hosting.hosted[index].name
        given = given.to(like.dtype)
        if given.shape != shape and given.numel() != 1:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{key} of {name} is given as {list(given.shape)} but is {list(shape)}",
            )
        self._copies.set(index, key, given.expand(shape) if given.dim() <= len(shape) else given.reshape(shape))

    def _written(self) -> dict[int, dict[str, torch.Tensor]]:
        """What the loop has written to ``optimizer.state`` since the last step, by index of the parameter."""
        if self._states_are_in_place():
            return self._copies.written()
        all_states = self._hosting.loop.state
        for index, parameter in enumerate(self._hosting.hosted):
            state = all_states.get(parameter.tensor)
            if state is self._states[index] and not state.is_cleared:
                continue
            given = dict(state or {})
            ours = all_states[parameter.tensor] = self._states[index] = ParameterState(self, index)
            if not given.keys() & set(self.state_keys()):  # torch makes it anew
                given |= dict.fromkeys(self.torch_keys(), 0)
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
        """Whether they are as they were filled in, in the same order, which is fast. The loop may replace some."""
        present = self._hosting.loop.state
        in_place = len(present) >= len(self._states) and all(map(operator.is_, self._states, present.values()))
        return in_place and not any(state.is_cleared for state in self._states)

    def send(self) -> None:
        """Has the daemon take over what the loop has written. Raises Error in several ranks."""
        written = self._written()
        if not written:
            return
        hosted = self._hosting.hosted
        if self._hosting.ranks() > 1:
            self._copies.on_another_moment()
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"optimizer.state of {hosted[min(written)].name} was written, which reaches no other rank, and "
                "is left out; have all ranks call torch_state_dict(), then load_torch_state_dict() with the new one",
            )
        self._hosting.check_parameters()
        tensors = {
            hosted[index].name: tensors | {key: given.clone() for key, given in written.get(index, {}).items()}
            for index, tensors in state_views(self._hosting, range(len(hosted)), self.state_keys()).items()
        }
        steps = [self._hosting.committed_steps(), *(int(state[STEP]) for state in written.values() if STEP in state)]
        self._restore(tensors, max(steps))
