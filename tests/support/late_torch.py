"""Torch's streams on the fake driver: what torch computes is late, and memory that it frees is used again at once.

Torch computes on the host, before the call returns. Under `LateTorch` the result shows up later, when the current
stream comes to it: until then NaN is in its place. Before torch computes the next thing on that stream it waits for the
stream, as the GPU would. So who reads on another stream without waiting reads NaN. Parameters that torch reads must
still be the same when the stream gets there. Only floating point numbers are late: other streams read no others.
"""

import contextlib
import ctypes
import os
import pathlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

DRIVER = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "tests" / "support" / "fake-cuda" / "libcuda.so.1"

_NAN = 0xFF  # in each byte


class _Driver:
    """The fake driver's functions in a context; each must succeed."""

    def __getattr__(self, name: str) -> Any:
        driver = ctypes.CDLL(DRIVER)

        def call(*arguments: Any) -> None:
            context = ctypes.c_void_p()
            assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
            assert driver.cuCtxPushCurrent_v2(context) == 0
            code = getattr(driver, name)(*arguments)
            assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
            assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
            assert code == 0, f"{name}: {code}"

        return call


_driver = _Driver()


class Stream:
    """torch.cuda.Stream and torch.cuda.ExternalStream. 0 is the default stream, which is the calling thread."""

    def __init__(self, handle: int | None = None, device: object = None) -> None:
        if not isinstance(handle, int):
            made = ctypes.c_void_p()
            _driver.cuStreamCreate(ctypes.byref(made), 0)
            handle = made.value
        self.cuda_stream = handle

    def wait_stream(self, other: "Stream") -> None:
        event = ctypes.c_void_p()
        _driver.cuEventCreate(ctypes.byref(event), 0)
        _driver.cuEventRecord(event, ctypes.c_void_p(other.cuda_stream))
        _driver.cuStreamWaitEvent(ctypes.c_void_p(self.cuda_stream), event, 0)
        _driver.cuEventDestroy_v2(event)

    def synchronize(self) -> None:
        _driver.cuStreamSynchronize(ctypes.c_void_p(self.cuda_stream))

    def settle(self) -> None:
        """The stream has started, with the settings of now."""
        one = ctypes.create_string_buffer(1)
        self.copy(ctypes.addressof(one), ctypes.addressof(one), 1)
        self.synchronize()

    def copy(self, to: int, source: int, count: int) -> None:
        """When the stream gets there."""
        places = ctypes.c_uint64(to), ctypes.c_uint64(source)
        _driver.cuMemcpyDtoDAsync_v2(*places, ctypes.c_size_t(count), ctypes.c_void_p(self.cuda_stream))


class _Streams(threading.local):
    """Of each thread, innermost last."""

    def __init__(self) -> None:
        self.entered: list[Stream] = []


_streams = _Streams()
_default = Stream(0)


def current_stream(device: object = None) -> Stream:
    return _streams.entered[-1] if _streams.entered else _default


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    """torch.cuda.stream."""
    _streams.entered.append(stream)
    try:
        yield
    finally:
        _streams.entered.pop()


class Memory:
    """What becomes of storages that torch frees: the next tensor's values are there, but for streams that it minds."""

    def __init__(self) -> None:
        self.recorded: dict[int, list[Stream]] = {}  # by storage that is not freed
        self.records = 0  # ever
        self.of_graphs = False  # CUDA graph trees use it again, on the current stream, whatever was recorded
        self.failures: list[Exception] = []  # of the driver's, which end the process where torch frees memory
        self._watched: set[int] = set()

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.records += 1
        storage = tensor.untyped_storage()
        self.watch(storage)
        self.recorded.setdefault(storage.data_ptr(), []).append(stream)

    def watch(self, storage: torch.UntypedStorage, *before: Any) -> None:
        """``before``: are called with its address when it is freed."""
        address = storage.data_ptr()
        if address not in self._watched:
            self._watched.add(address)
            weakref.finalize(storage, self._on_freed, address, storage.nbytes(), *before).atexit = False

    def _on_freed(self, address: int, count: int, *before: Any) -> None:
        for call in before:
            call(address)
        self._watched.discard(address)
        recorded = self.recorded.pop(address, [])
        try:
            for stream in [current_stream()] if self.of_graphs else recorded:
                stream.synchronize()
        except AssertionError as failure:
            self.failures.append(failure)
        ctypes.memset(address, _NAN, count)


class LateTorch(TorchDispatchMode):
    """``parameters``: begin and end of memory that torch does not allocate."""

    def __init__(self, memory: Memory, parameters: list[tuple[int, int]]) -> None:
        super().__init__()
        self.memory = memory
        self.longer = 0  # by how many pieces of a stream's work what is computed now is later
        self._parameters = parameters
        self._late: dict[int, list[tuple[int, Any]]] = {}  # by stream: storages, and what it has yet to copy there
        self._reads: dict[int, list[tuple[bytes, Any]]] = {}  # by stream: what is to be read, and what was

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(function):  # nothing for a GPU to do
            return function(*args, **kwargs)
        stream = current_stream()
        self._finish(stream)
        given = [tensor for tensor in _pytree.tree_leaves((args, kwargs)) if _is_late(tensor)]
        written = [tensor for tensor in _pytree.tree_leaves(_written(function, args, kwargs)) if _is_late(tensor)]
        places = {id(tensor) for tensor in written}
        for tensor in given:
            if id(tensor) not in places:
                self._read(tensor, stream)
        result = function(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        made = [tensor for tensor in _pytree.tree_leaves(result) if _is_late(tensor)]
        for tensor in written + [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in known]:
            self._delay(tensor, stream)
        return result

    def _read(self, tensor: torch.Tensor, stream: Stream) -> None:
        begin, count = _span(tensor)
        if any(first <= begin and begin + count <= end for first, end in self._parameters):
            seen = ctypes.create_string_buffer(count)
            stream.copy(ctypes.addressof(seen), begin, count)
            self._reads.setdefault(stream.cuda_stream, []).append((ctypes.string_at(begin, count), seen))

    def _delay(self, tensor: torch.Tensor, stream: Stream) -> None:
        begin, count = _span(tensor)
        value = ctypes.create_string_buffer(ctypes.string_at(begin, count), count)
        ctypes.memset(begin, _NAN, count)
        for _ in range(self.longer):
            stream.copy(ctypes.addressof(value), ctypes.addressof(value), 1)
        stream.copy(begin, ctypes.addressof(value), count)
        self._late.setdefault(stream.cuda_stream, []).append((tensor.untyped_storage().data_ptr(), value))
        if not any(first <= begin < end for first, end in self._parameters):
            self.memory.watch(tensor.untyped_storage(), self._on_freed)

    def _finish(self, stream: Stream) -> None:
        stream.synchronize()
        self._late.pop(stream.cuda_stream, None)
        for value, seen in self._reads.pop(stream.cuda_stream, ()):
            assert seen.raw == value, "parameters have changed before torch's stream came to read them"

    def _on_freed(self, address: int) -> None:
        """The memory is not torch's any longer: what is late there comes now."""
        for handle, late in list(self._late.items()):
            if any(storage == address for storage, _ in late):
                Stream(handle).synchronize()

    def finish(self) -> None:
        """All streams have done what torch gave them."""
        for handle in {*self._late, *self._reads}:
            self._finish(Stream(handle))


def _is_late(value: Any) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return plain and value.device.type == "cpu" and value.is_floating_point() and value.numel() > 0


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its elements begin, and bytes up to the last one's end."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _is_view(function: Any) -> bool:
    aliases = [result.alias_info for result in function._schema.returns if result.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that the operator writes to."""
    found = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return found
