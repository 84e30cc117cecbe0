"""Parameter groups of a pytree: labels as in optax.multi_transform, masks as Optax's optimizers have them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from superoffload._core import stored
from superoffload.jax import tree
from superoffload.jax.algorithm import Algorithm
from superoffload.v1 import optimizer_pb2

_ALL = "all"
_OPTIM_BITS = "optim_bits"  # what a group's moments are kept in, if it says so


@dataclasses.dataclass
class _Compiled:
    """A schedule, and what it was at the count that was asked for last."""

    call: Any
    committed_steps: int | None = None
    value: float | None = None


class Groups:
    """What each group's scalars are at a step. A group is a label, with or without decay."""

    def __init__(
        self,
        algorithm: Algorithm,
        defaults: Mapping[str, Any],
        labels: Any,
        groups: Mapping[str, Mapping[str, Any]] | None,
        mask: Any,
    ) -> None:
        if (labels is None) != (groups is None):
            raise ValueError("labels= and groups= go together: labels of leaves, and each label's hyper-parameters")
        self._algorithm = algorithm
        self._values = tree.group_values({**defaults, _OPTIM_BITS: None}, {_ALL: {}} if groups is None else groups)
        self._labels, self._mask = labels, mask
        self._keys: list[tuple[str, bool]] = []
        self._compiled: dict[int, _Compiled] = {}  # by schedule
        for label, values in self._values.items():
            for name, value in values.items():
                if name == _OPTIM_BITS:
                    stored.check_optim_bits(value, algorithm.state_bits)
                elif callable(value):
                    if name != "learning_rate":
                        raise ValueError(f"{name} of group {label!r} is a schedule, but only learning_rate may be one")
                elif not math.isfinite(value):
                    raise ValueError(f"{name} of group {label!r} is {value} but must be finite")

    def assign(self, params: Any) -> list[int]:
        """The group of each leaf."""
        count = len(tree.named_leaves(params)[0])
        labels = [_ALL] * count if self._labels is None else tree.prefix_values(self._labels, params)
        decayed = [True] * count if self._mask is None else tree.prefix_values(self._mask, params)
        if unknown := {label for label in labels if label not in self._values}:
            raise ValueError(f"leaves have the label {min(map(str, unknown))}, but groups= has {list(self._values)}")
        keys = [(label, bool(decay)) for label, decay in zip(labels, decayed, strict=True)]
        self._keys = sorted(set(keys), key=keys.index)
        return [self._keys.index(key) for key in keys]

    def in_float32(self, leaf: tree.HostedLeaf) -> bool:
        """Whether the leaf's moments are kept in fp32, whatever those of others are."""
        label, _ = self._keys[leaf.group]
        optim_bits = self._values[label][_OPTIM_BITS]
        algorithm = self._algorithm
        return stored.in_float32(
            leaf.name, leaf.shape, leaf.dtype.name, algorithm.state_bits, algorithm.master_bits, optim_bits
        )

    def __len__(self) -> int:
        return len(self._keys)

    def _group(self, index: int) -> dict[str, Any]:
        label, decayed = self._keys[index]
        return self._algorithm.values(self._values[label], decayed)

    def scalars(self, names: Sequence[str], committed_steps: int) -> list[list[float]]:
        """Each group's values for the step that follows ``committed_steps``, in the order of ``names``."""
        rates: dict[int, float] = {}  # by schedule, which several groups may have

        def value_of(value: Any) -> float:
            if not callable(value):
                return float(value)
            if id(value) not in rates:
                rates[id(value)] = self._at(value, committed_steps)
            return rates[id(value)]

        return [[value_of(self._group(index)[name]) for name in names] for index in range(len(self))]

    def _at(self, schedule: Any, committed_steps: int) -> float:
        """As compiled, with the bits of steps inside of jit, unless that cannot be or is no longer what it says.

        It is called each time: what it reads of the loop, and whether it does, shows in nothing else.
        """
        now = float(schedule(jnp.asarray(committed_steps, jnp.int32)))
        value = self._compiled_at(schedule, committed_steps)
        if value is None:
            return now
        same = math.isclose(value, now, rel_tol=1e-4, abs_tol=1e-9)  # else it reads what the loop has changed
        return value if same else now

    def _compiled_at(self, schedule: Any, committed_steps: int) -> float | None:
        """None: Python branches on the count. It is run once for each count, and traced once."""
        known = self._compiled.get(id(schedule))
        if known is None:
            known = self._compiled[id(schedule)] = _Compiled(jax.jit(lambda count: jnp.asarray(schedule(count))))
        if known.committed_steps != committed_steps:
            try:
                known.value = float(known.call(jnp.asarray(committed_steps, jnp.int32)))
            except TypeError:
                known.value = None
            known.committed_steps = committed_steps
        return known.value

    def schedules(self, names: Sequence[str]) -> dict[int, Any]:
        """Schedules by the place of their scalar among those of all groups."""
        return {
            index * len(names) + place: self._group(index)[name]
            for index in range(len(self))
            for place, name in enumerate(names)
            if callable(self._group(index)[name])
        }

    def to_proto(self, committed_steps: int) -> list[optimizer_pb2.ParameterGroup]:
        names = list(self._algorithm.scalars)
        return [
            optimizer_pb2.ParameterGroup(
                scalars=[
                    optimizer_pb2.Scalar(name=name, value=value) for name, value in zip(names, values, strict=True)
                ]
            )
            for values in self.scalars(names, committed_steps)
        ]
