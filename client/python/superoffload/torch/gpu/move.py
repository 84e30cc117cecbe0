"""Moves a model's parameters into the GPU memory of its optimizer, so that they never exist there twice.

The memory is backed piece by piece. As soon as a parameter lies in it, the original is freed, and what torch's
allocator has no use for goes back to the driver before the next piece is asked for. So the GPU holds, beside the
parameters and what else was there, one piece and the parameter at hand at most; and what torch's allocator cannot give
back, because other tensors lie in the same segment of it. Parameters that come from the CPU, or from nowhere
(``meta``), leave nothing behind; of sharded ones only what this rank has is copied.

A DTensor's elements move, together with FSDP's memory of them. FSDP pads them to the size of the largest shard and
gathers the padding as well, of which nobody reads a bit: behind the elements it then finds those of other parameters.
A parameter that several ranks have whole stays on the GPU, or moves there as such; of the rows that this rank hosts
there is a copy.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import grpc
import torch

from superoffload._core.error import Error
from superoffload._core.gpu_attachment import GpuAttachment, Moved
from superoffload.torch import cuda, meta
from superoffload.torch.gpu.published import publish, published_of
from superoffload.torch.guards import aliases
from superoffload.torch.ranks import fsdp, shards
from superoffload.torch.ranks.shards import HostedParameter

_GRANULE_BYTES = 2 << 20  # in which GPU memory is mapped behind units that stream


@dataclasses.dataclass
class Moving:
    """What moves to a GPU. ``beside``: parameters that no daemon, or another rank's, hosts; ``weights``: of meta's."""

    hosted: list[HostedParameter]
    device: torch.device
    weights: Mapping[str, torch.Tensor] | None = None
    beside: Sequence[tuple[str, torch.Tensor]] = ()


def _whole_granules(size: int) -> int:
    return -(-size // _GRANULE_BYTES) * _GRANULE_BYTES


@torch.no_grad()
def move_in(moving: Moving, attachment: GpuAttachment) -> Moved:
    """Each parameter's data, and its ``theta``, lie in ``attachment.memory`` afterwards.

    What fails, for want of memory say, leaves the parameters where they are: those that have moved stay in that memory.
    """
    memory, device, hosted = attachment.memory, moving.device, moving.hosted
    assert memory is not None, "it is there when parameters move in"
    mover = _Mover(moving, attachment)
    if any(attachment.streamed_units):
        attachment.values_back = mover.move_back
    offsets = attachment.gpu_offsets
    cuda.release_cached(device)
    peak = cuda.used_bytes(device)
    has_slots = False  # for what streams, which lies behind the rest
    for index in sorted(range(len(hosted)), key=offsets.__getitem__):
        end = offsets[index] + mover.bytes_of(index)
        if not attachment.streamed_units[index] and end > memory.backed_bytes:
            cuda.release_cached(device)
            memory.back(end)
            peak = max(peak, cuda.used_bytes(device))
        elif attachment.streamed_units[index] and not has_slots:
            cuda.release_cached(device)
            memory.back_units(attachment.streamed.slots)
            peak = max(peak, cuda.used_bytes(device))
            has_slots = True
        mover.move(index, offsets[index])
    for name, tensor in moving.beside:
        mover.move_whole(name, tensor)
    cuda.release_cached(device)
    return Moved(cuda.stream_of(device), peak, cuda.cached_bytes(device))


class _Mover:
    """A parameter that several ranks have is copied by its rows, and stays on the GPU, or moves there as a whole."""

    def __init__(self, moving: Moving, attachment: GpuAttachment) -> None:
        self._hosted, self._device, self._weights = moving.hosted, moving.device, moving.weights
        self._attachment = attachment
        self._moved: set[int] = set()
        named = [(p.name, p.tensor, p.rows is None) for p in moving.hosted]
        named += [(name, tensor, False) for name, tensor in moving.beside]
        leaving = [
            (name, tensor)
            for name, tensor, goes in named
            if tensor.device.type != "meta" and (goes or shards.local(tensor).device != self._device)
        ]
        self._places = {id(tensor): place for place, (_, tensor) in enumerate(leaving)}
        padded = fsdp.gathered_memory() if any(shards.is_sharded(tensor) for _, tensor in leaving) else set()
        self._sharers = aliases.Sharers([(name, shards.local(tensor)) for name, tensor in leaving], padded)
        from_meta = [tensor for _, tensor, _ in named if tensor.device.type == "meta"]
        self._on_meta = fsdp.Gathered() if any(map(shards.is_sharded, from_meta)) else None

    def _elements(self, tensor: torch.Tensor) -> int:
        """Returns how many elements this rank needs memory for, padding included."""
        if tensor.device.type == "meta" and self._on_meta is not None:
            return self._on_meta.padded(tensor)
        mine = shards.local(tensor)
        spanned = self._sharers.span(self._places[id(tensor)]) if id(tensor) in self._places else 0
        return max(mine.numel(), spanned // mine.element_size())

    def bytes_of(self, index: int) -> int:
        parameter = self._hosted[index]
        if parameter.rows is not None:
            return parameter.local.nbytes
        return self._elements(parameter.tensor) * parameter.local.element_size()

    def move(self, index: int, offset: int) -> None:
        parameter, memory = self._hosted[index], self._attachment.memory
        assert memory is not None, "it is there when parameters move in"
        like = parameter.local.detach()
        padded = like.new_empty(1).expand(self.bytes_of(index) // like.element_size())
        streams = self._attachment.streamed_units[index] != 0
        if streams and offset + self.bytes_of(index) > _whole_granules(offset + like.nbytes):
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"parameter {parameter.name} cannot stream: FSDP gathers elements behind this rank's, which are fewer "
                "than others', and has no memory for them there; pass weights='resident'",
            )
        hold = memory.hold_units() if streams else memory.hold(offset, offset + self.bytes_of(index))
        flat = cuda.view(memory.address + offset, padded, hold, self._device)
        parameter.theta = flat[: like.numel()].view(like.shape)
        value = meta.value_of(parameter, self._weights)
        if value is not None and not streams:
            parameter.theta.copy_(value)
        elif value is not None and self._attachment.brings_parameters:
            publish(self._attachment, index, like, value)
        self._moved.add(index)
        if parameter.rows is None:
            self._set(parameter.name, parameter.tensor, flat)
        else:
            self.move_whole(parameter.name, parameter.tensor)

    @torch.no_grad()
    def move_back(self) -> None:
        """What streams has memory of its own, on the CPU."""
        sharded = any(shards.is_sharded(parameter.tensor) for parameter in self._hosted)
        gathered = fsdp.Gathered() if sharded else None
        for index, parameter in enumerate(self._hosted):
            if self._attachment.streamed_units[index] and index in self._moved:
                value = published_of(self._attachment, index, parameter.local).clone()
                if gathered is not None and shards.is_sharded(parameter.tensor):
                    gathered.give(parameter.tensor, value)
                else:
                    parameter.tensor.data = value

    def move_whole(self, name: str, tensor: torch.Tensor) -> None:
        """Moves a tensor to memory of torch's allocator, where it is not on the GPU.

        A frozen one that is on meta, and of which there are no weights, stays there.
        """
        value = meta.mine(name, tensor, self._weights)
        if shards.local(tensor).device == self._device or (value is None and not tensor.requires_grad):
            return
        flat = torch.empty(self._elements(tensor), dtype=tensor.dtype, device=self._device)
        if value is not None:
            flat[: value.numel()].view(value.shape).copy_(value)
        self._set(name, tensor, flat)

    def _set(self, name: str, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        """The elements of this rank, with padding, lie there from now on."""
        like = shards.local(tensor)
        mine = flat[: like.numel()].view(like.shape)
        if id(tensor) in self._places:
            self._sharers.move(self._places[id(tensor)], mine)
            return
        meta.replace(name, tensor, mine)
        if self._on_meta is not None:
            self._on_meta.take(tensor, flat)
