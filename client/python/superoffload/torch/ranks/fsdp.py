"""What has to be known of FSDP2's inside: which memory it gathers, and when it begins to.

FSDP has no public names for either, up to torch 2.15. Those that are used here are looked for when an optimizer is
built, and a torch that lacks one is refused: without it an all-gather might bring parameters of the step before.
"""

import functools
import gc
import inspect
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import grpc
import torch

from superoffload._core.error import Error
from superoffload.torch.ranks import shards


class Reader(Protocol):
    """Who has something to do before FSDP reads shards."""

    def before_all_gather(self, parameters: Iterable[torch.Tensor], streams: Iterable[Any]) -> None:
        """The streams are about to read these sharded parameters."""


_readers: "weakref.WeakSet[Any]" = weakref.WeakSet()

_OF_PARAMETERS = ("sharded_param", "_sharded_param_data")
_OF_UNITS = ("fsdp_params", "is_sharded", "comm_ctx", "device_handle", "_training_state", "_all_gather_result")


@functools.cache
def _classes() -> tuple[Any, Any, Any]:
    """FSDP's own of a parameter, of a unit that is gathered at once, and of streams; raises Error for other ones."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup

        inspect.signature(FSDPParamGroup.unshard).bind(None, async_op=False)
        inspect.signature(FSDPCommContext.get_all_gather_streams).bind(None, False, None)
    except (ImportError, AttributeError, TypeError) as error:
        raise _refused(str(error)) from error
    return FSDPParam, FSDPParamGroup, FSDPCommContext


def _alive(kind: Any, names: Iterable[str]) -> list[Any]:
    """All things of a class of FSDP's; raises Error where one lacks a name."""
    things = [thing for thing in gc.get_objects() if type(thing) is kind]
    for thing in things:
        for name in names:
            if not hasattr(thing, name):
                raise _refused(f"{kind.__name__} has no {name}")
    return things


def _refused(what: str) -> Error:
    return Error(
        grpc.StatusCode.UNIMPLEMENTED,
        f"the FSDP2 of torch {torch.__version__} is not as it was in 2.11 to 2.15 ({what}): use one of those for "
        "sharded parameters on a GPU, or train on the CPU",
    )


def _flat(gathered: Any) -> torch.Tensor | None:
    """What an all-gather reads: a shard's elements, and behind them padding of which nobody reads a bit."""
    memory = None if gathered is None else gathered._sharded_param_data
    return memory if isinstance(memory, torch.Tensor) else None


def _gathered() -> list[Any]:
    """FSDP's own of each parameter that it gathers; raises Error where that cannot be known."""
    return _alive(_classes()[0], _OF_PARAMETERS)


def gathered_memory() -> set[int]:
    """Storages that all-gathers read."""
    memories = map(_flat, _gathered())
    return {memory.untyped_storage()._cdata for memory in memories if memory is not None}


class Gathered:
    """What FSDP has of sharded parameters, whose memory has more than their own elements."""

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

    def give(self, parameter: Any, mine: torch.Tensor) -> None:
        """The elements of this rank are these from now on, wherever they are."""
        flat = mine.new_empty(self.padded(parameter))
        flat[: mine.numel()].copy_(mine.view(-1))
        parameter._local_tensor = flat[: mine.numel()].view(mine.shape)
        self.take(parameter, flat)


def gathered_together() -> list[list[torch.Tensor]]:
    """The sharded parameters of each all-gather; raises Error where that cannot be known."""
    _gathered()
    units = _alive(_classes()[1], _OF_UNITS)
    return [[parameter.sharded_param for parameter in unit.fsdp_params] for unit in units]


def watch(reader: Reader, parameters: Iterable[torch.Tensor]) -> None:
    """Has ``reader`` be told of all-gathers, as long as it lives; raises Error where that cannot be."""
    if not any(map(shards.is_sharded, parameters)):
        return
    _, unit, _ = _classes()
    _alive(unit, _OF_UNITS)
    _install()
    _readers.add(reader)


def forget(reader: Reader) -> None:
    _readers.discard(reader)


@functools.cache
def _install() -> None:
    _, unit, context = _classes()
    original, streams_of = unit.unshard, context.get_all_gather_streams

    @functools.wraps(original)
    def unshard(group: Any, async_op: bool = False) -> Any:
        if _readers and group.is_sharded and group._all_gather_result is None:  # else it has begun
            # Of a group of one rank it copies on the current stream.
            streams = [streams_of(group.comm_ctx, async_op, group._training_state)[0]]
            streams.append(group.device_handle.current_stream())
            parameters = [parameter.sharded_param for parameter in group.fsdp_params]
            for reader in list(_readers):
                reader.before_all_gather(parameters, streams)
        return original(group, async_op)

    unit.unshard = unshard
