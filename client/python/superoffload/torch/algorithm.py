"""How an optimizer of torch spells what the daemon computes with; the arithmetic is the daemon's."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from superoffload._core import stored
from superoffload._core.layout import ArrayPart

MASTER = "master"  # the master weights, which every algorithm has; "model" in the daemon and in checkpoints
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
    # Masters may be, and are they.
    masters_in_bfloat16: bool = False
    master_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        stored_as = {"": ""}
        if self.in_bfloat16:
            for rounding, suffix in stored.BFLOAT16.items():
                stored_as[suffix] = f" with state_dtype=torch.bfloat16, rounding={rounding!r}"
        if self.masters_in_bfloat16:
            for suffix in ("", stored.BFLOAT16["stochastic"]) if self.in_bfloat16 else ("",):
                words = stored_as[suffix] + "," if suffix else " with"
                stored_as[suffix + stored.BFLOAT16_MASTERS] = f"{words} master_dtype=torch.bfloat16"
        for suffix, words in stored_as.items():
            _names[self.daemon_name + suffix] = self.name + words

    def stored_as(
        self, state_dtype: torch.dtype, rounding: stored.Rounding, master_dtype: torch.dtype = torch.float32
    ) -> "Algorithm":
        """The same with moments and masters of other dtypes. ValueError: there is none."""
        dtype, masters = (str(each).removeprefix("torch.") for each in (state_dtype, master_dtype))
        daemon_name = stored.daemon_name(self.daemon_name, dtype, rounding, masters)
        if daemon_name == self.daemon_name:
            return self
        for option, other, may_be in (
            ("state_dtype", state_dtype != torch.float32, self.in_bfloat16),
            ("master_dtype", master_dtype != torch.float32, self.masters_in_bfloat16),
        ):
            if other and not may_be:
                raise ValueError(f"{self.name} keeps its state as it does; leave {option} out")
        return dataclasses.replace(
            self,
            daemon_name=daemon_name,
            name=_names[daemon_name],
            in_bfloat16=False,
            moment_dtype=state_dtype,
            state_bits=self.state_bits if state_dtype == torch.float32 else 16,
            masters_in_bfloat16=False,
            master_dtype=master_dtype,
        )

    def in_float32(self, name: str, shape: Sequence[int], dtype: torch.dtype, group: Mapping[str, Any]) -> bool:
        """Whether the state of a parameter of ``group`` is kept in fp32, whatever that of others is."""
        told, master_bits = str(dtype).removeprefix("torch."), 8 * self.master_dtype.itemsize
        return stored.in_float32(name, shape, told, self.state_bits, master_bits, group.get(OPTIM_BITS))

    @property
    def may_be_resident(self) -> bool:
        """Whether a GPU has a kernel for it."""
        return not self.matrices

    @property
    def state_bytes(self) -> float:
        """Of an element, masters included, where its parameter's state is not kept in fp32."""
        moment = self.state_bits / 8 + (_SCALE_BYTES if self.state_bits == 8 else 0)
        return self.master_dtype.itemsize + moment * len(self.moments)

    @property
    def arrays(self) -> tuple[str, ...]:
        return (MASTER, *self.moments)


def name_of(daemon_name: str) -> str:
    return _names.get(daemon_name, daemon_name)


def dtype_of(part: ArrayPart) -> torch.dtype:
    dtype = getattr(torch, part.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def array_name(key: str) -> str:
    """Returns the name of a state array in the daemon and in its checkpoints."""
    return "model" if key == MASTER else key
