"""How Optax spells what the daemon computes with; the arithmetic is the daemon's."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from superoffload._core import stored

Schedule = Callable[[Any], Any]  # committed steps -> value, as in Optax; made of JAX operations


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One of the daemon's algorithms, in Optax's words."""

    daemon_name: str  # Algorithm.name of the proto
    scalars: Mapping[str, str]  # the daemon's name -> Optax's
    decay: str  # the daemon's name of the scalar that is 0 for leaves that mask= leaves out
    state_bits: int = 32  # of moments
    master_bits: int = 32

    def stored_as(self, state_dtype: Any, rounding: stored.Rounding, master_dtype: Any) -> "Algorithm":
        """The same with moments and masters of other dtypes. ValueError: there is none."""
        dtype, masters = np.dtype(state_dtype), np.dtype(master_dtype)
        name = stored.daemon_name(self.daemon_name, dtype.name, rounding, masters.name)
        if self.state_bits < 32 and dtype.itemsize < 4:
            raise ValueError(f"{self.daemon_name} keeps its moments as it does; leave state_dtype out")
        bits = self.state_bits if dtype.itemsize == 4 else 16
        return dataclasses.replace(self, daemon_name=name, state_bits=bits, master_bits=8 * masters.itemsize)

    def values(self, group: Mapping[str, Any], decayed: bool) -> dict[str, Any]:
        """A group's values by the daemon's names; a schedule stays one."""
        values = {ours: group[optax] for ours, optax in self.scalars.items()}
        return values if decayed else {**values, self.decay: 0.0}
