"""Inputs of checkpointed blocks, which leave the GPU in the forward pass and come back ahead of the backward pass.

They go to memory of the daemon's, each on a stream of its own, and computing waits for none of that but what it needs
next. Only those leave for which the GPU has no room: at first all, since what the loop needs is not known, then as many
as must. What a copy brings back has the same bits.

Weights stay before activations do: these go down in the forward pass and up in the backward pass, when the link has
little else to do in that direction; weights that stream are copied up in both, and updated while nothing computes.
"""

import functools
import mmap
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import grpc
import torch
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook

from superoffload._core import warn
from superoffload._core.error import Error
from superoffload.torch import cuda
from superoffload.torch.gpu.lent_memory import LentMemory, Piece
from superoffload.torch.gpu.room import GpuRoom
from superoffload.torch.hooks import gone_with, weakly

_LEAST_BYTES = 64 << 10  # of a tensor that leaves
_SLACK = 0.02  # of the GPU's memory, left free
_FIRST_STEPS = 6  # in which everything leaves; blocks of weights that stay have found their room by then (staying.py)
_CHECKPOINT_FRAMES = 3  # from a pack hook to who has called the autograd function that saves


class Lender(Protocol):
    """An optimizer."""

    def lend_memory(self, size: int) -> mmap.mmap: ...


def offload_activations(
    model: torch.nn.Module, optimizer: Lender, device: str | int | torch.device = "cuda", resident_share: float = 0.92
) -> "ActivationOffload":
    """Has inputs of a model's checkpointed blocks leave the GPU as far as they do not fit.

    Args:
        model: calls torch.utils.checkpoint, with or without reentrance, as transformers does after
            ``gradient_checkpointing_enable()``, also with ``{"offload": True}``, whose blocking copies it replaces.
        optimizer: of superoffload.torch; its daemon lends the memory.
        device: the GPU.
        resident_share: of the GPU's memory that may be in use, by everybody, with what stays; 0: everything leaves.

    Until ``close()`` of what is returned, or as long as the model lives.
    """
    return ActivationOffload(model, optimizer, cuda.resolve(device), resident_share)


class _Kept:
    """A tensor that stays. Whoever writes to it is told so, as by torch."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def value(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(self.tensor.shape)}, at version {self.tensor._version} instead of {self.version}"
            )
        return self.tensor


class _Left:
    """A tensor that has left, for as long as autograd needs it."""

    def __init__(self, number: int, like: torch.Tensor, piece: Piece, memory: LentMemory) -> None:
        self.number, self.like, self.piece = number, like, piece
        self.back: torch.Tensor | None = None  # on its way to the GPU, or there
        self._memory = memory

    def __del__(self) -> None:
        self._memory.give_back(self.piece)


class _Seen(NamedTuple):
    storage: StorageWeakRef
    begin: int
    version: int
    left: "weakref.ref[_Left]"


class ActivationOffload:
    """See `offload_activations`."""

    def __init__(self, model: torch.nn.Module, optimizer: Lender, device: torch.device, resident_share: float) -> None:
        self._device, self._share = device, resident_share
        self._lender = weakref.ref(optimizer)  # the model keeps this
        self._memory = LentMemory(self._lend, device)
        self._down, self._up = cuda.side_stream(device), cuda.side_stream(device)
        self._contexts: list[Any] = []  # of calls of the model that are under way
        self._left: weakref.WeakValueDictionary[int, _Left] = weakref.WeakValueDictionary()
        self._count = 0  # ever
        self._seen: dict[int, _Seen] = {}  # by storage
        self._room: GpuRoom | None = None
        self._steps = 0
        self._may_stay = 0.0  # bytes
        self._total = self._stayed = 0  # bytes in this forward pass
        self._last_total, self._most_stayed, self._gone = 0, 0, 0
        self._lacks_memory = False
        self._blocking: list[tuple[torch.nn.Module, Any]] = []
        self._checkpointing = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._handles = [
            model.register_forward_pre_hook(lambda *_: self._enter()),
            model.register_forward_hook(lambda *_: self._exit(), always_call=True),
            gone_with(self, register_optimizer_step_pre_hook(weakly(self._before_step))),
        ]

    @property
    def report(self) -> str:
        """What has left in the last forward pass, and of how much."""
        return (
            f"{self._gone / (1 << 20):.1f} of {self._last_total / (1 << 20):.1f} MiB of inputs of checkpointed blocks "
            f"leave the GPU, to {self._memory.nbytes / (1 << 20):.0f} MiB of the daemon's memory"
        )

    def close(self) -> None:
        """What has left comes back when backward needs it; nothing more leaves."""
        for handle in self._handles:
            handle.remove()
        while self._contexts:
            self._exit()
        for module, function in self._blocking:
            module._gradient_checkpointing_func = function
        self._blocking.clear()

    # Calls of the model.

    def _enter(self) -> None:
        if self._contexts or torch.compiler.is_compiling() or not torch.is_grad_enabled() or cuda.is_capturing():
            self._contexts.append(None)
            return
        if self._room is not None and self._room.was_lacking():
            self._may_stay = min(self._may_stay, self._fitting())
        self._replace_blocking()
        self._total = self._stayed = 0
        self._seen.clear()
        context = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda value: value())
        context.__enter__()
        self._contexts.append(context)

    def _exit(self) -> None:
        context = self._contexts.pop() if self._contexts else None
        if context is None:
            return
        context.__exit__(None, None, None)
        self._seen.clear()
        self._most_stayed = max(self._most_stayed, self._stayed)
        self._last_total, self._gone = self._total, self._total - self._stayed

    def _replace_blocking(self) -> None:
        """transformers' copies of what it checkpoints are on the stream that computes."""
        for module in self._checkpointing:
            function = module.__dict__.get("_gradient_checkpointing_func")
            if isinstance(function, functools.partial) and function.func.__qualname__.endswith(".checkpoint_func"):
                self._blocking.append((module, function))
                plain = functools.partial(torch.utils.checkpoint.checkpoint, **function.keywords)
                module._gradient_checkpointing_func = plain

    def _lend(self, size: int) -> mmap.mmap:
        lender = self._lender()
        if lender is None:
            raise Error(grpc.StatusCode.FAILED_PRECONDITION, "the optimizer whose daemon lends memory is gone")
        return lender.lend_memory(size)

    # What autograd saves.

    def _pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Returns what gives the tensor when it is needed."""
        if not _may_leave(tensor):
            return _Kept(tensor).value
        size = tensor.numel() * tensor.element_size()
        if again := self._sent(tensor):
            return functools.partial(self._bring, again)
        stays = self._total >= self._last_total - self._may_stay and self._stayed + size <= self._may_stay
        self._total += size
        left = None if stays else self._send(tensor, size)
        if left is None:
            self._stayed += size
            return _Kept(tensor).value
        storage = tensor.untyped_storage()
        place = StorageWeakRef(storage), tensor.data_ptr(), tensor._version
        self._seen[storage._cdata] = _Seen(*place, weakref.ref(left))
        return functools.partial(self._bring, left)

    def _sent(self, tensor: torch.Tensor) -> _Left | None:
        """The same tensor, if it has left in this forward pass: what several blocks are given."""
        seen = self._seen.get(tensor.untyped_storage()._cdata)
        if seen is None or seen.storage.expired() or (seen.begin, seen.version) != (tensor.data_ptr(), tensor._version):
            return None
        left = seen.left()
        return left if left is not None and left.like.shape == tensor.shape else None

    def _send(self, tensor: torch.Tensor, size: int) -> _Left | None:
        try:
            piece = self._memory.take(size)
        except Error as error:
            if not self._lacks_memory:
                self._lacks_memory = True
                warn.warn(f"activations stay on the GPU for which the daemon has no memory: {error}")
            return None
        self._count += 1
        left = _Left(self._count, torch.empty_like(tensor, device="meta"), piece, self._memory)
        with cuda.on(self._down, self._up):  # which may still read what was there before
            self._memory.view(piece, left.like).copy_(tensor, non_blocking=True)
        cuda.keep_for_stream(tensor, cuda.handle(self._down))
        self._left[left.number] = left
        return left

    def _bring(self, left: _Left) -> torch.Tensor:
        """Computing waits for it; the one before it is on its way then."""
        back = left.back if left.back is not None else self._fetch(left)
        left.back = None
        cuda.wait(self._device, self._up)
        before = self._left.get(left.number - 1)
        if before is not None and before.back is None:
            before.back = self._fetch(before)
        return back

    def _fetch(self, left: _Left) -> torch.Tensor:
        back = torch.empty_like(left.like, device=self._device)
        with cuda.on(self._up, self._down):
            back.copy_(self._memory.view(left.piece, left.like), non_blocking=True)
        cuda.keep_for_stream(back, cuda.handle(self._up))
        return back

    # What stays.

    def _before_step(self) -> None:
        self._steps += self._total > 0
        if self._room is not None:
            self._may_stay = self._fitting()
        elif self._steps >= _FIRST_STEPS:
            self._room = GpuRoom(self._device, self._share)
        self._most_stayed = 0

    def _fitting(self) -> float:
        assert self._room is not None, "it is asked for room"
        return max(0.0, self._room.for_us(self._most_stayed, _SLACK))


def _may_leave(tensor: torch.Tensor) -> bool:
    """Whether it is large, on a GPU, and saved by torch.utils.checkpoint. A copy has the same strides."""
    if not cuda.is_on_gpu(tensor) or type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return False
    if tensor.numel() * tensor.element_size() < _LEAST_BYTES or not tensor.is_contiguous():
        return False
    frame = sys._getframe(2).f_back
    for _ in range(_CHECKPOINT_FRAMES):
        if frame is not None and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = None if frame is None else frame.f_back
    return False
