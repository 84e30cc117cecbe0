"""How an optimizer of torch spells what the daemon computes with; the arithmetic is the daemon's."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

MASTER = "master"  # the fp32 parameters, which every algorithm has; "model" in the daemon and in checkpoints
STEP = "step"

_names: dict[str, str] = {}  # of the algorithms that torch's users can build, by the daemon's


def _nothing(group: Mapping[str, Any]) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One of the daemon's algorithms, in torch's words."""

    daemon_name: str  # Algorithm.name of the proto
    name: str
    # State beside the masters, as torch.optim calls it in optimizer.state[parameter].
    moments: tuple[str, ...]
    # A parameter group of torch -> the daemon's scalars by name, in the daemon's order.
    scalars: Callable[[Mapping[str, Any]], dict[str, float]]
    # The other way round.
    group_values: Callable[[Mapping[str, float]], dict[str, Any]]
    # Options of torch's constructor that would change results: the value that does not, and what to do instead.
    refused: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    # Why a parameter group is not one of this algorithm, if it is not.
    objection: Callable[[Mapping[str, Any]], str | None] = _nothing
    # An element's update depends on its whole parameter, so one rank's daemon hosts all of it.
    matrices: bool = False

    def __post_init__(self) -> None:
        _names[self.daemon_name] = self.name

    @property
    def arrays(self) -> tuple[str, ...]:
        return (MASTER, *self.moments)


def name_of(daemon_name: str) -> str:
    return _names.get(daemon_name, daemon_name)


def array_name(key: str) -> str:
    """Returns the name of a state array in the daemon and in its checkpoints."""
    return "model" if key == MASTER else key
