"""Frozen blocks whose weights stream: the base of a low-rank adaptation, say, that is larger than a GPU's memory.

No optimizer and no daemon knows of them: each comes to its place on the GPU ahead of its use, as blocks that train do
(streams.py), from this process's memory.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import grpc
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from superoffload._core import blocks
from superoffload._core.error import Error
from superoffload.torch import cuda
from superoffload.torch.gpu import calling, forward
from superoffload.torch.gpu.frozen_values import FrozenValues
from superoffload.torch.gpu.state_dicts import StateDicts
from superoffload.torch.gpu.staying import Staying
from superoffload.torch.gpu.streams import Streams
from superoffload.torch.hooks import gone_with, weakly
from superoffload.torch.ranks import shards
from superoffload.torch.ranks.shards import HostedParameter

_of_module: "weakref.WeakKeyDictionary[torch.nn.Module, FrozenBlocks]" = weakref.WeakKeyDictionary()


def stream_frozen(
    model: torch.nn.Module,
    device: str | int | torch.device,
    weights: Mapping[str, torch.Tensor] | None = None,
    stream_slots: int = 3,
    resident_share: float = 0.92,
) -> "FrozenBlocks":
    """Has frozen parameters of a model's blocks stream to a GPU, whoever trains the others.

    The blocks are the list of modules that has most of the frozen parameters. Call it once it is known what is frozen
    (after get_peft_model(), say), and before ``model.to(device)``, which moves the rest. They lie in this process's
    memory, once. After the second step of any optimizer as many stay on the GPU as there is room for.

    Args:
        model: its parameters may be on the CPU, on the GPU, or on meta.
        device: a GPU, as in "cuda:0".
        weights: values of parameters on meta, by name, as of pretrained_weights().
        stream_slots: of GPU memory, each as large as the largest block, for blocks that do not stay.
        resident_share: of the GPU's memory that may be in use, by everybody, with blocks that stay; 0: none stays.

    Raises:
        Error: INVALID_ARGUMENT, for a model without frozen blocks, or of whose parameters there are no values;
            UNIMPLEMENTED, for parameters that are sharded or quantized, or a GPU that cannot map memory;
            RESOURCE_EXHAUSTED, out of GPU memory.
    """
    return FrozenBlocks(model, cuda.resolve(device), weights, stream_slots, resident_share)


class FrozenBlocks:
    """They stream as long as their modules live, or until ``close()``, which leaves the parameters on the CPU.

    Merge an adapter after that: what is written to a parameter that streams is lost, and the next forward or step()
    says so.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        weights: Mapping[str, torch.Tensor] | None,
        stream_slots: int,
        resident_share: float,
    ) -> None:
        parameters, units = _in_blocks(model)
        self._values = FrozenValues(parameters, units, stream_slots, weights)
        self._source = self._values.source
        cuda.release_cached(device)
        self._source.open(cuda.ordinal(device))
        self._values.bind(device)
        self._state_dicts = StateDicts({index: p.tensor for index, p in enumerate(parameters)}, self._values)
        self._streams = Streams(
            self, parameters, units, forward.call_around, otherwise="close() what stream_frozen() has returned"
        )
        self._staying = Staying(self._source, self._source.streamed, device, resident_share)
        on_step = gone_with(self, register_optimizer_step_post_hook(weakly(self._after_step)))
        self._handles = [*forward.hook(self, outputs=True), on_step]
        streaming = {id(parameter.tensor) for parameter in parameters}
        for module in model.modules():
            if not streaming.isdisjoint(map(id, module.parameters(recurse=False))):
                _of_module[module] = self
        # DistributedDataParallel would send each of them from one rank to the others.
        ignored = {parameter.name for parameter in parameters} | set(_ignored_by_ddp(model))
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)

    @property
    def report(self) -> str:
        """How many blocks stay on the GPU, and why; empty as long as none does."""
        return self._source.report

    # As ForwardWaits, of which nothing has to be waited for here.

    def before_forward(self, module: torch.nn.Module) -> None:
        self._streams.before_forward(module)

    def after_forward(self, module: torch.nn.Module, output: Any) -> None:
        self._streams.after_forward(module, output)

    def on_traced(self) -> None:
        self._streams.on_traced(calling.modules_around_compiled())

    # As GpuAttachment, for Streams.

    @property
    def staying(self) -> frozenset[int]:
        return self._source.staying

    @property
    def slot_changes(self) -> int:
        return self._source.slot_changes

    def read_unit(self, unit: int, stream: int) -> None:
        self._values.before_read(unit)
        if unit == 1:  # nobody reads another
            self._staying.after_zero_grad(_nothing_open)
        self._source.read_unit(unit, stream)

    def has_unit(self, unit: int) -> bool:
        return self._source.has_unit(unit)

    def _after_step(self) -> None:
        self._values.check_unwritten()
        self._streams.on_step_end()
        self._staying.after_step(watched=False, quiesce=_nothing_open)

    def close(self) -> None:
        if not self._handles:
            return
        while self._handles:
            self._handles.pop().remove()
        self._streams.close()
        self._state_dicts.close()
        self._values.close()


def _nothing_open() -> None:
    """Of no daemon's step."""


def _in_blocks(model: torch.nn.Module) -> tuple[list[HostedParameter], list[int]]:
    """The frozen parameters that are in blocks, with the number of each one's block."""
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad and p.numel() > 0]
    names, sizes = [name for name, _ in frozen], [tensor.numel() * tensor.element_size() for _, tensor in frozen]
    count = blocks.count(names, sizes)
    numbered = zip(frozen, blocks.units(names, sizes), strict=True)
    found = [(name, tensor, unit) for (name, tensor), unit in numbered if 1 <= unit <= count]
    if not found:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            "the model has no frozen parameters in a list of modules; call requires_grad_(False) first, or load the "
            "adapter",
        )
    for name, tensor, _ in found:
        if shards.is_sharded(tensor) or type(tensor) is not torch.nn.Parameter or tensor.layout != torch.strided:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"parameter {name} is sharded, quantized or sparse, and does not stream; keep the model on the GPU",
            )
    return [HostedParameter(tensor, name, 0) for name, tensor, _ in found], [unit for *_, unit in found]


def _ignored_by_ddp(model: torch.nn.Module) -> list[str]:
    return getattr(model, "_ddp_params_and_buffers_to_ignore", [])
