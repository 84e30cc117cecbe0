"""What the adapter asks of torch's GPU support, and nothing else does."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def of_rank(local: int) -> torch.device | None:
    """The GPU of the process that is the ``local``-th on this machine, current from now on; None without any GPU.

    Raises ValueError where there are fewer.
    """
    if not torch.cuda.is_available():
        return None
    if local >= torch.cuda.device_count():
        raise ValueError(f"rank {local} of this machine has no GPU: it has {torch.cuda.device_count()}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def resolve(device: str | int | torch.device) -> torch.device:
    """Returns a GPU with its number."""
    found = torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"device is {device!r} but must be a GPU, as in 'cuda' or 'cuda:0'")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def ordinal(device: torch.device) -> int:
    """Returns the number of a GPU, as this process counts them."""
    return device.index


def synchronize(device: torch.device) -> None:
    """Waits until the GPU has done what it was given."""
    torch.cuda.synchronize(device)


def release_cached(device: torch.device) -> None:
    """Has torch's allocator give back GPU memory that nothing is in."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def cached_bytes(device: torch.device) -> int:
    """GPU memory that torch's allocator keeps though nothing is in it: beside something that is, in one segment."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def allocated_bytes(device: torch.device) -> int:
    """GPU memory that this process's tensors are in."""
    return torch.cuda.memory_allocated(device)


def free_bytes(device: torch.device) -> int:
    """GPU memory that new tensors can be in."""
    return torch.cuda.mem_get_info(device)[0] + cached_bytes(device)


def is_integrated(device: torch.device) -> bool:
    """Whether the GPU has no memory of its own."""
    return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def total_bytes(device: torch.device) -> int:
    """Returns how much memory the GPU has."""
    return torch.cuda.mem_get_info(device)[1]


def used_bytes(device: torch.device) -> int:
    """Returns how much of the GPU's memory all processes use."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def reserved_bytes(device: torch.device) -> int:
    """GPU memory that torch's allocator has, cached_bytes() included."""
    return torch.cuda.memory_reserved(device)


def peak_reserved_bytes(device: torch.device) -> int:
    """The most that reserved_bytes() was."""
    return torch.cuda.max_memory_reserved(device)


class FailedAllocations:
    """What torch's allocator has found no memory of the GPU for. With torch releases that do not tell it: nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = 0  # of the largest since the last take()
        _failed_allocations.add(self)
        _observe_failures()

    def note(self, device: int, size: int) -> None:
        if device == ordinal(self._device):
            self.bytes = max(self.bytes, size)

    def take(self) -> int:
        size, self.bytes = self.bytes, 0
        return size


_failed_allocations: weakref.WeakSet[FailedAllocations] = weakref.WeakSet()


@functools.cache
def _observe_failures() -> None:
    attach = getattr(torch._C, "_cuda_attachOutOfMemoryObserver", None)
    if attach is not None:
        attach(on_failed_allocation)


def on_failed_allocation(device: int, size: int, device_used: int, device_free: int) -> None:
    for failed in list(_failed_allocations):
        failed.note(device, size)


def stream_of(device: torch.device) -> int:
    """The stream on which this thread works with the GPU."""
    return torch.cuda.current_stream(device).cuda_stream


def current_stream(tensor: torch.Tensor) -> int:
    """The stream on which this thread works with the tensor's GPU."""
    return stream_of(tensor.device)


def is_capturing() -> bool:
    """Whether what this thread gives its GPU goes into a CUDA graph, and is not done now."""
    return torch.cuda.is_current_stream_capturing()


def handle(stream: Any) -> int:
    """Returns the driver's handle of a stream of torch."""
    return stream.cuda_stream


def view(pointer: int, like: torch.Tensor, owner: Any, device: torch.device | None = None) -> torch.Tensor:
    """GPU memory at `pointer` as a tensor of the dtype and shape of `like`; `owner` lives as long as it.

    It is on the same device as `like`, unless that is on none.
    """

    region = _Region(pointer, like.numel() * like.element_size(), owner)
    return torch.as_tensor(region, device=device or like.device).view(like.dtype).view(like.shape)


class _Region:
    """What torch makes a tensor of, which keeps it. Nothing here refers to it, so that it goes with the tensor."""

    def __init__(self, pointer: int, count: int, owner: Any) -> None:
        self._pointer, self._count = pointer, count
        self.owner = owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # The interface has no bfloat16, and torch looks at the bytes anyway.
        return {"shape": (self._count,), "typestr": "|u1", "data": (self._pointer, False), "version": 3}


def beside(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, this thread works with the GPU on a stream of its own, after what it was given on the present one."""
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def side_stream(device: torch.device) -> Any:
    """Makes a stream."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def on(stream: Any, *others: Any) -> Iterator[None]:
    """Inside, this thread works on the stream, after what the others, and the present one, were given."""
    for other in (torch.cuda.current_stream(getattr(stream, "device", None)), *others):
        stream.wait_stream(other)
    with torch.cuda.stream(stream):
        yield


def wait(device: torch.device, stream: Any) -> None:
    """Has the present stream wait for what the other one was given."""
    torch.cuda.current_stream(device).wait_stream(stream)


def register_host(memory: torch.Tensor) -> None:
    """Copies from and to it need no thread to wait for them, until `unregister_host`."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unregister_host(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def keep_for_stream(tensor: torch.Tensor, stream: int) -> None:
    """The tensor's memory is not reused before `stream` has done what is on it now."""
    other = torch.cuda.ExternalStream(stream, device=tensor.device)
    if is_allocators(tensor):
        tensor.record_stream(other)
    else:
        torch.cuda.current_stream(tensor.device).wait_stream(other)


def begin_read(flag: torch.Tensor) -> Callable[[], bool]:
    """Whether the flag was set when the present stream came to it. The call of what is returned waits for that."""
    copy = pinned_like(flag).copy_(flag, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(flag.device))

    def read() -> bool:
        copied.synchronize()
        return bool(copy)

    return read


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor on the host, where copies from and to a GPU need no thread to wait for them."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def is_allocators(tensor: torch.Tensor) -> bool:
    """Whether torch's allocator frees the tensor's memory, and so minds `record_stream`.

    CUDA graph trees (``torch.compile(mode="reduce-overhead")``) take memory back by themselves. A release that does not
    tell is taken for one that does so everywhere.
    """
    tells = getattr(torch._C, "_has_Standard_Deleter", None)
    return tells is not None and bool(tells(tensor.untyped_storage()._cdata))


def pci_address(device: torch.device | None) -> str | None:
    """Returns the address as the kernel writes it, "0009:01:00.0"; None without a GPU, or where torch does not tell."""
    if device is None:
        return None
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
