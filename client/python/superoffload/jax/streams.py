"""Which leaves stream: those of blocks, which are on the GPU while their layers compute."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

import grpc
import jax
import jax.numpy as jnp

from superoffload._core import blocks
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import NONE_STREAMS, Streamed
from superoffload.jax import tree
from superoffload.jax.tree import HostedLeaf

Weights = Literal["resident", "streamed"] | float

_SHARES = {"resident": 0.0, "streamed": 1.0}
_SLOTS = 3  # of GPU memory: one is read, while what is read next is on its way to the others


def check_weights(weights: Weights) -> None:
    """Raises ValueError for what says nothing of where weights are."""
    if weights in _SHARES or (isinstance(weights, (int, float)) and 0 <= weights <= 1):
        return
    raise ValueError(f"weights is {weights!r} but must be 'resident', 'streamed' or the part that streams, 0 to 1")


def place(hosted: Sequence[HostedLeaf], weights: Weights) -> tuple[list[HostedLeaf], Any | None]:
    """The leaves, which know from now on whether they stream, and the GPU that they are on, or stream to.

    None: the CPU, where none streams. Raises Error where there are no blocks.
    """
    share = _SHARES[weights] if isinstance(weights, str) else weights
    if share == 0:
        return list(hosted), tree.gpu_of(hosted)
    names = [re.sub(r"_(?=\d+\.)", ".", leaf.name) for leaf in hosted]  # Linen's lists: Block_0.kernel
    sizes = [leaf.nbytes for leaf in hosted]
    chosen = blocks.choose(names, sizes, share)
    units = blocks.units(names, sizes)
    placed = [
        dataclasses.replace(leaf, unit=unit, streams=unit in chosen) for leaf, unit in zip(hosted, units, strict=True)
    ]
    gpu = tree.gpu_of([leaf for leaf in placed if not leaf.streams] or placed)
    if gpu is None:
        return list(hosted), tree.gpu_of(hosted)
    if not chosen:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"weights is {weights!r}, but no blocks are found that could stream: the parameters of each layer must be "
            "leaves of their own, below a number (layers.0, Block_0); those of a stack for jax.lax.scan stay, with "
            "weights='resident'",
        )
    return placed, gpu


def nothing(leaf: HostedLeaf, gpu: Any) -> jax.Array:
    """What a loop has of a leaf that streams: an array without elements, by which autodiff knows of its gradient."""
    return jax.device_put(jnp.zeros((0,), leaf.dtype), gpu)


def has_no_value(value: Any, leaf: HostedLeaf) -> bool:
    """Whether ``value`` is what `nothing` makes of a leaf that streams, or None."""
    return leaf.streams and (value is None or tuple(value.shape) == (0,))


def of(hosted: Sequence[HostedLeaf]) -> Streamed:
    """The units that stream."""
    units = frozenset(leaf.unit for leaf in hosted if leaf.streams)
    return Streamed(units, _SLOTS) if units else NONE_STREAMS
