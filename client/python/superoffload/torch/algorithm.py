"""How an optimizer of torch spells what the daemon computes with; the arithmetic is the daemon's."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from superoffload._core import stored

MASTER = "master"  # the fp32 parameters, which every algorithm has; "model" in the daemon and in checkpoints
STEP = "step"
OPTIM_BITS = "optim_bits"  # of a parameter group, as bitsandbytes calls what its parameters' state is kept in

_SCALE_BYTES = torch.float32.itemsize / 256  # of a moment in 8 bits, per element of its block

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
    # Moments may be kept in bf16, and what they are kept in; those in 8 bits are handed out as the fp32 numbers that
    # they stand for.
    in_bfloat16: bool = False
    moment_dtype: torch.dtype = torch.float32
    state_bits: int = 32

    def __post_init__(self) -> None:
        _names[self.daemon_name] = self.name
        if self.in_bfloat16:
            for rounding, suffix in stored.BFLOAT16.items():
                told = f"{self.name} with state_dtype=torch.bfloat16, rounding={rounding!r}"
                _names[self.daemon_name + suffix] = told

    def stored_as(self, state_dtype: torch.dtype, rounding: stored.Rounding) -> "Algorithm":
        """The same with moments of another dtype. ValueError: there is none."""
        dtype = str(state_dtype).removeprefix("torch.")
        daemon_name = stored.daemon_name(self.daemon_name, dtype, rounding)
        if daemon_name == self.daemon_name:
            return self
        if not self.in_bfloat16:
            raise ValueError(f"{self.name} keeps its state as it does; leave state_dtype out")
        return dataclasses.replace(
            self,
            daemon_name=daemon_name,
            name=_names[daemon_name],
            in_bfloat16=False,
            moment_dtype=state_dtype,
            state_bits=16,
        )

    def in_float32(self, name: str, shape: Sequence[int], group: Mapping[str, Any]) -> bool:
        """Whether the moments of a parameter of ``group`` are kept in fp32, whatever those of others are."""
        return stored.in_float32(name, shape, self.state_bits, group.get(OPTIM_BITS))

    @property
    def may_be_resident(self) -> bool:
        """Whether a GPU has a kernel for it."""
        return not self.matrices

    @property
    def state_bytes(self) -> float:
        """Of an element, masters included, where its parameter's moments are not kept in fp32."""
        moment = self.state_bits / 8 + (_SCALE_BYTES if self.state_bits == 8 else 0)
        return torch.float32.itemsize + moment * len(self.moments)

    @property
    def arrays(self) -> tuple[str, ...]:
        return (MASTER, *self.moments)


def name_of(daemon_name: str) -> str:
    return _names.get(daemon_name, daemon_name)


def array_name(key: str) -> str:
    """Returns the name of a state array in the daemon and in its checkpoints."""
    return "model" if key == MASTER else key
