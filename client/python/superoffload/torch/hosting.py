"""What the parts of an optimizer see of the optimizer in the daemon; lifecycle.py has it."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from superoffload._core.attachment import Attachment
from superoffload._core.run import Group
from superoffload.torch.algorithm import Algorithm
from superoffload.torch.ranks.shards import HostedParameter
from superoffload.v1 import optimizer_pb2


class Ranks(Group, Protocol):
    """The process group of the ranks that train together."""

    def absent(self, purpose: str, seconds: float) -> list[int]:
        """The ranks that have not come to the same call after so long. See ranks/gathering.py."""


class Loop(Protocol):
    """What a training loop has of an optimizer, and writes: attributes of torch.optim.Optimizer."""

    param_groups: list[dict[str, Any]]
    state: Any  # by parameter; torch replaces it when it loads a state


class Hosting(Protocol):
    """The optimizer in the daemon that this process is attached to, or was attached to last."""

    name: str
    anonymous: bool  # it ends with the attachment
    algorithm: Algorithm
    attached: bool
    attachment: Attachment
    hosted: list[HostedParameter]

    @property
    def loop(self) -> Loop: ...

    @property
    def group(self) -> Ranks | None:
        """None where this process trains alone."""

    @property
    def endpoint(self) -> str:
        """The daemon's endpoint."""

    def ranks(self) -> int:
        """The number of ranks among which the state is divided."""

    def check_attached(self) -> None:
        """Raises Error when it is closed. Otherwise no call that was cut off is still under way afterwards."""

    def quiesce(self) -> None:
        """No step is open, the last one is over, and the current stream sees its parameters."""

    def synchronize(self) -> None:
        """Has the current stream wait for the parameters of the last step."""

    def committed_steps(self) -> int: ...

    def check_parameters(self) -> None:
        """Raises Error for parameters that somebody else has written; the open step is abandoned then."""

    def changed_parameters(self) -> list[str]:
        """Names of parameters that somebody else has written or replaced."""

    def push_parameters(self) -> None:
        """Sets the published parameters and the masters to the model's parameters."""

    def pull_parameters(self) -> None:
        """Sets the published parameters and the model's to the masters."""

    def gather_state(self, by_tensor: dict[int, dict[str, torch.Tensor]], keys: Sequence[str]) -> None:
        """Completes the state of parameters, by id, with what other ranks have. All ranks call it."""

    def gather_loaded(self, by_tensor: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Of a given state by id of the parameter: of those of which ranks have shards, what is hosted here, whole.

        All ranks call it.
        """

    def load(self, source: optimizer_pb2.RestoreOptimizerRequest) -> None:
        """Has the daemon load ``source`` into the optimizer; parameters and hyper-parameters become its own."""


def tensors_of(loop: Loop) -> list[torch.Tensor]:
    """All parameters of the groups, in order."""
    return [tensor for group in loop.param_groups for tensor in group["params"]]
