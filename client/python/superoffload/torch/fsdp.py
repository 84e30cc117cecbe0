"""What has to be known of FSDP2's inside: which memory it gathers, and when it begins to.

FSDP has no public names for either. Those that are used here are looked for when an optimizer is built, and a torch
that lacks them is refused: without them an all-gather might bring parameters of the step before.
"""

import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch import shards


class Reader(Protocol):
    def before_all_gather(self, parameters: Iterable[torch.Tensor], streams: Iterable[Any]) -> None:
        """The streams are about to read these sharded parameters."""


_readers: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _flat(gathered: Any) -> torch.Tensor | None:
    """What an all-gather reads: a shard's elements, and behind them padding of which nobody reads a bit."""
    memory = getattr(gathered, "_sharded_param_data", None)
    return memory if isinstance(memory, torch.Tensor) else None


def _gathered() -> list[Any]:
    """FSDP's own of each parameter that it gathers."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    except ImportError:
        return []
    return [thing for thing in gc.get_objects() if type(thing) is FSDPParam]


def gathered_memory() -> set[int]:
    """Storages that all-gathers read."""
    memories = map(_flat, _gathered())
    return {memory.untyped_storage()._cdata for memory in memories if memory is not None}


class OnMeta:
    """What FSDP has of sharded parameters that are on meta: they get memory once more than their own elements need."""

    def __init__(self) -> None:
        self._by_parameter = {id(gathered.sharded_param): gathered for gathered in _gathered()}

    def padded(self, parameter: torch.Tensor) -> int:
        """How many elements the memory of this rank's needs."""
        flat = _flat(self._by_parameter.get(id(parameter)))
        return max(shards.local(parameter).numel(), 0 if flat is None else flat.numel())

    def take(self, parameter: torch.Tensor, flat: torch.Tensor) -> None:
        """This memory is gathered from now on."""
        if id(parameter) in self._by_parameter:
            self._by_parameter[id(parameter)]._sharded_param_data = flat


def watch(reader: Reader, parameters: Iterable[torch.Tensor]) -> None:
    """Has ``reader`` be told of all-gathers, as long as it lives; raises Error where that cannot be."""
    if not any(map(shards.is_sharded, parameters)):
        return
    try:
        _install()
    except (ImportError, AttributeError) as error:
        raise Error(
            grpc.StatusCode.UNIMPLEMENTED,
            f"torch {torch.__version__} begins FSDP's all-gathers in a way that is not known here ({error}): use torch "
            "2.13 for sharded parameters on a GPU, or train on the CPU",
        ) from error
    _readers.add(reader)


def forget(reader: Reader) -> None:
    _readers.discard(reader)


@functools.cache
def _install() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup

    original, streams_of = FSDPParamGroup.unshard, FSDPCommContext.get_all_gather_streams

    @functools.wraps(original)
    def unshard(group: Any, async_op: bool = False) -> Any:
        if _readers and group.is_sharded:
            # Of a group of one rank it copies on the current stream.
            streams = [streams_of(group.comm_ctx, async_op, group._training_state)[0]]
            streams.append(group.device_handle.current_stream())
            parameters = [parameter.sharded_param for parameter in group.fsdp_params]
            for reader in list(_readers):
                reader.before_all_gather(parameters, streams)
        return original(group, async_op)

    FSDPParamGroup.unshard = unshard
