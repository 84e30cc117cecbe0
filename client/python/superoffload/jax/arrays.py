"""JAX's arrays as memory, and memory as JAX's arrays. On the CPU both share it."""

from typing import Any

import jax
import numpy as np

from superoffload.jax import boxes
from superoffload.jax.boxes import Box

_ALIGNMENT = 64  # from which on XLA takes memory of others as it is


def memory_of(leaf: Any, dtype: np.dtype) -> np.ndarray:
    """Row-major, of ``dtype``; the array's own memory where it is like that."""
    return np.ascontiguousarray(np.asarray(leaf), dtype=dtype)


def pieces_of(leaf: Any, dtype: np.dtype, part: Box) -> list[tuple[int, np.ndarray]]:
    """The elements of ``part``, which this process has, as row-major memory: each piece with its first one's place."""
    pieces: list[tuple[int, np.ndarray]] = []
    for box, shard in _shards(leaf).items():
        common = box.intersection(part)
        if common is None:
            continue
        first = common.first_in(part)
        if first is None:  # columns
            return [(0, _assembled(leaf, dtype, part))]
        pieces.append((first, memory_of(np.asarray(shard)[common.slices_in(box)], dtype)))
    return pieces


def part_of(leaf: Any, dtype: np.dtype, part: Box) -> np.ndarray:
    """The elements of ``part``, which this process has, as row-major memory."""
    pieces = pieces_of(leaf, dtype, part)
    return pieces[0][1] if len(pieces) == 1 else _assembled(leaf, dtype, part)


def sharded_as(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
    """With several processes: ``leaf`` where its parameter is. All processes call it."""
    if leaf.sharding.is_equivalent_to(sharding, leaf.ndim) or leaf.is_fully_replicated:
        return leaf
    return jax.device_put(leaf, sharding)


def _shards(leaf: Any) -> dict[Box, Any]:
    if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
        return {boxes.whole(leaf.shape): leaf}
    return {boxes.of_index(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}


def _assembled(leaf: Any, dtype: np.dtype, part: Box) -> np.ndarray:
    memory = empty(part.shape, dtype)
    for box, shard in _shards(leaf).items():
        if (common := box.intersection(part)) is not None:
            memory[common.slices_in(part)] = np.asarray(shard)[common.slices_in(box)]
    return memory


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that becomes a JAX array without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw: np.ndarray = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)


def to_jax(memory: np.ndarray, local: Box, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Nobody may write ``memory``, which has the elements of ``local``, afterwards: on one device the array has it."""
    if sharding is None or len(sharding.device_set) == 1:
        return jax.device_put(memory, jax.devices("cpu")[0] if sharding is None else sharding, may_alias=True)
    return jax.make_array_from_callback(
        shape, sharding, lambda index: memory[boxes.of_index(index, shape).slices_in(local)]
    )
