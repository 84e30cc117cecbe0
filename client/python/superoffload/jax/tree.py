"""Which leaves of a pytree the daemon hosts, under which names, and in which groups."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import jax
import numpy as np

from superoffload._core import dtypes
from superoffload._core.error import Error
from superoffload.jax import cuda
from superoffload.jax.boxes import Box
from superoffload.jax.placement import Placement, check_global, place
from superoffload.v1 import optimizer_pb2

Path = Sequence[Any]
Leaves = list[tuple[str, Any]]  # names and leaves of a pytree, in its order; a leaf may be None


def name_of(path: Path) -> str:
    """``layers.0.kernel``; Flax's variables have a ``value`` at the end, which is no part of the name."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    if keys and isinstance(path[-1], jax.tree_util.GetAttrKey) and keys[-1] == "value":
        keys.pop()
    return ".".join(keys) or "parameters"


def named_leaves(tree: Any) -> tuple[Leaves, Any]:
    """With the tree's structure. None is a leaf: a gradient that is not there."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    return [(name_of(path), leaf) for path, leaf in leaves], structure


def prefix_values(prefix: Any, tree: Any) -> list[Any]:
    """What a pytree prefix, or a function that makes one of the parameters, says of each leaf of ``tree``."""
    if callable(prefix):
        prefix = prefix(tree)
    values: list[Any] = []
    is_leaf = lambda node: node is None  # noqa: E731

    def add(value: Any, subtree: Any) -> None:
        values.extend([value] * len(jax.tree.leaves(subtree, is_leaf=is_leaf)))

    jax.tree.map(add, prefix, tree, is_leaf=is_leaf)
    return values


@dataclasses.dataclass(frozen=True)
class HostedLeaf:
    """A leaf that daemons update: all of it that of one process, of several each its part."""

    position: int  # among all leaves of the tree
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    group: int
    sharding: jax.sharding.Sharding | None  # None: of NumPy's memory
    placement: Placement
    unit: int = 0  # the block that it is of, where some stream
    streams: bool = False  # to the GPU, while its layer computes

    @property
    def devices(self) -> int:
        return 1 if self.sharding is None else len(self.sharding.device_set)

    @property
    def part(self) -> Box:
        """What this process hosts; for a leaf of which it hosts something."""
        assert self.placement.part is not None
        return self.placement.part

    @property
    def elements(self) -> int:
        return self.part.elements

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def form(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def to_proto(self, state_in_float32: bool) -> optimizer_pb2.Parameter:
        dtype, part = dtypes.FLOATS[self.dtype.name], self.part
        parameter = optimizer_pb2.Parameter(
            name=self.name,
            shape=part.shape,
            dtype=dtype,
            gradient_dtype=dtype,
            group=self.group,
            unit=self.unit,
            state_in_float32=state_in_float32,
        )
        if part.shape != self.shape:
            parameter.global_shape.extend(self.shape)
            parameter.global_offset.extend(part.offset)
        return parameter


def _invalid(message: str) -> Error:
    return Error(grpc.StatusCode.INVALID_ARGUMENT, message)


def _check_leaf(name: str, leaf: Any) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise _invalid(f"parameter {name} is traced: call init() outside of jit, with the arrays themselves")
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise _invalid(
            f"leaf {name} is a {type(leaf).__name__}, but the daemon hosts arrays: make it one, or leave it out with "
            "trainable="
        )
    if leaf.dtype.name not in dtypes.FLOATS or leaf.size == 0:
        raise _invalid(
            f"leaf {name} is {leaf.dtype.name}{list(leaf.shape)}, but the daemon hosts bfloat16, float16 and float32 "
            "leaves that have elements: cast it, or leave it out with trainable="
        )


def gpu_of(hosted: Sequence[HostedLeaf]) -> Any | None:
    """The GPU that the leaves are on; None: they are on the CPU. Raises Error where some are elsewhere."""
    places = {
        leaf.name: None
        if leaf.sharding is None or not cuda.is_on_gpu(leaf.sharding)
        else next(iter(leaf.sharding.device_set))
        for leaf in hosted
    }
    if len(set(places.values())) > 1:
        first, *_ = names = list(places)
        other = next(name for name in names if places[name] != places[first])
        raise Error(
            grpc.StatusCode.UNIMPLEMENTED,
            f"parameters {first} and {other} are on different devices, but an optimizer hosts those of one GPU or of "
            "the CPU: move them with jax.device_put(params, device), or build an optimizer for each device",
        )
    return next(iter(places.values()), None)


def check_one_device(leaves: Sequence[HostedLeaf]) -> None:
    """Raises Error when a leaf is spread over several: programs that run on each of them would hand it over twice."""
    for leaf in leaves:
        if leaf.devices > 1:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"parameter {leaf.name} is spread over {leaf.devices} devices: inside of jit gradients are handed over "
                "from one device only, yet; call step(gradients) outside of jit",
            )


def check_none_streams(leaves: Sequence[HostedLeaf]) -> None:
    """Raises Error when a leaf streams, which a program that makes a step would have whole."""
    for leaf in leaves:
        if leaf.streams:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"parameter {leaf.name} streams: inside of jit step() returns all parameters, for which there may be "
                "no memory; have offloaded layers hand gradients over, and call finish() outside of jit",
            )


def check_one_shard(leaf: HostedLeaf) -> None:
    """Raises Error unless the process has one shard of the leaf, which an offloaded layer hands over in shard_map."""
    own = 1 if leaf.sharding is None else len(leaf.sharding.addressable_devices)
    if own > 1:
        check_one_device([leaf])
    if leaf.placement.divided:
        raise Error(
            grpc.StatusCode.UNIMPLEMENTED,
            f"parameter {leaf.name} is the same in several processes: an offloaded layer hands over shards of which "
            "each process has another; shard it, or pass its gradient to step() or finish() outside of jit",
        )


def collect(params: Any, trainable: Any, groups: Sequence[int]) -> list[HostedLeaf]:
    """The trainable leaves; raises Error for what cannot be hosted. ``groups``: of all leaves."""
    leaves, _ = named_leaves(params)
    wanted = [True] * len(leaves) if trainable is None else prefix_values(trainable, params)
    hosted = []
    for position, ((name, leaf), take) in enumerate(zip(leaves, wanted, strict=True)):
        if leaf is None or not take:
            continue
        _check_leaf(name, leaf)
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        hosted.append(
            HostedLeaf(
                position,
                name,
                tuple(leaf.shape),
                np.dtype(leaf.dtype),
                groups[position],
                sharding,
                place(name, position, leaf),
            )
        )
    if not hosted:
        raise _invalid("no leaf is trainable; there is nothing to optimize")
    names = [leaf.name for leaf in hosted]
    if len(twice := {name for name in names if names.count(name) > 1}) > 0:
        raise _invalid(f"two leaves have the name {min(twice)}; give the keys of the pytree other names")
    return hosted


def check_names(ours: Sequence[str], names: Sequence[str], what: str) -> None:
    """Raises Error unless they are those of the pytree that was given to init()."""
    if list(ours) == list(names):
        return
    missing, unknown = set(ours) - set(names), set(names) - set(ours)
    difference = f"it has no {min(missing)}" if missing else f"{min(unknown)} is new" if unknown else "the order is new"
    raise Error(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"the pytree of {what} is not that of init(): {difference}; close() this optimizer and build another for the "
        "new parameters, with restore= to go on from a checkpoint",
    )


def check_like(hosted: HostedLeaf, leaf: Any, what: str) -> None:
    """Raises Error when a leaf of another pytree is none of this one's."""
    if jax.process_count() > 1 and not isinstance(leaf, jax.core.Tracer):
        check_global(f"{hosted.name} in {what}", leaf)
    if tuple(leaf.shape) != hosted.shape:
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{hosted.name} is {list(leaf.shape)} in {what}, but was {list(hosted.shape)} in init(); "
            "close() this optimizer and build another for the new parameters",
        )


def group_values(defaults: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each group's hyper-parameters, by label."""
    for label, values in groups.items():
        if unknown := sorted(values.keys() - defaults.keys()):
            raise ValueError(f"group {label!r} has {', '.join(unknown)}, but a group may have {', '.join(defaults)}")
    return {label: {**defaults, **values} for label, values in groups.items()}
