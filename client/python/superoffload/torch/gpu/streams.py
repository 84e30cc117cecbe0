"""Blocks whose parameters stream, which take turns at slots, and who reads them: modules, or FSDP's all-gathers.

Another order of reads than the last time has values come later, and the right ones. Who computes with a parameter when
its block has not been read is found by its gradient. In the first steps every operation on a parameter is looked at,
too; later those out of the passes through the model.
"""

import abc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import grpc
import torch
from torch.utils._pytree import tree_leaves

from superoffload._core import blocks
from superoffload._core.error import Error
from superoffload._core.gpu_attachment import NONE_STREAMS, Streamed
from superoffload.torch import cuda
from superoffload.torch.gpu.options import Weights
from superoffload.torch.guards.reads import UseWatch
from superoffload.torch.hooks import weakly
from superoffload.torch.ranks import fsdp, shards
from superoffload.torch.ranks.shards import HostedParameter

_SHARES = {"resident": 0.0, "streamed": 1.0, "auto": 1.0}  # that can stream
# Steps in which every operation on a parameter that streams is looked at; later only those between a step and the next
# forward pass, and after one without gradients.
_WATCHED = 3


def _names_and_sizes(hosted: Sequence[HostedParameter]) -> tuple[list[str], list[int]]:
    return [parameter.name for parameter in hosted], [parameter.local.nbytes for parameter in hosted]


def count(hosted: list[HostedParameter]) -> int:
    """How many blocks there are."""
    return blocks.count(*_names_and_sizes(hosted))


def choose(hosted: list[HostedParameter], weights: Weights, slots: int) -> Streamed:
    """Which units of `parameters.specification` stream, evenly among the others, so that computing hides each copy."""
    share = _SHARES[weights] if isinstance(weights, str) else weights
    if share == 0:
        return NONE_STREAMS
    return Streamed(frozenset(blocks.choose(*_names_and_sizes(hosted), share)), slots)


def obstacle_of_ranks(hosted: Sequence[HostedParameter], streamed: Streamed) -> str:
    """Why blocks of several ranks cannot stream: FSDP has to gather each by itself. Empty: they can."""
    numbers = blocks.units(*_names_and_sizes(hosted))
    units = {id(p.tensor): unit for p, unit in zip(hosted, numbers, strict=True)}
    gathered = fsdp.gathered_together() if any(shards.is_sharded(parameter.tensor) for parameter in hosted) else []
    known = {id(tensor) for together in gathered for tensor in together}
    for parameter in hosted:
        alone = parameter.rows is None and parameter.matrix is None and shards.is_in_parts(parameter.tensor)
        if units[id(parameter.tensor)] in streamed.units and not (alone and id(parameter.tensor) in known):
            return f"FSDP does not gather {parameter.name}; call fully_shard() for each block"
    for together in gathered:
        if len({units.get(id(tensor), 0) for tensor in together} & streamed.units) > 1:
            return "FSDP gathers several blocks at once; call fully_shard() for each block"
    return ""


class Units(Protocol):
    """What takes turns at slots: `GpuAttachment`, `FrozenBlocks`."""

    @property
    def staying(self) -> frozenset[int]: ...
    @property
    def slot_changes(self) -> int:
        """Counts what may have changed which units are in their slots."""
        ...

    def read_unit(self, unit: int, stream: int) -> None: ...
    def has_unit(self, unit: int) -> bool: ...


class StreamReader(abc.ABC):
    """Parameters that stream, and which units have been read.

    ``units``: of each of ``parameters``, from 1 on; 0: it does not stream. ``otherwise``: what keeps them from
    streaming. What has no underscore is also for the readers that derive from this one.
    """

    def __init__(
        self, source: Units, parameters: Sequence[HostedParameter], units: Sequence[int], otherwise: str
    ) -> None:
        self.source = source
        self.otherwise = otherwise
        self.units = {id(p.tensor): unit for p, unit in zip(parameters, units, strict=True) if unit}
        self.read: set[int] = set()  # since the last step
        self._streamed = [p for p, unit in zip(parameters, units, strict=True) if unit]
        self._last: tuple[int, int, int] | None = None  # unit and stream of the last read, and `slot_changes` then
        self._steps = 0
        self._uses = UseWatch(self._streamed, weakly(self._check_use, passes=2))
        self._uses.begin()

    @property
    def nbytes(self) -> int:
        """Of the parameters that stream, and do not stay."""
        staying = self.source.staying
        return sum(p.local.nbytes for p in self._streamed if self.units[id(p.tensor)] not in staying)

    def close(self) -> None:
        self._uses.end()

    def streams(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self.units

    def on_step_end(self) -> None:
        self._last = None
        self.read.clear()
        self._steps += 1
        self._uses.begin()

    def begin_watch_of_evaluation(self) -> None:
        """It may end here."""
        if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            self._uses.begin()

    def end_watch(self) -> None:
        """A pass through the model begins, or goes on."""
        if self._steps >= _WATCHED:
            self._uses.end()

    def read_unit(self, unit: int, stream: int) -> None:
        if cuda.is_capturing():
            raise Error(
                grpc.StatusCode.FAILED_PRECONDITION,
                "a CUDA graph is being captured of a block that streams, whose replays would not bring its "
                f"parameters; capture what stays on the GPU, or {self.otherwise}",
            )
        if self._last == (unit, stream, self.source.slot_changes):
            return
        self.source.read_unit(unit, stream)
        self.read.add(unit)
        self._last = unit, stream, self.source.slot_changes

    def _check_use(self, tensor: torch.Tensor, indices: Sequence[int]) -> None:
        """Raises Error for an operation on a parameter that is not of the block that was read last."""
        last = self._last[0] if self._last is not None else 0
        unit = self.units.get(id(tensor), 0)
        others = [self._streamed[index] for index in indices]
        if last and last in ([unit] if unit else [self.units[id(parameter.tensor)] for parameter in others]):
            return
        names = sorted(parameter.name for parameter in others if not unit or self.units[id(parameter.tensor)] == unit)
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"parameter {' or '.join(names)} streams, and is used outside of its block's forward, when its place may "
            f"have another's values. model.state_dict() has its value; or {self.otherwise}",
        )

    def check_read(self, parameter: HostedParameter) -> None:
        """Autograd has a gradient of it. Raises Error where that may have come of other values than its own."""
        unit = self.units.get(id(parameter.tensor), 0)
        if unit == 0 or (unit in self.read and self.still_there(unit)):
            return
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"parameter {parameter.name} streams, and its gradient was computed without calling a module of its block, "
            "or when another block had its place: its value may have been another's. Nothing was committed. Use it in "
            f"the forward of its block only, or {self.otherwise}",
        )

    @abc.abstractmethod
    def before_forward(self, module: torch.nn.Module) -> None: ...
    @abc.abstractmethod
    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        """Also where the call has raised."""

    @abc.abstractmethod
    def before_all_gather(self, parameters: Iterable[torch.Tensor], streams: Iterable[int]) -> None:
        """These sharded parameters are about to be read, on the streams."""

    @abc.abstractmethod
    def on_traced(self, around: Sequence[torch.nn.Module]) -> None:
        """``around``: modules that are being called, the first of which is compiled as a whole. Empty: a function is.

        Raises Error where several blocks are in it, whose parameters cannot come one after the other.
        """

    @abc.abstractmethod
    def still_there(self, unit: int) -> bool:
        """Whether who computed a gradient with what was read of the unit has had its values."""


class Streams(StreamReader):
    """A module reads its block when it is called, and so does whatever autograd made of the block's output, before it
    computes gradients.

    ``call_around`` has a module that is compiled in place call `before_forward` and `after_forward`."""

    def __init__(
        self,
        source: Units,
        parameters: Sequence[HostedParameter],
        units: Sequence[int],
        call_around: Callable[[torch.nn.Module], None],
        otherwise: str = "pass weights='resident'",
    ) -> None:
        super().__init__(source, parameters, units, otherwise)
        self._call_around = call_around
        self._like = parameters[0].tensor
        self._of_module: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()  # 0: none
        # Modules with parameters of one block, in those that have several.
        self._blocks_in: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[torch.nn.Module]]
        self._blocks_in = weakref.WeakKeyDictionary()
        self._calls: list[tuple[weakref.ref[torch.nn.Module], int]] = []  # under way: the outermost modules of a unit
        self._before_backward = {unit: weakly(self._read_unit, unit) for unit in set(self.units.values())}

    def before_forward(self, module: torch.nn.Module) -> None:
        if not self.units:
            return
        unit = self._unit_of(module)
        if not unit:
            for block in self._blocks_in.get(module, ()):
                self._call_around(block)
            return
        self._read_unit(unit)
        if not self._calls or self._calls[-1][1] != unit:
            self._calls.append((weakref.ref(module), unit))

    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        """Whatever comes of a block's output reads it again before its backward."""
        if not self._calls or self._calls[-1][0]() is not module:
            return
        _, unit = self._calls.pop()
        if not self._calls:
            self.begin_watch_of_evaluation()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._before_backward[unit])

    def on_traced(self, around: Sequence[torch.nn.Module]) -> None:
        if not self.units or self._calls:  # else it is inside of a block, which has read
            return
        unit = self._unit_of(around[0]) if around else 0
        if unit:
            self._read_unit(unit)
        elif not (around and self.units.keys().isdisjoint(map(id, around[0].parameters()))):
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                "blocks that stream are compiled together, and their parameters cannot be brought one after the other; "
                f"compile each of them (block.compile()), or {self.otherwise}",
            )

    def on_step_end(self) -> None:
        super().on_step_end()
        self._calls.clear()

    def before_all_gather(self, parameters: Iterable[torch.Tensor], streams: Iterable[int]) -> None:
        """None of these parameters is sharded."""

    def still_there(self, unit: int) -> bool:
        return self.source.has_unit(unit)

    def _unit_of(self, module: torch.nn.Module) -> int:
        found = self._of_module.get(module)
        if found is None:
            found = self._of_module[module] = self._find_unit(module)
            if found == 0 and not self.units.keys().isdisjoint(map(id, module.parameters())):
                self._blocks_in[module] = weakref.WeakSet(part for part in module.modules() if self._unit_of(part))
        return found

    def _find_unit(self, module: torch.nn.Module) -> int:
        """That of a module with parameters of one block, or of those that are the module's own."""
        for recurse in (True, False):
            units = {self.units.get(id(parameter), 0) for parameter in module.parameters(recurse)} - {0}
            if len(units) < 2:
                return units.pop() if units else 0
        raise Error(
            grpc.StatusCode.UNIMPLEMENTED,
            f"a {type(module).__name__} has parameters of several blocks that stream as its own; {self.otherwise}",
        )

    def _read_unit(self, unit: int) -> None:
        self.end_watch()
        self.read_unit(unit, cuda.current_stream(self._like))


class GatheredStreams(StreamReader):
    """FSDP reads what this rank has of a block when it gathers it, in forward and in backward.

    Computing needs a block's slot no more once it is gathered.
    """

    def __init__(self, source: Units, parameters: Sequence[HostedParameter], units: Sequence[int]) -> None:
        super().__init__(source, parameters, units, "pass weights='resident'")
        self._outermost: weakref.ref[torch.nn.Module] | None = None  # of the modules that are being called

    def before_forward(self, module: torch.nn.Module) -> None:
        if self._outermost is None or self._outermost() is None:
            self._outermost = weakref.ref(module)
            self.end_watch()  # not within a block, which may be compiled

    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        if self._outermost is not None and self._outermost() is module:
            self._outermost = None
            self.begin_watch_of_evaluation()

    def before_all_gather(self, parameters: Iterable[torch.Tensor], streams: Iterable[int]) -> None:
        for unit in {self.units.get(id(parameter), 0) for parameter in parameters} - {0}:
            for stream in streams:
                self.read_unit(unit, stream)

    def on_traced(self, around: Sequence[torch.nn.Module]) -> None:
        """FSDP gathers outside of what is compiled."""

    def on_step_end(self) -> None:
        super().on_step_end()
        self._outermost = None

    def still_there(self, unit: int) -> bool:
        return True  # it was gathered
